"""Faults of masked sums, see `tests.faults`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from discreet.node.policy import ClientPolicy
from discreet.protocol.messages import TrainReply
from tests.planting import Fault, always


def _opened_first(real: Any) -> Any:
    def release(self: Any, replies: Any, at: Any) -> Any:
        (unopened,) = replies
        total = unopened.open()
        return real(self, [replace(unopened, open=lambda: total)], at)

    return release


def _answered(self: Any, request: Any, params: Any) -> TrainReply:
    values, _ = self._values(request, params)
    return TrainReply(request.round, values.update, values.below, answer=values.answer)


MASKED_FAULTS = (
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
        "discreet.node.release:noised_vector",
        lambda real: (
            lambda vector, reply, request, source: real(
                vector if request.work.trains else replace(vector, variance=0), reply, request, source
            )
        ),
        "audit/test_masked_audit.py::test_a_masked_sum_of_ratings_alone_is_not_refuted_and_costs_what_its_noise_says",
    ),
    Fault(
        "a masked sum is opened before it is charged",
        "discreet.mechanisms.masked_gaussian:MaskedSum.release",
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
        "a node charges a shared step to the guarantee of whole clients",
        "discreet.node.masked_work:MaskedWork.guarantee",
        lambda _: property(lambda self: "user"),
        "flower/test_masked_transport.py"
        "::test_a_step_that_clients_share_is_the_run_without_masks_and_each_node_charges_its_own_ledger",
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
        "a masked vector is given in a run in the clear",
        "discreet.node.masked_work:MaskedWork.__post_init__",
        always(None),
        "node/test_secure_doors.py::test_a_masked_vector_is_not_given_in_a_run_in_the_clear",
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
        "an app behind the mod has no policy",
        "discreet.flower.secure_sum_mod:policy_from",
        lambda _: lambda node_config: ClientPolicy(),
        "node/test_secure_doors.py::test_each_door_asks_the_owners_policy",
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
)
