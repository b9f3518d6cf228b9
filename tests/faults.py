"""Faults on privacy, and the test that must notice each: `python -m tests.faults` plants them one
by one.

It says which was caught, and exits with 1 if one was not. `--only WORDS` takes those whose names
hold the words. Faults of the algorithm as a whole, which the neighbour replay finds, are in
`tests.test_replay_faults`.
"""

from __future__ import annotations

import argparse
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import datetime
from functools import cache, partial
from typing import Any
from unittest.mock import ANY, Mock, patch

import torch

from discreet.accounting.events import noise_in
from discreet.accounting.privacy_ledger import epsilon_of
from discreet.models.models import outputs_of
from discreet.per_example.attributes import HOOKS
from discreet.per_example.per_example import clipped_gradient_sum
from discreet.privacy.chacha import ChaCha
from discreet.protocol.messages import TrainReply
from discreet.training.failing_units import RAISES
from tests.planting import CAUGHT, Fault, always, verdict


def _unsynced(real: Any) -> Any:
    @contextmanager
    def connect(path: Any) -> Iterator[Any]:
        with real(path) as connection:
            connection.execute("pragma synchronous = normal")
            yield connection

    return connect


def _noised_first(_: Any) -> Any:
    def one_query(state: Any, answers: Any, replies: Any, ledger: Any, source: Any) -> Any:
        sums = answers.release(answers.add_up(replies, state), state, source)
        ledger.charge_answers(answers.event, state.round)
        return sums

    return one_query


def _half_the_noise(real: Any) -> Any:
    def noised_count(self: Any, below: int, source: Any) -> float:
        user = replace(self.run.user, count_stddev=self.run.user.count_stddev / 2)
        return real(replace(self, run=replace(self.run, user=user)), below, source)

    return noised_count


def _none_after_a_failure(_: Any) -> Any:
    failed = list[Exception]()

    def gradient_or_none(gradient: Any, *, failing: str) -> Any:
        try:
            return None if failed else gradient()
        except Exception as error:  # noqa: BLE001 - of the tested model
            failed.append(error)
            return None

    return gradient_or_none


class _InPlace:
    """An executor without a thread."""

    def __enter__(self) -> _InPlace:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, work: Callable[..., Any], *given: Any) -> Any:
        return Mock(result=partial(work, *given))


def _second_call(work: Callable[[], None]) -> Callable[[], None]:
    """`work` when it is called the second time."""
    calls: list[int] = []

    def called() -> None:
        calls.append(1)
        if len(calls) == 2:
            work()

    return called


def _caught(work: Any) -> Any:
    try:
        return work()
    except Exception:  # noqa: BLE001 - the fault: what derives from BaseException alone goes on
        return None


def _by_row(_: Any) -> Any:
    def each_alone(model: Any, batch: Any, owners: Any, **how: Any) -> Any:
        return clipped_gradient_sum(model, batch[0], targets=batch[1], **how)

    return each_alone


def _all_blocks(real: Any) -> Any:
    def run(self: Any, *given: Any, **more: Any) -> Any:
        everyone = [*range(self.policy.blocks.count)]
        with patch("discreet.guard.site_guard.drawn_blocks", always(everyone)(None)):
            return real(self, *given, **more)

    return run


def _none_if_late(real: Any) -> Any:
    def note_round(self: Any, summed: Any, message: Any, app: Any, slots: Any) -> None:
        real(self, summed, message, app, slots)
        if slots.over():
            summed.total.zero_()

    return note_round


def _state_of_another(real: Any) -> Any:
    @contextmanager
    def opened(blocks: Any, numbers: Any, states: Any) -> Iterator[Any]:
        with real(blocks, numbers, states) as inputs:
            yield [replace(each, state=inputs[0].state) for each in inputs]

    return opened


def _as_if_not_drawn(real: Any, alone: Any, *given: Any) -> Any:
    with patch.object(alone, "_check_drawn", always(None)(None)):
        return real(alone, *given)


def _known_key(real: Any) -> Any:
    return lambda: type(real())(bytes(32), is_secure=True)


def _answered(self: Any, work: Any, params: Any) -> TrainReply:
    values = self._values(work, params, self._admitted(work, params))
    return TrainReply(work.request.round, values.update, values.below, answer=values.answer)


def _noised_by_replies(real: Any) -> Any:
    def noised(self: Any, total: Any, keys: Any, number: int) -> Any:
        user = replace(
            self.run.user, noise_multiplier=self.run.user.noise_multiplier / max(1, total.replies)
        )
        return real(replace(self, run=replace(self.run, user=user)), total, keys, number)

    return noised


def _growing(real: Any) -> Any:
    def add_noise(self: Any, total: Any, *given: Any) -> Any:
        return total + real(self, torch.zeros_like(total), *given) * (1 + total.abs())

    return add_noise


BY_TEST = {
    # Clipping, noise and sampling.
    "privacy/test_clipping.py::test_no_row_leaves_with_more_than_the_clip_norm": Fault(
        "a clipped row may be longer than the clip norm by rounding",
        "privacy.clipping:CLIP_MARGIN",
        lambda _: 0.0,
    ),
    "training/test_local_training.py::test_one_example_moves_it_by_at_most_its_norm_and_none_give_zeros": Fault(
        "the gradients of a shared step are not clipped",
        "training.shared_step:gradients_in_turn",
        lambda real: lambda *args, clip_norm, **more: real(*args, clip_norm=1e9, **more),
    ),
    "privacy/test_randomness.py::test_secure_sources_and_their_children_never_repeat": Fault(
        "the key of a secure source is known", "privacy.randomness:secure_source", _known_key
    ),
    "privacy/test_mechanisms.py::test_noise_does_not_depend_on_the_total": Fault(
        "noise grows with its total", "privacy.mechanisms:Gaussian.add_noise", _growing
    ),
    "server/test_round.py::test_the_count_has_noise_of_its_standard_deviation": Fault(
        "the count of norms has half its noise",
        "mechanisms.central_gaussian:CentralGaussian._noised_count",
        _half_the_noise,
    ),
    "training/test_local_training.py::test_dp_sgd_draws_poisson_batches_and_noise_for_every_step": Fault(
        "DP-SGD noises its first step alone",
        "training.local_training:OneClient.add_noise",
        lambda real: (
            lambda self, sums, clip, *, step: sums if step else real(self, sums, clip, step=step)
        ),
    ),
    "test_neighbour_replay.py::test_an_owner_whose_rows_contribute_nothing_moves_each_step_within_the_clip": Fault(
        "the rows of an owner are clipped singly", "training.units:clipped_sum_by_owner", _by_row
    ),
    "node/test_owner_unit.py::test_a_step_reads_at_most_so_many_rows_of_an_owner_drawn_anew": Fault(
        "a step reads all rows of an owner",
        "privacy.owner_rows:OwnerRows.drawn",
        lambda _: lambda self, owner, source: self.rows[owner].tolist(),
    ),
    "node/test_owner_unit.py::test_it_charges_steps_over_owners_under_a_name_that_says_so": Fault(
        "a client whose unit is an owner counts rows",
        "node.client:units_of",
        lambda _: lambda examples, most: examples,
    ),
    "node/test_owner_unit.py::test_a_ledger_that_was_charged_for_the_other_unit_is_refused": Fault(
        "one ledger is charged for rows and for owners",
        "ledger.owner_account:check_unit",
        always(None),
    ),
    "server/test_round.py::test_a_poisson_cohort_is_empty_as_often_as_it_should_be": Fault(
        "a Poisson cohort is drawn again until it is not empty",
        "privacy.sampling:CohortSampling.draw",
        lambda real: (
            lambda self, members, source: real(self, members, source) or real(self, members, source)
        ),
    ),
    # Clients who take turns.
    "mechanisms/test_turn_replay.py::test_a_client_out_of_its_turn_is_not_counted": Fault(
        "a client is counted out of its turn", "privacy.sampling:in_turn", always(True)
    ),
    "mechanisms/test_turn_replay.py::test_rounds_repeated_from_old_files_cost_no_more_than_is_charged": Fault(
        "a round that is made again is charged as what it adds to those before it",
        "accounting.correlation:Turns.largest_move",
        lambda _: lambda self, number: float(self.moves()[number - 1]),
    ),
    "flower/test_turn_members.py::test_a_client_whose_number_changes_amid_a_run_costs_what_the_ledger_was_charged": Fault(
        "a node whose number changes amid a run takes part in another group",
        "run_files.run_members:RunMembers.among",
        lambda _: lambda self, connected: list(connected),
    ),
    "flower/test_turn_members.py::test_a_crash_between_a_release_and_its_checkpoint_leaves_the_nodes_as_they_were": Fault(
        "the nodes that take turns are forgotten in a crash after the first release",
        "run_files.run_members:RunMembers._has_begun",
        lambda _: property(lambda self: self.folder.checkpoint_path.exists()),
    ),
    # What a release costs.
    "accounting/test_pld_oracle.py::test_where_adding_a_member_costs_more_that_is_the_epsilon": Fault(
        "the PLD forgets the direction in which a member is added",
        "accounting.loss_distribution:_frames",
        lambda real: lambda *args: real(*args)[:1],
    ),
    "accounting/test_accounting.py::test_the_bound_holds_and_is_less_than_half_a_per_cent_above_the_exact_divergence": Fault(
        "a sum of discrete Gaussians is taken for one",
        "accounting.distributed_gaussian:convolution_gap",
        always(0.0),
    ),
    "simulation/test_private_evaluation.py::test_the_ledger_holds_what_was_planned_and_the_last_row_what_is_spent": Fault(
        "a round that also rates the model is charged as if it did not",
        "mechanisms.central_gaussian:CentralGaussian.event",
        lambda real: lambda self, number, **more: real(self, 1, **more),
    ),
    "mechanisms/test_answer_sum.py::test_the_ledger_is_charged_before_anything_is_noised": Fault(
        "a rating is noised before it is charged", "server.round:one_query", _noised_first
    ),
    "server/test_private_answers.py::test_what_is_asked_again_is_noised_anew": Fault(
        "statistics that are asked again draw the same noise",
        "accounting.privacy_ledger:PrivacyLedger.num_releases",
        lambda _: property(lambda self: 0),
    ),
    "cli/test_tune.py::test_the_cost_is_the_published_one": Fault(
        "a choice among trials costs as much as one of them",
        "simulation.tuning:selection_event",
        lambda real: lambda spent, *, trials: real(spent, trials=replace(trials, mean=1.0)),
    ),
    # Ledgers and budgets.
    "ledger/test_durable_ledger.py::test_a_charge_has_reached_the_disk_when_it_returns": Fault(
        "a charge may still be in memory when it returns",
        "ledger.durable_ledger:connected",
        _unsynced,
    ),
    "node/test_admission.py::test_budgets_are_looked_at_again_if_another_run_has_charged_a_client_meanwhile": Fault(
        "a charge goes through although another was made since the budget was looked at",
        "ledger.durable_ledger:_charged_since",
        always(set()),
    ),
    "run_files/test_lost_ledgers.py::test_on_another_machine_the_checkpoint_tells": Fault(
        "a run is resumed with a ledger that is older than its checkpoint",
        "ledger.durable_ledger:DurableLedger.contains",
        always(True),
    ),
    "server/test_training_run.py::test_what_decides_privacy_is_refused_by_the_name_that_was_typed": Fault(
        "a resumed run takes another noise multiplier",
        "run_files.resuming:CHANGEABLE",
        lambda names: (*names, "privacy.user.noise_multiplier"),
    ),
    "server/test_population_account.py::test_every_run_charges_it_and_its_own_ledger_says_what_it_cost_itself": Fault(
        "a run forgets to charge its population's account",
        "server.population_account:PopulationAccount.charge",
        lambda _: lambda self, charges: self.require_room(charges),
    ),
    "server/test_training_run.py::test_the_budget_ends_the_run_before_the_round_that_would_pass_it": Fault(
        "a run stops after the round that passed its budget",
        "ledger.budget:ServerBudget.require_room",
        lambda real: (
            lambda self, spent, charges, what="the next round": real(self, spent, [], what)
        ),
    ),
    "run_files/test_lost_ledgers.py::test_a_node_does_not_work_without_all_that_it_spent": Fault(
        "a ledger in the place of another one is charged",
        "ledger.rollback_guard:RollbackGuard.another_at",
        always(False),
    ),
    "dpsgd/test_schedules.py::test_each_step_is_accounted_by_its_own_noise": Fault(
        "a schedule is accounted at its first value",
        "dpsgd.loop_plan:stretches",
        lambda _: lambda values: [[values[0], len(values)]],
    ),
    "dpsgd/test_schedules.py::test_each_step_draws_the_noise_that_it_is_charged_for_the_clip_norm_that_clipped": Fault(
        "a step's noise is for the first clip norm of its schedule",
        "dpsgd.loop_plan:LoopPlan.released",
        lambda real: (
            lambda self, total, count, _, **more: real(
                self, total, count, self.first_clip_norm, **more
            )
        ),
    ),
    "dpsgd/test_reading.py::test_a_batch_is_drawn_once_although_it_is_read_again_after_an_error": Fault(
        "a batch that is read again is drawn again",
        "dpsgd.poisson_batches:PoissonBatches._positions",
        lambda real: lambda self, step: self.drawn.clear() or real(self, step),
    ),
    "dpsgd/test_state.py::test_without_a_ledger_the_steps_of_a_state_stay_spent_and_count_for_the_budget": Fault(
        "a loaded state rewinds the account",
        "dpsgd.step_account:StepAccount.resume",
        lambda _: lambda self, taken, position, **more: None,
    ),
    "dpsgd/test_processes.py::test_each_example_of_a_batch_is_in_one_process": Fault(
        "each process of a loop draws batches of its own",
        "dpsgd.poisson_batches:Processes.start",
        lambda _: lambda self, model, source: source,
    ),
    # What a model, a loss and a server may not do.
    "per_example/test_trial.py::test_a_loss_that_mixes_examples_is_refused": Fault(
        "a loss may mean a batch", "per_example.loss_trial:check_loss", always(None)
    ),
    "per_example/test_trial.py::test_a_forward_that_changes_a_parameter_or_a_buffer_is_refused_by_its_name": Fault(
        "a forward may change the model's own state", "per_example.trial:moved_since", always([])
    ),
    "per_example/test_watch.py::test_a_forward_whose_author_meant_a_batch_is_refused": Fault(
        "a forward may mean a batch", "per_example.agreement:_mixed", always(False)
    ),
    "per_example/test_watch.py::test_a_wrong_rule_is_noticed_on_made_up_examples": Fault(
        "a forward is not compared with what single examples give",
        "per_example.agreement:_tried_on",
        always(""),
    ),
    "per_example/test_watch.py::test_examples_that_answer_differently_are_run_apart": Fault(
        "all examples take the way of the first one", "layers.branches:are_alike", always(True)
    ),
    "per_example/test_watch.py::test_a_branch_on_what_was_drawn_is_not_watched": Fault(
        "a branch may read what was drawn at random",
        "layers.alone:Alone._check_drawn",
        always(None),
    ),
    "per_example/test_left_behind.py::test_what_an_outlier_leaves_on_a_module_reaches_no_later_step": Fault(
        "what a forward leaves on a module stays there",
        "per_example.attributes:Attributes.rebind",
        always([]),
    ),
    "per_example/test_left_behind.py::test_a_hook_on_all_modules_is_part_of_the_forward": Fault(
        "hooks on all modules are not looked at",
        "per_example.perceptron:_has_global_hooks",
        always(False),
    ),
    "per_example/test_left_behind.py::test_a_step_without_any_finite_gradient_is_an_error_and_costs_nothing": Fault(
        "a step may be noise alone", "per_example.per_example:check_finite", always(None)
    ),
    "per_example/test_scales.py::test_one_example_adds_at_most_the_clip_norm_and_its_reported_norm": Fault(
        "squares of norms are lost where they are too small for float32",
        "layers.terms:mass",
        lambda _: lambda values, order: values.flatten(1).abs().pow(order).sum(1),
    ),
    # Replies whose kind would follow the data.
    "training/test_failing_units.py::test_a_row_that_fails_counts_as_zero_and_the_others_as_without_it": Fault(
        "what a failed pass wrote into the model is seen by other rows",
        "per_example.apart:Snapshot.restore",
        always(None),
    ),
    "training/test_failing_units.py::test_each_other_row_is_clipped_to_the_clip_norm": Fault(
        "a gradient that is computed alone is not clipped",
        "training.failing_units:clip_by_norm",
        lambda _: lambda rows, clip_norm, order=2: (rows, rows.norm(dim=1)),
    ),
    "training/test_failing_units.py::test_a_row_that_fails_in_a_laplace_step_is_clipped_in_l1_beside_the_others": Fault(
        "a gradient that is computed alone is clipped in L2 where noise is for L1",
        "training.failing_units:clip_by_norm",
        lambda real: lambda rows, clip_norm, order=2: real(rows, clip_norm),
    ),
    "training/test_failing_units.py::test_an_owner_with_a_row_that_fails_counts_as_zero_with_all_rows": Fault(
        "an owner's rows that work count where another row fails",
        "training.units:Units.each",
        lambda _: (
            lambda self, drawn: (
                (some.inputs, some.targets)
                for some in (self.examples.subset(row.reshape(1)) for row in drawn.rows)
            )
        ),
    ),
    "training/test_failing_units.py::test_noise_alone_reads_no_example_and_is_that_of_every_step": Fault(
        "a reply of noise alone has no noise",
        "training.local_training:OneClient.add_noise",
        lambda _: lambda self, sums, clip_norm, *, step: sums,
    ),
    "node/test_kinds_of_reply.py::test_a_node_does_not_say_whether_it_holds_a_record": Fault(
        "a step without a finite gradient ends with an error at a node, too",
        "node.client:Client._update",
        lambda _: lambda self, *given: self._worked(*given, failing=RAISES),
    ),
    "node/test_kinds_of_reply.py::test_an_app_that_fails_behind_the_masked_mod_gives_a_vector_and_is_charged": Fault(
        "an app that fails behind the masked mod is an error",
        "flower.app_behind:read_from",
        lambda _: lambda app, message, context, read: read(app(message, context).content),
    ),
    "flower/test_local_dp_mod.py::test_a_reply_of_the_same_kind_leaves_whatever_the_app_does": Fault(
        "an app that calls sys.exit ends the process",
        "flower.app_behind:done_on_data",
        lambda _: _caught,
    ),
    "flower/test_app_behind.py::test_an_app_that_raises_anything_counts_as_no_change": Fault(
        "an app's KeyboardInterrupt goes through",
        "flower.app_behind:done_on_data",
        lambda _: _caught,
    ),
    "flower/test_app_behind.py::test_the_limit_of_an_apps_time_ends_before_its_noise_is_drawn": Fault(
        "noise is drawn under the alarm of the app",
        "node.time_limit:lift_limit",
        always(None),
    ),
    "flower/test_app_behind.py::test_what_an_app_writes_into_its_message_is_not_in_the_reply": Fault(
        "an app has the message whose metadata its reply takes",
        "flower.app_behind:deepcopy",
        lambda _: lambda message: message,
    ),
    "flower/test_app_behind.py::test_what_an_app_writes_into_its_context_is_not_there_for_the_next_message": Fault(
        "an app has the node's own configuration",
        "flower.app_behind:replace",
        lambda _: lambda given, **_: given,
    ),
    "simulation/test_one_owner_more.py::test_one_owner_more_moves_the_sum_by_at_most_the_clip_norm": Fault(
        "what a client holds out follows from the rank of its name",
        "data.partition:PartitionedExamples.name",
        lambda _: lambda self, client: client,
    ),
    "flower/test_app_behind.py::test_noise_does_not_depend_on_settings_that_an_app_leaves": Fault(
        "noise is drawn on the default device of the app",
        "flower.app_behind:ThreadPoolExecutor",
        lambda _: lambda _: _InPlace(),
    ),
    "flower/test_app_behind.py::test_a_reply_leaves_whatever_limits_an_app_leaves_behind": Fault(
        "a masked sum is charged after the app has run",
        "masking.node:cache",
        lambda _: _second_call,
    ),
    "flower/test_local_dp_mod.py::test_a_policy_of_the_owner_that_it_does_not_meet_is_a_refusal_at_no_cost": Fault(
        "local_dp_mod ignores an owner's max-epsilon",
        "flower.local_dp_mod:Budget",
        lambda real: (
            lambda epsilon, delta, guarantee=None: real(
                epsilon if guarantee else math.inf, delta, guarantee
            )
        ),
    ),
    "node/test_doors.py::test_each_door_asks_the_owner_before_anything_is_charged_or_computed": Fault(
        "the mod of masked sums admits without asking",
        "flower.secure_sum_mod:admit_one",
        always(None),
    ),
    "deployment/test_owner_door.py::test_any_other_app_is_refused_where_flower_loads_it": Fault(
        "a node with a policy takes any app for one that asks it",
        "deployment.flower_fixes.owner_door:asks_its_owner",
        always(True),
    ),
    "deployment/test_owner_door.py::test_a_mod_of_train_messages_alone_leaves_the_others_in_the_clear": Fault(
        "an app is taken to ask its owner by its package alone",
        "deployment.flower_fixes.owner_door:asks_its_owner",
        lambda real: lambda app: app is not None,
    ),
    # What blocks that stay cost.
    "accounting/test_replaced_blocks.py::test_its_epsilon_is_that_of_a_computation_of_its_own": Fault(
        "a block that is replaced moves by its clip norm alone",
        "accounting.loss_distribution:ReplacedGaussianDpEvent.places",
        lambda real: lambda self, losses: real(self, losses) * 2,
    ),
    "accounting/test_replaced_blocks.py::test_a_site_goes_by_the_larger_of_both": Fault(
        "a site goes by the charge alone",
        "accounting.privacy_ledger:epsilon_of_blocks",
        lambda _: epsilon_of,
    ),
    # What a node holds its server to.
    "node/test_policy.py::test_the_runs_budget_and_the_owners_hold_each_at_its_own_delta": Fault(
        "an owner's budget counts at the delta that the server names",
        "node.policy:budgets_of",
        lambda real: (
            lambda policy, work, charges: tuple(
                replace(each, delta=work.request.run.delta) for each in real(policy, work, charges)
            )
        ),
    ),
    "node/test_client.py::test_what_an_owner_allows_is_not_spent_once_for_each_guarantee": Fault(
        "an owner's budget is spent once for each guarantee",
        "node.account:_together",
        lambda _: lambda *each: max(each, key=lambda spent: spent.num_releases),
    ),
    "node/test_admission.py::test_beside_other_releases_a_masked_sum_counts_as_a_change_of_data": Fault(
        "beside others a masked sum counts as if its client were left out",
        "node.account:_at_twice",
        lambda _: lambda event: event,
    ),
    "node/test_client.py::test_what_is_reported_is_what_dp_sgd_cost_over_all_rounds": Fault(
        "a client charges one step a round",
        "mechanisms.local_dp_sgd:LocalDpSgd.at_client",
        lambda real: (
            lambda *args, **more: replace(
                found := real(*args, **more), events=tuple((event, 1) for event, _ in found.events)
            )
        ),
    ),
    "node/test_noised_answers.py::test_what_is_reported_is_what_updates_and_answers_cost_and_a_budget_holds_both": Fault(
        "a client charges no answer", "node.work:own_noise", always(None)
    ),
    "node/test_client.py::test_on_a_real_node_the_client_that_a_request_names_is_not_obeyed": Fault(
        "a virtual member is believed without a ticket",
        "node.secure_aggregation:is_simulations",
        always(True),
    ),
    "deployment/test_gate.py::test_everything_else_stops_at_the_node_proxy": Fault(
        "the node proxy passes on the registering of nodes",
        "deployment.gate:CALLS",
        lambda calls: (*calls, "register-node"),
    ),
    # Masked sums.
    "masking/test_attacks.py::test_a_node_in_both_lists_is_refused": Fault(
        "a node signs any two lists", "masking.node:MaskingNode._check_lists", always(None)
    ),
    "masking/test_attacks.py::test_a_key_that_was_swapped_under_a_true_signature_is_found_out": Fault(
        "a node takes keys that nobody signed", "masking.node:is_signed", always(True)
    ),
    "masking/test_attacks.py::test_fewer_signatures_than_the_threshold_open_nothing": Fault(
        "a node opens a sum whose lists others did not sign",
        "masking.node:MaskingNode._check_signatures",
        always(None),
    ),
    "masking/test_attacks.py::test_a_round_that_was_opened_can_not_be_tried_again": Fault(
        "a node that has given its shares does not close the round",
        "masking.store:NodeState.closed_until",
        lambda _: lambda self, number: self,
    ),
    "privacy/test_clipping.py::test_noise_of_the_accounted_clients_has_at_least_the_required_variance": Fault(
        "the noise of a secure sum is shared among all nodes, not among the honest survivors",
        "privacy.secure_grid:_at",
        lambda real: (
            lambda *given, **beside: replace(
                found := real(*given, **beside),
                variance=found.variance * found.summands // found.nodes,
            )
        ),
    ),
    "privacy/test_clipping.py::test_zeroing_out_a_client_moves_the_sum_by_at_most_the_sensitivity": Fault(
        "a secure sum is accounted without its bit",
        "privacy.secure_grid:SecureSum.sensitivity_squared",
        lambda real: property(lambda self: real.fget(self) - self.bit_steps**2),
    ),
    "mechanisms/test_charge.py::test_a_masked_sum_is_not_opened_before_it_is_charged": Fault(
        "a mechanism may open a masked sum before it is charged",
        "server.round:RunLedger._open",
        lambda _: lambda self, summed, made: summed.open(),
    ),
    "mechanisms/test_charge.py::test_a_round_for_which_a_mechanism_says_no_cost_releases_nothing": Fault(
        "a round without a cost is released all the same",
        "server.round:charged",
        lambda _: lambda mechanism, number, **more: mechanism.event(number, **more),
    ),
    "flower/test_masked_transport.py::test_each_node_charges_its_own_ledger_what_the_server_charges": Fault(
        "a node's masked vector leaves before it is paid for",
        "node.masked_work:MaskedWork.release",
        always(None),
    ),
    "simulation/test_secure.py::test_a_sum_of_fewer_clients_than_may_be_left_is_not_opened": Fault(
        "a simulation opens a sum of fewer clients than may be left",
        "simulation.in_process:UnmaskedSum.ask",
        lambda real: lambda self, *asked: real(replace(self, fewest=0), *asked),
    ),
    "node/test_secure_doors.py::test_a_client_gives_no_exact_values_of_a_masked_run": Fault(
        "a client gives an update in the clear in a run under secure aggregation",
        "node.client:Client.answer",
        lambda _: _answered,
    ),
    "node/test_secure_doors.py::test_a_policy_of_the_noise_that_is_declared_is_held_to_the_noise_that_there_is": Fault(
        "the noise of a masked sum may be half of what the owner's policy asks for",
        "node.masked_work:check_own_count",
        lambda real: (
            lambda policy, event: real(
                replace(policy, min_noise_multiplier=policy.min_noise_multiplier / 2), event
            )
        ),
    ),
    "node/test_secure_doors.py::test_each_door_asks_the_owners_policy": Fault(
        "an app behind the mod does not ask its owner's policy",
        "flower.secure_sum_mod:admit_one",
        always(None),
    ),
    "node/test_bound_terms.py::test_no_stage_is_answered_on_other_terms_than_those_of_the_keys": Fault(
        "a node answers a stage on other terms than those of its keys",
        "masking.node:MaskingNode.agreed",
        lambda _: property(lambda self: b""),
    ),
    "test_shared_step_replay.py::test_an_example_that_fails_moves_no_bit_of_the_others": Fault(
        "a unit that fails ends a shared step for those behind it",
        "training.shared_step:gradient_or_none",
        _none_after_a_failure,
    ),
    "node/test_noised_answers.py::test_a_held_out_example_moves_the_answer_of_no_other_whatever_the_model_does": Fault(
        "examples are rated together by a model of one's own",
        "models.rows_apart:outputs_apart",
        lambda _: lambda model, inputs, first=0, *, source: outputs_of(model, inputs),
    ),
    "node/test_left_by_units.py::test_what_an_example_leaves_moves_no_step_of_the_others": Fault(
        "what a unit left stays where units can't be computed together",
        "per_example.memory:Memory.restore",
        always(False),
    ),
    "node/test_left_by_units.py::test_what_a_metric_keeps_of_an_example_moves_the_value_of_no_other": Fault(
        "a metric of one's own keeps what it has seen",
        "queries.own_metric:Memory.restore",
        always(False),
    ),
    "training/test_clients_apart.py::test_what_only_some_client_leaves_reaches_no_other": Fault(
        "clients of a process train one model in turn",
        "training.local_training:apart",
        lambda _: nullcontext,
    ),
    "simulation/test_own_ratings_apart.py::test_one_client_more_moves_the_sum_of_answers_by_at_most_one": Fault(
        "clients of a process rate one model in turn",
        "node.client:apart",
        lambda _: nullcontext,
    ),
    "simulation/test_cohort.py::test_no_example_decides_whether_clients_are_trained_together": Fault(
        "whether clients are trained together is tried on their examples",
        "simulation.cohort:made_up_examples",
        lambda _: lambda model, data: data,
    ),
    "models/test_fixed_part.py::test_an_example_moves_no_features_of_another": Fault(
        "frozen layers compute features of all rows together, unwatched",
        "models.rows_apart:rows_apart",
        lambda _: lambda layer, inputs, *, keeps=False: layer(inputs),
    ),
    "models/test_frozen.py::test_a_client_refuses_to_train_on_other_frozen_values_than_the_servers": Fault(
        "a client trains on other frozen values than the server's",
        "node.client:frozen_digest",
        always(ANY),
    ),
    "models/test_transformer.py::test_code_in_a_folder_is_never_run": Fault(
        "code in a folder of weights runs",
        "data.text:LOCAL",
        lambda real: real | {"trust_remote_code": True},
    ),
}
BY_TEST |= {
    # What has been moved or added since.
    "accounting/test_correlation.py::test_noise_whose_coefficients_rise_or_are_negative_is_refused": Fault(
        "the coefficients of correlated noise may rise",
        "accounting.correlation:never_rises",
        always(True),
    ),
    "mechanisms/test_correlated_noise.py::test_the_slack_of_the_grid_is_for_each_term_that_a_rounds_noise_has": Fault(
        "correlated noise on the grid has slack for one term",
        "mechanisms.correlated_noise:CorrelatedNoise._slack",
        lambda real: lambda self, *given: real(self, *given) / self.run.rounds,
    ),
    "dpsgd/test_item_watch.py::test_a_data_set_that_mixes_items_is_refused_and_charges_no_batch_with_one": Fault(
        "an item may be mixed from rows of its data set", "dpsgd.item_watch:rows_at", always(set())
    ),
    "dpsgd/test_state.py::test_a_loop_that_resumes_without_its_state_is_refused": Fault(
        "a loop goes on without its state", "dpsgd.loop_checks:check_known", always(None)
    ),
    "node/test_allowance.py::test_no_door_imports_what_a_server_names_and_the_owner_does_not": Fault(
        "a node imports the mechanism that a server names",
        "node.work:_check_mechanism",
        always(None),
    ),
    "node/test_policy.py::test_a_misspelt_key_of_a_policy_is_refused_with_every_message": Fault(
        "a misspelt key of a policy is no policy", "node.policy:_check_spelling", always(None)
    ),
    "node/test_policy.py::test_the_least_noise_is_that_of_the_most_expensive_round_not_its_new_noise": Fault(
        "an owner's least noise is held to the new noise of a round",
        "node.work:Work.least_user_noise",
        lambda _: lambda work: work.request.run.user.noise_multiplier,
    ),
    "node/test_policy.py::test_what_one_release_composes_counts_together": Fault(
        "the noise of a release of several parts is that of its first part",
        "accounting.events:_noise_together",
        lambda _: lambda parts: noise_in(parts[0][0]),
    ),
    "run_files/test_damaged_files.py::test_no_damage_to_the_metrics_lowers_what_clients_reported": Fault(
        "what clients reported is read from metrics.csv alone",
        "run_files.run_folder:RunFolder.reported",
        always({}),
    ),
    "run_files/test_damaged_files.py::test_on_another_machine_the_checkpoint_tells_that_a_ledger_is_of_another_run": Fault(
        "a ledger of another run is read as the run's own",
        "run_files.run_ledgers:displaced",
        always([]),
    ),
    "simulation/test_resume.py::test_what_a_lost_round_cost_its_clients_stays_in_what_is_published": Fault(
        "a run that goes on forgets what clients paid for the rounds that are made again",
        "run_files.clients_account:with_lost_rounds",
        lambda _: lambda state, *given: state,
    ),
    "per_example/test_trial.py::test_a_change_that_only_some_example_makes_is_refused_at_its_step": Fault(
        "a buffer may be written for an example that no trial has seen",
        "layers.alone:Alone._check_writes",
        always(None),
    ),
    "run_files/test_damaged_files.py::test_a_changed_number_of_a_checkpoint_is_damage": Fault(
        "a changed number of a checkpoint is not noticed",
        "run_files.run_folder:_digest",
        always(""),
    ),
    "privacy/test_randomness.py::test_float32_values_follow_the_normal_law_in_body_tails_and_centre": Fault(
        "normal values of float32 have radii of half the length",
        "privacy.randomness:radii",
        lambda real: lambda words, stddev: real(words, stddev / 2),
    ),
    "privacy/test_rounded_sums.py::test_a_sum_near_a_boundary_is_rounded_to_the_right_side": Fault(
        "a rounded sum beside a boundary is not looked at again",
        "privacy.rounded_sums:_looked_at_again",
        lambda _: lambda unsure, scale, key: unsure.rest * 0,
    ),
    "privacy/test_chacha.py::test_no_word_is_given_twice_by_calls_of_any_size": Fault(
        "an accelerator's stream begins anew at each call",
        "privacy.chacha:ChaCha.words",
        lambda real: lambda self, *given: real(ChaCha(self._key, self._nonce), *given),
    ),
    "privacy/test_chacha.py::test_a_kernel_that_fails_or_gives_other_words_is_not_used": Fault(
        "a kernel is used whatever it gives",
        "privacy.chacha:has_kernel",
        lambda _: cache(lambda device: True),
    ),
    "privacy/test_rounded_sums.py::test_what_a_step_releases_lies_on_a_public_grid": Fault(
        "a step's sum keeps its low bits beside rounded noise",
        "privacy.rounded_sums:rounded_gaussian",
        lambda real: lambda total, *given, **named: total + real(total * 0, *given, **named),
    ),
    "guard/test_block_release.py::test_one_patient_moves_the_sum_by_2c_and_that_is_what_the_noise_is_for": Fault(
        "a guard noises for C where a patient moves 2C", "guard.block_release:MOVES", lambda _: 1.0
    ),
    "guard/test_block_release.py::test_the_round_is_on_the_ledger_before_a_block_starts": Fault(
        "a guard does not charge its round", "guard.site_guard:SiteGuard._charge", always(None)
    ),
    "guard/test_block_release.py::test_the_blocks_that_were_drawn_run_and_no_other": Fault(
        "a guard runs all blocks and charges for some",
        "guard.site_guard:SiteGuard._run",
        _all_blocks,
    ),
    "guard/test_block_release.py::test_a_block_is_given_the_state_that_it_kept_in_this_run_and_no_other": Fault(
        "a block is given the state of another", "guard.site_guard:opened_blocks", _state_of_another
    ),
    "guard/test_reply_slots.py::test_a_keeper_that_ends_without_a_word_ends_the_sandbox_and_gives_nothing": Fault(
        "a guard takes a killed keeper for the end of its block",
        "guard.sandbox:_still_there",
        always(False),
    ),
    "guard/test_block_release.py::test_a_block_that_ends_late_moves_the_sum_by_no_more": Fault(
        "a block that ends late takes all others out of the sum",
        "guard.site_guard:SiteGuard._note_round",
        _none_if_late,
    ),
    "guard/test_reply_slots.py::test_a_block_that_is_still_there_lengthens_its_slot_and_no_other": Fault(
        "a block has only the seconds that one before it has left",
        "guard.sandbox:Sandbox._free_slot",
        lambda real: lambda self, ending, starts: (real(self, ending, starts), starts)[1],
    ),
    "guard/test_masked_blocks.py::test_updates_that_nothing_clips_are_refused_before_they_are_charged": Fault(
        "a guard is charged for updates that nothing clips",
        "guard.masked_blocks:check_clipped",
        always(None),
    ),
    "node/test_secure_doors.py::test_no_masked_vector_is_given_or_charged_for_updates_that_nothing_clips": Fault(
        "a node is charged for updates that nothing clips",
        "node.masked_work:check_clipped",
        always(None),
    ),
    "guard/test_list_of_guards.py::test_a_node_without_a_guard_is_in_no_sum_of_guards": Fault(
        "a guard adds up with nodes that have none",
        "node.secure_aggregation:check_guards",
        always(None),
    ),
}
# Of one test, which replays whole runs of clients who take turns.
OF_TURNS = (
    Fault(
        "every round has the key of the first",
        "mechanisms.correlated_noise:CorrelatedNoise._keys",
        lambda real: lambda *given: torch.zeros_like(real(*given)),
    ),
    Fault(
        "the noise of a round is for one reply of those that came",
        "mechanisms.correlated_noise:CorrelatedNoise._noised",
        _noised_by_replies,
    ),
    Fault(
        "correlated noise has half its standard deviation",
        "privacy.correlated_gaussian:CorrelatedGaussian.stddev",
        lambda real: lambda self, norm: real(self, norm) / 2,
    ),
    Fault(
        "correlated noise is charged as if it were independent",
        "accounting.correlation:Turns.moves",
        lambda real: lambda self: real(replace(self, kind="none")),
    ),
)
# Of an example's gradient, its draws, and what a data set and a loss may do.
OF_EXAMPLES = (
    Fault(
        "the norm of a tied table leaves out its cross term",
        "layers.terms:Tied.mass",
        lambda _: lambda self, order: self.lookup.mass(order) + self.outer.mass(order),
        "per_example/test_scales.py::test_the_clipped_gradient_of_a_tied_table_is_no_longer_than_its_clip_norm",
    ),
    Fault(
        "a row of an owner may change a buffer",
        "per_example.per_example:unmoved",
        lambda _: lambda model: nullcontext(),
        "per_example/test_own_draws.py::test_a_row_of_an_owner_that_no_trial_has_seen_leaves_nothing_in_a_buffer",
    ),
    Fault(
        "all examples have one mask",
        "privacy.row_words:RowWords.__call__",
        lambda real: lambda self, rows, *given: real(self, torch.zeros_like(rows), *given),
        "per_example/test_own_draws.py::test_two_sums_of_a_key_draw_other_masks_and_so_do_two_examples",
    ),
    Fault(
        "masks of a loop follow the place in the batch",
        "layers.draws:torch_draws_from",
        lambda real: lambda source, model, rows=None: real(source, model),
        "dpsgd/test_one_index.py::test_an_absent_example_leaves_the_masks_of_the_others_in_a_loop",
    ),
    Fault(
        "two calls of a pass draw the same",
        "layers.draws:Draws.words",
        lambda real: lambda self, *given: real(replace(self, calls=0), *given),
        "per_example/test_own_draws.py::test_two_calls_of_a_pass_draw_other_numbers",
    ),
    Fault(
        "a trial in float64 writes to the parameters of a model of that type",
        "per_example.agreement:_wide_like",
        lambda _: lambda value: torch.nn.Parameter(value.detach().double(), value.requires_grad),
        "per_example/test_wrong_sums.py::test_an_answer_that_changes_a_gradient_a_little_or_elsewhere_is_not_settled",
    ),
    Fault(
        "a forward may seed PyTorch's generator",
        "per_example.trial:_check_seeds",
        always(None),
        "per_example/test_own_draws.py::test_a_forward_that_sets_the_state_of_a_generator_is_refused",
    ),
    Fault(
        "a generator that a forward has seeded stays so",
        "layers.draws:generators_kept",
        lambda _: lambda device: nullcontext(),
        "per_example/test_own_draws.py::test_what_a_forward_does_to_the_generators_ends_with_the_sum",
    ),
    Fault(
        "an example may stand at several indices",
        "dpsgd.one_index:check_one_index",
        always(None),
        "dpsgd/test_one_index.py::test_an_example_at_several_indices_is_refused_with_both",
    ),
    Fault(
        "two items may read one row",
        "dpsgd.item_watch:ItemWatch._shared",
        always(None),
        "dpsgd/test_one_index.py::test_a_row_that_two_items_read_is_refused_with_both",
    ),
    Fault(
        "windows of a series may overlap",
        "dpsgd.item_watch:_overlap",
        always(0),
        "dpsgd/test_one_index.py::test_a_row_that_two_items_read_is_refused_with_both",
    ),
    Fault(
        "reads of tensors outside of attributes are not seen",
        "dpsgd.row_reads:TensorReads._key",
        always(None),
        "dpsgd/test_one_index.py::test_an_item_that_reads_another_row_is_refused_however_rows_are_held",
    ),
    Fault(
        "a criterion with a hook is taken for plain",
        "per_example.objective:is_plain",
        always(True),
        "per_example/test_first_pass.py::test_a_loss_is_known_by_what_it_is_and_else_tried",
    ),
    Fault(
        "what a pass leaves outside of the model is not noticed",
        "per_example.memory:Memory.restore",
        always(False),
        "per_example/test_left_outside.py::test_what_a_forward_leaves_in_any_place_is_refused_and_undone",
    ),
    Fault(
        "what a client leaves in the attributes of a model stays there",
        "training.local_training:apart",
        lambda _: nullcontext,
        "training/test_clients_apart.py::test_what_a_client_leaves_in_the_models_attributes_reaches_no_other",
    ),
    Fault(
        "items draw from the generators of all",
        "dpsgd.item_draws:seed_generators",
        always(None),
        "dpsgd/test_item_draws.py::test_what_an_item_draws_moves_no_other",
    ),
    Fault(
        "padding may change the gradients of others",
        "dpsgd.padding:_Gradients.agree",
        always(True),
        "dpsgd/test_padding.py::test_a_model_that_reads_padding_is_refused_at_no_cost",
    ),
    Fault(
        "a text without a gradient tells that padding changes nothing",
        "dpsgd.padding:_tells",
        always(True),
        "dpsgd/test_padding.py::test_of_one_length_too_texts_without_a_gradient_tell_nothing",
    ),
    Fault(
        "a selection's price leaves out what was repeated",
        "simulation.tuning:repetitions",
        always(Counter()),
        "cli/test_tune.py::test_the_price_is_that_of_what_the_trials_were_charged",
    ),
    Fault(
        "what an example writes into a table of plain values stays",
        "per_example.plain_trees:PlainTree.is_unchanged",
        always(True),
        "per_example/test_plain_trees.py::test_each_container_gets_the_objects_that_it_held",
    ),
    Fault(
        "padding that is read by chance is tried with one draw",
        "dpsgd.padding:DrawsAt",
        always(None),
        "dpsgd/test_padding_draws.py::test_a_model_that_reads_padding_by_chance_is_refused_at_no_cost",
    ),
    Fault(
        "a batch may be cut to its shortest example",
        "dpsgd.padding:_is_cut",
        always(False),
        "dpsgd/test_padding.py::test_a_model_that_reads_padding_is_refused_at_no_cost",
    ),
    Fault(
        "a collate_fn that draws may mix whole numbers",
        "dpsgd.own_example:_mixes",
        always(False),
        "dpsgd/test_reading.py::test_a_collate_fn_that_mixes_the_batch_is_refused_before_anything_is_drawn",
    ),
    Fault(
        "rows of a batch that share memory are written to by all",
        "per_example.shared_rows:_lie_apart",
        always(True),
        "per_example/test_shared_rows.py::test_a_forward_that_writes_into_a_row_changes_no_other_row",
    ),
    Fault(
        "what an item leaves for later ones is not noticed",
        "dpsgd.own_example:_depends",
        always(False),
        "dpsgd/test_what_items_leave.py::test_a_data_set_whose_items_depend_on_those_read_before_is_refused",
    ),
    Fault(
        "what a forward writes into a container of other objects stays",
        "per_example.memory:refill",
        always(None),
        "per_example/test_left_outside.py::test_what_a_forward_leaves_in_any_place_is_refused_and_undone",
    ),
    Fault(
        "what a forward writes into a global dictionary stays",
        "per_example.plain_trees:refill",
        always(None),
        "per_example/test_first_pass.py::test_what_a_forward_writes_into_a_global_dictionary_does_not_outlast_its_pass",
    ),
    Fault(
        "what an example registers in a model stays there",
        "per_example.attributes:_REGISTRIES",
        lambda _: HOOKS,
        "node/test_left_by_units.py::test_what_an_example_leaves_moves_no_step_of_the_others",
    ),
    Fault(
        "hooks of all modules and functions given to layers are taken to keep nothing",
        "per_example.own_code:has_own_code",
        always(False),
        "node/test_left_by_units.py::test_a_hook_of_all_modules_and_a_function_given_to_a_layer_keep_nothing",
    ),
    Fault(
        "a gradient that an example leaves on a parameter stays there",
        "per_example.memory:Memory._hold_model",
        always(None),
        "node/test_left_by_units.py::test_what_an_example_leaves_moves_no_step_of_the_others",
    ),
    Fault(
        "what is replaced by something that looks alike stays there",
        "per_example.memory:is_replaced",
        lambda _: lambda now, before: repr(type(now)) != repr(type(before)),
        "per_example/test_rare_places.py::test_what_a_forward_leaves_in_a_rare_place_is_undone",
    ),
    Fault(
        "a function is taken to be of the library whose name it bears",
        "per_example.memory:packages_of",
        lambda _: lambda function: frozenset({function.__module__.partition(".")[0]}),
        "per_example/test_rare_places.py::test_a_loss_under_the_name_of_a_library_keeps_nothing",
    ),
    Fault(
        "what a backward pass writes stays there",
        "per_example.objective:Objective.put_back_own",
        lambda _: lambda self: nullcontext(),
        "per_example/test_rare_places.py::test_what_a_large_example_leaves_moves_no_later_step",
    ),
    Fault(
        "settings of the process and modes that an example leaves stay there",
        "per_example.process_settings:ProcessSettings.restore",
        always(None),
        "node/test_left_by_units.py::test_what_an_example_leaves_moves_no_step_of_the_others",
    ),
    Fault(
        "what an example of a shared step leaves in the model stays there",
        "training.shared_step:Snapshot.restore",
        always(False),
        "node/test_left_by_units.py::test_what_an_example_leaves_moves_no_gradient_of_a_shared_step",
    ),
    Fault(
        "hooks of a first call pile up",
        "per_example.attributes:_REGISTRIES",
        lambda _: (),
        "per_example/test_first_pass.py::test_hooks_of_a_first_call_are_put_back_and_do_not_pile_up",
    ),
)


def _without(key: str, nothing: object) -> Callable[[Any], Any]:
    """A reader of a file that is not told of a key of its description."""
    return lambda real: lambda path, known: real(path, known.model_copy(update={key: nothing}))


def _as_times(real: Any) -> Any:
    def as_times_if_all_are(self: Any) -> list[Any]:
        with suppress(ValueError, TypeError):
            return [datetime.fromisoformat(cell) for cell in self.cells]
        return real(self)

    return as_times_if_all_are


OF_TABLES = (
    Fault(
        "the first line of a jsonl file decides the order of the inputs of all",
        "data.folder:_input_names",
        lambda real: lambda found, known: real(found, known.model_copy(update={"format": "csv"})),
        "data/test_rows_apart.py::test_a_row_with_its_keys_in_another_order_changes_no_other_row",
    ),
    Fault(
        "the texts of a jsonl column are times if all of them can be",
        "data.table_files:JsonColumn.to_pylist",
        _as_times,
        "data/test_rows_apart.py::test_a_text_that_looks_like_a_time_is_a_text_whatever_other_rows_have",
    ),
    Fault(
        "the sites of a CSV file are numbers if all of them can be",
        "data.folder:opened",
        _without("owner", None),
        "data/test_rows_apart.py::test_a_site_is_what_its_cell_says_whatever_other_sites_are",
    ),
    Fault(
        "the classes in a CSV file are numbers if all of them can be",
        "data.folder:opened",
        _without("classes", ()),
        "data/test_rows_apart.py::test_a_class_is_the_word_in_its_cell_whatever_other_cells_are",
    ),
)
IN_ALL_TURNS = "mechanisms/test_turn_replay.py::test_a_client_in_all_its_turns_costs_what_the_ledger_was_charged"
ON_WHAT_WAS_DRAWN = "per_example/test_watch.py::test_a_branch_on_what_was_drawn_is_not_watched"
FAULTS = (
    *(replace(fault, test=test) for test, fault in BY_TEST.items()),
    Fault(
        "a mask, or lengths, may be drawn at random",
        "layers.alone:Alone.split_by",
        lambda real: lambda self, *given: _as_if_not_drawn(real, self, *given),
        ON_WHAT_WAS_DRAWN,
    ),
    *(replace(fault, test=IN_ALL_TURNS) for fault in OF_TURNS),
    *OF_EXAMPLES,
    *OF_TABLES,
)

CHECKS = (
    Fault("no fault at all", "privacy.clipping:CLIP_MARGIN", lambda real: real, FAULTS[0].test),
    Fault(
        "one that fits no longer",
        "privacy.clipping:clip_by_norm",
        lambda _: lambda: None,
        FAULTS[0].test,
    ),
)
EVERY = (*FAULTS, *CHECKS)


def main(words: Sequence[str] | None = None) -> int:
    """Plants the faults; 1 if one was not caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument(
        "--only", default="", metavar="WORDS", help="faults whose names hold these words"
    )
    only = parser.parse_args(words).only
    chosen = [fault for fault in FAULTS if only in fault.name]
    if not chosen:
        parser.error(f"--only: no fault has a name that holds {only!r}")
    verdicts = []
    for fault in chosen:
        verdicts.append(verdict(fault))
        print(f"{verdicts[-1]:<9} {fault.name}", flush=True)
    caught = verdicts.count(CAUGHT)
    print(f"{caught} of {len(chosen)} were caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    raise SystemExit(main())
