"""Faults of masked sums, see `tests.faults`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tests.planting import Fault, always


def _opened_first(real: Any) -> Any:
    def secure_round(state: Any, sealed: Any, settings: Any, *, charge: Any) -> Any:
        total = sealed.open()
        return real(state, replace(sealed, open=lambda: total), settings, charge=charge)

    return secure_round


MASKED_FAULTS = (
    Fault(
        "a node signs any two lists",
        "discreet.masking.node_stages:_check_lists",
        always(None),
        "masking/test_attacks.py::test_a_node_in_both_lists_is_refused",
    ),
    Fault(
        "a node takes keys that nobody signed",
        "discreet.masking.node_stages:is_signed",
        always(True),
        "masking/test_attacks.py::test_a_key_that_was_swapped_under_a_true_signature_is_found_out",
    ),
    Fault(
        "a node opens a sum whose lists others did not sign",
        "discreet.masking.node_stages:_check_signatures",
        always(None),
        "masking/test_attacks.py::test_fewer_signatures_than_the_threshold_open_nothing",
    ),
    Fault(
        "a node that has given its shares does not close the round",
        "discreet.masking.attempts:NodeState.closed_until",
        lambda _: lambda self, number: self,
        "masking/test_attacks.py::test_a_round_that_was_opened_can_not_be_tried_again",
    ),
    Fault(
        "the noise of a secure sum is shared among all nodes, not among the honest survivors",
        "discreet.privacy.secure_grid:_at",
        lambda real: (
            lambda fineness, wanted: replace(
                real(fineness, wanted),
                variance=real(fineness, wanted).variance * wanted.cohort.summands // wanted.cohort.nodes,
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
        "discreet.client.noised_vector:noised_vector",
        lambda real: (
            lambda vector, reply, request, source: real(
                vector if request.work.trains else replace(vector, variance=0), reply, request, source
            )
        ),
        "audit/test_masked_audit.py::test_a_masked_sum_of_ratings_alone_is_not_refuted_and_costs_what_its_noise_says",
    ),
    Fault(
        "a masked sum is opened before it is charged",
        "discreet.federated.secure_round:secure_round",
        _opened_first,
        "federated/test_round.py::test_a_masked_sum_is_charged_before_it_is_opened",
    ),
    Fault(
        "a node's masked vector leaves before it is paid for",
        "discreet.client.masked_work:MaskedWork.release",
        always(None),
        "federated/test_masked_transport.py::test_each_node_charges_its_own_ledger_what_the_server_charges",
    ),
    Fault(
        "a node charges a shared step to the guarantee of whole clients",
        "discreet.client.masked_work:MaskedWork.guarantee",
        lambda _: property(lambda self: "user"),
        "federated/test_masked_transport.py"
        "::test_a_step_that_clients_share_is_the_run_without_masks_and_each_node_charges_its_own_ledger",
    ),
    Fault(
        "a simulation opens a sum of fewer clients than may be left",
        "discreet.federated.sealed_sum:InTheClear.ask_sealed",
        lambda real: lambda self, **asked: real(replace(self, fewest=0), **asked),
        "simulation/test_secure.py::test_a_sum_of_fewer_clients_than_may_be_left_is_not_opened",
    ),
)
