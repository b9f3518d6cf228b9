"""Faults on privacy, and the test that must notice each: `python -m tests.faults` plants them one by one.

It says which was caught, and exits with 1 if one was not. `--only WORDS` takes those whose names hold the words. Faults
of the algorithm as a whole, which the neighbour replay finds, are in `tests.test_replay_faults`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import ANY

import torch

from discreet.protocol.messages import TrainReply
from tests.planting import CAUGHT, Fault, always, verdict


def _wider(real: Any) -> Any:
    def init(self: Any, *args: Any, **more: Any) -> None:
        real(self, *args, **more)
        self._largest *= 1 + 1e-4

    return init


def _unsynced(real: Any) -> Any:
    @contextmanager
    def connect(self: Any) -> Iterator[Any]:
        with real(self) as connection:
            connection.execute("pragma synchronous = normal")
            yield connection

    return connect


def _noised_first(real: Any) -> Any:
    def answer_round(parts: Any, how: Any, *, event: Any, source: Any, charge: Any) -> Any:
        sums = real(parts, how, event=event, source=source, charge=lambda _: None)
        charge(event)
        return sums

    return answer_round


def _known_key(real: Any) -> Any:
    return lambda: type(real())(bytes(32), is_secure=True)


def _looked_at_once(real: Any) -> Any:
    seen: dict[int, int] = {}

    def require_room(self: Any, charge: Any) -> None:
        if seen.get(id(self)) != self.taken:
            seen[id(self)] = self.taken
            real(self, charge)

    return require_room


def _kept_sums(real: Any) -> Any:
    def read(self: Any) -> Any:
        sums = self._sums
        piece = real(self)
        self._sums = sums
        return piece

    return read


def _opened_first(real: Any) -> Any:
    def release(self: Any, replies: Any, at: Any) -> Any:
        (unopened,) = replies
        total = unopened.open()
        return real(self, [replace(unopened, open=lambda: total)], at)

    return release


def _answered(self: Any, request: Any, params: Any) -> TrainReply:
    values, _ = self._values(request, params)
    return TrainReply(request.round, values.update, values.below, answer=values.answer)


def _noised_by_replies(real: Any) -> Any:
    def noised(self: Any, total: Any, keys: Any, number: int) -> Any:
        user = replace(self.run.user, noise_multiplier=self.noise_multiplier / max(1, total.replies))
        return real(replace(self, run=replace(self.run, user=user)), total, keys, number)

    return noised


def _other_earlier_keys(real: Any) -> Any:
    def noised(self: Any, total: Any, keys: Any, number: int) -> Any:
        return real(self, total, torch.cat([keys[:-1] ^ len(keys), keys[-1:]]), number)

    return noised


def _growing(real: Any) -> Any:
    def add_noise(self: Any, total: Any, *given: Any) -> Any:
        return total + real(self, torch.zeros_like(total), *given) * (1 + total.abs())

    return add_noise


IN_ALL_TURNS = "mechanisms/test_turn_replay.py::test_a_client_in_all_its_turns_costs_what_the_ledger_was_charged"
FAULTS = (
    # Clipping, noise and sampling.
    Fault(
        "a clipped row may be longer than the clip norm by rounding",
        "discreet.privacy.clipping:CLIP_MARGIN",
        lambda _: 0.0,
        "privacy/test_clipping.py::test_no_row_leaves_with_more_than_the_clip_norm",
    ),
    Fault(
        "a sum on the grid lets norms pass that are too large by 5e-5",
        "discreet.privacy.clipping:ClippedSum.__init__",
        _wider,
        "privacy/test_clipping.py::test_an_update_over_the_clip_by_one_step_on_the_grid_is_clipped",
    ),
    Fault(
        "the gradients of a shared step are not clipped",
        "discreet.training.local_training:sequential_sum",
        lambda real: lambda *args, clip_norm, **more: real(*args, clip_norm=1e9, **more),
        "training/test_local_training.py::test_one_example_moves_it_by_at_most_its_norm_and_none_give_zeros",
    ),
    Fault(
        "the key of a secure source is known",
        "discreet.privacy.randomness:secure_source",
        _known_key,
        "privacy/test_randomness.py::test_secure_sources_and_their_children_never_repeat",
    ),
    Fault(
        "noise grows with its total",
        "discreet.privacy.mechanisms:Gaussian.add_noise",
        _growing,
        "privacy/test_mechanisms.py::test_noise_does_not_depend_on_the_total",
    ),
    Fault(
        "the count of norms has half its noise",
        "discreet.mechanisms.central_gaussian:CentralGaussian._noised_count",
        lambda real: lambda self, below, stddev, source: real(self, below, stddev / 2, source),
        "server/test_round.py::test_the_count_has_noise_of_its_standard_deviation",
    ),
    Fault(
        "DP-SGD noises its first step alone",
        "discreet.training.local_training:OneClient.add_noise",
        lambda real: lambda self, sums, clip, *, step: sums if step else real(self, sums, clip, step=step),
        "training/test_local_training.py::test_dp_sgd_draws_poisson_batches_and_noise_for_every_step",
    ),
    Fault(
        "a Poisson cohort is drawn again until it is not empty",
        "discreet.server.round:CohortSampling.draw",
        lambda real: lambda self, members, source: real(self, members, source) or real(self, members, source),
        "server/test_round.py::test_a_poisson_cohort_is_empty_as_often_as_it_should_be",
    ),
    # Clients who take turns.
    Fault(
        "a client is counted out of its turn",
        "discreet.privacy.sampling:in_turn",
        always(True),
        "mechanisms/test_turn_replay.py::test_a_client_out_of_its_turn_is_not_counted",
    ),
    Fault(
        "an update is counted twice",
        "discreet.mechanisms.sums:CohortSum.add",
        lambda real: lambda self, rows, below: real(self, torch.cat([rows, rows]), below),
        IN_ALL_TURNS,
    ),
    Fault(
        "earlier noise is taken back from other keys",
        "discreet.mechanisms.correlated_noise:CorrelatedNoise._noised",
        _other_earlier_keys,
        IN_ALL_TURNS,
    ),
    Fault(
        "every round has the key of the first",
        "discreet.mechanisms.correlated_noise:CorrelatedNoise._keys",
        lambda real: lambda *given: torch.zeros_like(real(*given)),
        IN_ALL_TURNS,
    ),
    Fault(
        "the noise of a round is for one reply of those that came",
        "discreet.mechanisms.correlated_noise:CorrelatedNoise._noised",
        _noised_by_replies,
        IN_ALL_TURNS,
    ),
    Fault(
        "correlated noise has half its standard deviation",
        "discreet.privacy.correlated_gaussian:CorrelatedGaussian.stddev",
        lambda real: lambda self, norm: real(self, norm) / 2,
        IN_ALL_TURNS,
    ),
    Fault(
        "a client's first turn is charged alone",
        "discreet.accounting.correlation:Turns.moves",
        lambda real: lambda self: real(replace(self, groups=self.rounds)),
        IN_ALL_TURNS,
    ),
    Fault(
        "correlated noise is charged as if it were independent",
        "discreet.accounting.correlation:Turns.moves",
        lambda real: lambda self: real(replace(self, kind="none")),
        IN_ALL_TURNS,
    ),
    Fault(
        "a round that is made again is charged as what it adds to those before it",
        "discreet.accounting.correlation:Turns.largest_move",
        lambda _: lambda self, number: float(self.moves()[number - 1]),
        "mechanisms/test_turn_replay.py"
        "::test_rounds_that_old_files_have_the_server_make_again_cost_no_more_than_is_charged",
    ),
    # What a release costs.
    Fault(
        "the PLD forgets the direction in which a member is added",
        "discreet.accounting.loss_distribution:_frames",
        lambda real: lambda *args: real(*args)[:1],
        "accounting/test_pld_oracle.py::test_where_adding_a_member_costs_more_that_is_the_epsilon",
    ),
    Fault(
        "a sum of discrete Gaussians is taken for one",
        "discreet.accounting.distributed_gaussian:convolution_gap",
        always(0.0),
        "accounting/test_accounting.py"
        "::test_the_bound_holds_against_the_exact_divergence_and_is_loose_by_less_than_half_a_per_cent",
    ),
    Fault(
        "a round that also rates the model is charged as if it did not",
        "discreet.mechanisms.central_gaussian:CentralGaussian.event",
        lambda real: lambda self, noise, *, rates=False, **more: real(self, noise, **more),
        "simulation/test_private_evaluation.py::test_the_ledger_holds_what_was_planned_and_the_last_row_what_is_spent",
    ),
    Fault(
        "a rating is noised before it is charged",
        "discreet.mechanisms.sums:answer_round",
        _noised_first,
        "mechanisms/test_answer_sum.py::test_the_ledger_is_charged_before_anything_is_noised",
    ),
    Fault(
        "statistics that are asked again draw the same noise",
        "discreet.accounting.privacy_ledger:PrivacyLedger.num_releases",
        lambda _: property(lambda self: 0),
        "evaluation/test_private_statistics.py::test_what_is_asked_again_is_noised_anew",
    ),
    Fault(
        "a choice among trials costs as much as one of them",
        "discreet.simulation.tuning:selection_event",
        lambda real: lambda spent, *, trials: real(spent, trials=replace(trials, mean=1.0)),
        "cli/test_tune.py::test_the_cost_is_the_published_one",
    ),
    # Ledgers and budgets.
    Fault(
        "a charge may still be in memory when it returns",
        "discreet.ledger.durable_ledger:DurableLedger._connect",
        _unsynced,
        "ledger/test_durable_ledger.py::test_a_charge_has_reached_the_disk_when_it_returns",
    ),
    Fault(
        "a charge goes through although another was made since the budget was looked at",
        "discreet.ledger.durable_ledger:_charged_since",
        always(set()),
        "node/test_admission.py::test_budgets_are_looked_at_again_if_another_run_has_charged_a_client_meanwhile",
    ),
    Fault(
        "a run is resumed with a ledger that is older than its checkpoint",
        "discreet.ledger.durable_ledger:DurableLedger.contains",
        always(True),
        "server/test_lost_ledgers.py::test_on_another_machine_the_checkpoint_tells",
    ),
    Fault(
        "a resumed run takes another noise multiplier",
        "discreet.server.resuming:CHANGEABLE",
        lambda names: (*names, "privacy.user.noise_multiplier"),
        "server/test_resuming.py::test_what_decides_privacy_is_refused_by_the_name_that_was_typed",
    ),
    Fault(
        "a run forgets to charge its population's account",
        "discreet.server.population_account:PopulationAccount.charge",
        lambda _: lambda self, charges: self.require_room(charges),
        "server/test_population_account.py::test_every_run_charges_it_and_its_own_ledger_says_what_it_cost_itself",
    ),
    Fault(
        "a run stops after the round that passed its budget",
        "discreet.ledger.budget:ServerBudget.require_room",
        lambda real: lambda self, spent, charges, what="the next round": real(self, spent, [], what),
        "server/test_training_run.py::test_the_budget_ends_the_run_before_the_round_that_would_pass_it",
    ),
    Fault(
        "a ledger in the place of another one is charged",
        "discreet.ledger.rollback_guard:RollbackGuard.another_at",
        always(False),
        "server/test_lost_ledgers.py::test_a_node_does_not_work_without_all_that_it_spent",
    ),
    Fault(
        "a loop does not look at its budget again although another process has charged",
        "discreet.dpsgd.step_account:StepAccount._require_room",
        _looked_at_once,
        "dpsgd/test_state.py::test_the_budget_is_looked_at_again_if_another_process_has_charged_since",
    ),
    Fault(
        "a schedule is accounted at its first value",
        "discreet.dpsgd.loop_plan:stretches",
        lambda _: lambda values: [[values[0], len(values)]],
        "dpsgd/test_schedules.py::test_each_step_is_accounted_by_its_own_noise",
    ),
    Fault(
        "a step's noise is for the first clip norm of its schedule",
        "discreet.dpsgd.loop_plan:LoopPlan.released",
        lambda real: lambda self, total, count, _, **more: real(self, total, count, self.first_clip_norm, **more),
        "dpsgd/test_schedules.py::test_each_step_draws_the_noise_that_it_is_charged_for_the_clip_norm_that_clipped",
    ),
    Fault(
        "the gradients beside a noised count have the noise of the whole step",
        "discreet.dpsgd.loop_plan:split_noise_multiplier",
        lambda _: lambda noise_multiplier, *, count_stddev: noise_multiplier,
        "dpsgd/test_schedules.py::test_gradients_and_count_together_draw_the_noise_that_is_charged",
    ),
    Fault(
        "a batch that is read again is drawn again",
        "discreet.dpsgd.poisson_batches:PoissonBatches._positions",
        lambda real: lambda self, step: self.drawn.clear() or real(self, step),
        "dpsgd/test_reading.py::test_a_batch_is_drawn_once_although_it_is_read_again_after_an_error",
    ),
    Fault(
        "what was added up before a batch is read again still counts",
        "discreet.dpsgd.dpsgd:DPSGD._read",
        _kept_sums,
        "dpsgd/test_reading.py::test_pieces_read_before_an_error_do_not_count_twice",
    ),
    Fault(
        "a loaded state rewinds the account",
        "discreet.dpsgd.step_account:StepAccount.resume",
        lambda _: lambda self, taken, position, **more: None,
        "dpsgd/test_state.py::test_without_a_ledger_the_steps_of_a_state_stay_spent_and_count_for_the_budget",
    ),
    Fault(
        "a state is loaded beside an older copy of its ledger",
        "discreet.ledger.durable_ledger:DurableLedger.contains",
        always(True),
        "dpsgd/test_state.py::test_a_state_of_another_ledger_of_a_newer_copy_or_of_none_is_refused",
    ),
    Fault(
        "each process of a loop draws batches of its own",
        "discreet.dpsgd.poisson_batches:Processes.start",
        lambda _: lambda self, model, source: source,
        "dpsgd/test_processes.py::test_each_example_of_a_batch_is_in_one_process",
    ),
    # What a model, a loss and a server may not do.
    Fault(
        "a loss may mix examples",
        "discreet.per_example.trial:_mixes",
        always(False),
        "per_example/test_trial.py::test_a_loss_that_mixes_examples_is_refused",
    ),
    Fault(
        "a forward may change the model's own state",
        "discreet.per_example.trial:moved_since",
        always([]),
        "per_example/test_trial.py::test_a_forward_that_changes_a_parameter_or_a_buffer_is_refused_by_its_name",
    ),
    Fault(
        "a forward may mix examples",
        "discreet.per_example.watch:Watch.check",
        always(None),
        "per_example/test_watch.py::test_what_a_hook_does_is_watched_too",
    ),
    Fault(
        "a forward is not compared with what single examples give",
        "discreet.per_example.passes:_tried_on",
        always(""),
        "per_example/test_watch.py::test_what_is_not_known_is_not_watched",
    ),
    Fault(
        "a function with a derivative of its own counts as known",
        "discreet.per_example.watch:only_known_derivatives",
        always(None),
        "per_example/test_watch.py::test_what_is_not_known_is_not_watched",
    ),
    Fault(
        "squares of norms are lost where they are too small for float32",
        "discreet.per_example.terms:mass",
        lambda _: lambda values, order: values.flatten(1).abs().pow(order).sum(1),
        "per_example/test_scales.py::test_what_one_example_adds_is_at_most_the_clip_norm_and_the_norm_that_is_reported",
    ),
    Fault(
        "gradients are clipped to any number that a server sends",
        "discreet.per_example.per_example:check_clip",
        always(None),
        "per_example/test_scales.py::test_a_clip_norm_that_float32_does_not_bear_is_refused",
    ),
    # What a node holds its server to.
    Fault(
        "an owner's budget counts at the delta that the server names",
        "discreet.node.policy:budgets_of",
        lambda real: (
            lambda policy, run, *names: tuple(replace(each, delta=run.delta) for each in real(policy, run, *names))
        ),
        "node/test_policy.py::test_the_runs_budget_and_the_owners_hold_each_at_its_own_delta",
    ),
    Fault(
        "an owner's budget is spent once for each guarantee",
        "discreet.node.account:_together",
        lambda _: lambda *each: max(each, key=lambda spent: spent.num_releases),
        "node/test_client_app.py::test_what_an_owner_allows_is_not_spent_once_for_each_guarantee",
    ),
    Fault(
        "beside others a masked sum counts as if its client were left out",
        "discreet.node.account:_at_twice",
        lambda _: lambda event: event,
        "node/test_account.py"
        "::test_a_masked_sum_counts_for_a_client_whose_data_change_beside_what_is_accounted_for_a_change",
    ),
    Fault(
        "a client charges one step a round",
        "discreet.mechanisms.local_dp_sgd:LocalDpSgd.client_round",
        lambda real: (
            lambda *args, **more: replace(
                found := real(*args, **more), events=tuple((event, 1) for event, _ in found.events)
            )
        ),
        "node/test_client.py::test_what_is_reported_is_what_dp_sgd_cost_over_all_rounds",
    ),
    Fault(
        "a client charges no answer",
        "discreet.node.admission:own_noise",
        always(None),
        "node/test_noised_answers.py::test_what_is_reported_is_what_updates_and_answers_cost_and_a_budget_holds_both",
    ),
    Fault(
        "a virtual member is believed without a ticket",
        "discreet.node.secure_aggregation:is_simulations",
        always(True),
        "node/test_client_app.py::test_on_a_real_node_the_client_that_a_request_names_is_not_obeyed",
    ),
    Fault(
        "the node proxy passes on the registering of nodes",
        "discreet.deployment.gate:CALLS",
        lambda calls: (*calls, "register-node"),
        "deployment/test_gate.py::test_everything_else_stops_at_the_node_proxy",
    ),
    # Masked sums.
    Fault(
        "a node signs any two lists",
        "discreet.masking.node:MaskingNode._check_lists",
        always(None),
        "masking/test_attacks.py::test_a_node_in_both_lists_is_refused",
    ),
    Fault(
        "a node takes keys that nobody signed",
        "discreet.masking.node:is_signed",
        always(True),
        "masking/test_attacks.py::test_a_key_that_was_swapped_under_a_true_signature_is_found_out",
    ),
    Fault(
        "a node opens a sum whose lists others did not sign",
        "discreet.masking.node:MaskingNode._check_signatures",
        always(None),
        "masking/test_attacks.py::test_fewer_signatures_than_the_threshold_open_nothing",
    ),
    Fault(
        "a node that has given its shares does not close the round",
        "discreet.masking.store:NodeState.closed_until",
        lambda _: lambda self, number: self,
        "masking/test_attacks.py::test_a_round_that_was_opened_can_not_be_tried_again",
    ),
    Fault(
        "the noise of a secure sum is shared among all nodes, not among the honest survivors",
        "discreet.privacy.secure_grid:_at",
        lambda real: (
            lambda *given, **beside: replace(
                found := real(*given, **beside), variance=found.variance * found.summands // found.nodes
            )
        ),
        "privacy/test_secure_grid.py"
        "::test_the_noise_of_the_accounted_clients_has_at_least_the_variance_that_was_asked_for",
    ),
    Fault(
        "a secure sum is accounted without its bit",
        "discreet.privacy.secure_grid:SecureSum.sensitivity_squared",
        lambda real: property(lambda self: real.fget(self) - self.bit_steps**2),
        "privacy/test_secure_grid.py::test_zeroing_out_a_client_moves_the_sum_by_at_most_the_sensitivity",
    ),
    Fault(
        "a client adds no share of noise to a masked sum of ratings",
        "discreet.node.client:noised_vector",
        lambda real: (
            lambda vector, reply, request, source: real(
                vector if request.work.trains else replace(vector, variance=0), reply, request, source
            )
        ),
        "audit/test_masked_audit.py::test_a_masked_sum_of_ratings_alone_is_not_refuted_and_costs_what_its_noise_says",
    ),
    Fault(
        "a masked sum is opened before it is charged",
        "discreet.mechanisms.masked_sums:MaskedSum.release",
        _opened_first,
        "server/test_round.py::test_a_masked_sum_is_charged_before_it_is_opened",
    ),
    Fault(
        "a node's masked vector leaves before it is paid for",
        "discreet.node.masked_work:MaskedWork.release",
        always(None),
        "flower/test_masked_transport.py::test_each_node_charges_its_own_ledger_what_the_server_charges",
    ),
    Fault(
        "a simulation opens a sum of fewer clients than may be left",
        "discreet.simulation.in_process:InTheClear.ask",
        lambda real: lambda self, **asked: real(replace(self, fewest=0), **asked),
        "simulation/test_secure.py::test_a_sum_of_fewer_clients_than_may_be_left_is_not_opened",
    ),
    Fault(
        "a client gives an update in the clear in a run under secure aggregation",
        "discreet.node.client:Client.answer",
        lambda _: _answered,
        "node/test_secure_doors.py::test_a_client_gives_no_exact_values_of_a_masked_run",
    ),
    Fault(
        "the noise of a masked sum may be half of what the owner's policy asks for",
        "discreet.node.masked_work:check_own_count",
        lambda real: (
            lambda policy, event: real(replace(policy, min_noise_multiplier=policy.min_noise_multiplier / 2), event)
        ),
        "node/test_secure_doors.py::test_a_policy_of_the_noise_that_is_declared_is_held_to_the_noise_that_there_is",
    ),
    Fault(
        "an app behind the mod does not ask its owner's policy",
        "discreet.flower.secure_sum_mod:admit_one",
        always(None),
        "node/test_secure_doors.py::test_each_door_asks_the_owners_policy",
    ),
    Fault(
        "a node answers a stage on other terms than those of its keys",
        "discreet.masking.node:MaskingNode.agreed",
        lambda _: property(lambda self: b""),
        "node/test_bound_terms.py::test_no_stage_is_answered_on_other_terms_than_those_of_the_keys",
    ),
    Fault(
        "a node gives keys for a sum that its owner does not allow",
        "discreet.node.secure_aggregation:check_sums",
        always(None),
        "node/test_bound_terms.py::test_a_node_gives_no_keys_for_a_sum_that_its_owner_does_not_allow",
    ),
    Fault(
        "a shared step of a client with any number of batches is put on the grid",
        "discreet.privacy.secure_grid:MOST_GRADIENTS",
        lambda _: 2**30,
        "node/test_admission.py::test_in_a_shared_step_a_client_may_have_16_batches_of_examples_and_not_one_example_more",
    ),
    Fault(
        "frozen layers compute features of all rows together, unwatched",
        "discreet.models.fixed_part:rows_apart",
        lambda _: lambda forward, inputs, modules: forward(inputs),
        "models/test_fixed_part.py::test_an_example_moves_no_features_of_another",
    ),
    Fault(
        "features of other frozen values are taken for those of these",
        "discreet.models.fixed_part:frozen_digest",
        always(""),
        "models/test_fixed_part.py::test_features_are_computed_once_and_their_files_are_private_or_without_a_name",
    ),
    Fault(
        "a client trains on other frozen values than the server's",
        "discreet.node.client:frozen_digest",
        always(ANY),
        "models/test_frozen.py::test_a_client_refuses_to_train_on_other_frozen_values_than_the_servers",
    ),
    Fault(
        "the first of FFA-LoRA's matrices is trained too",
        "discreet.models.transformer:with_lora",
        lambda real: lambda model, lora, **how: real(model, replace(lora, kind="lora"), **how),
        "models/test_transformer.py::test_what_learns_is_small_and_all_else_is_the_same_wherever_it_is_built",
    ),
    Fault(
        "code in a folder of weights runs",
        "discreet.data.tokens:LOCAL",
        lambda real: real | {"trust_remote_code": True},
        "models/test_transformer.py::test_code_in_a_folder_is_never_run",
    ),
)

CHECKS = (
    Fault("no fault at all", "discreet.privacy.clipping:CLIP_MARGIN", lambda real: real, FAULTS[0].test),
    Fault("one that fits no longer", "discreet.privacy.clipping:clip_by_norm", lambda _: lambda: None, FAULTS[0].test),
)
EVERY = (*FAULTS, *CHECKS)


def main(words: Sequence[str] | None = None) -> int:
    """Plants the faults; 1 if one was not caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--only", default="", metavar="WORDS", help="faults whose names hold these words")
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
