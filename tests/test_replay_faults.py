"""The neighbour replay finds planted faults: each is a small round of its own that gets one thing
wrong."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from discreet.privacy.mechanisms import Gaussian, Laplace
from discreet.privacy.quantile import BIT_SENSITIVITY, QuantileEstimator
from discreet.privacy.randomness import RandomSource
from discreet.privacy.secure_grid import SecureCohort, SecureSum, example_secure_sum, secure_sum
from tests.node.clients import examples, gradients, linear
from tests.replay import Replay, replay

C, Z, EXPECTED_COHORT = 0.5, 1.0, 4.0
NOISE = Gaussian(Z)


@dataclass(frozen=True, eq=False)
class Client:
    """A client's part: an update, its number of examples, and an integer buffer of its model."""

    update: Tensor
    num_examples: int = 1
    batches_seen: int = 3

    @property
    def clipped(self) -> Tensor:
        return self.update * min(1.0, C / float(self.update.norm()))

    @property
    def below(self) -> bool:
        return float(self.update.norm()) <= C


Cohort = list[Client]


def total_of(cohort: Cohort) -> Tensor:
    return sum((client.clipped for client in cohort), torch.zeros(2))


def sound(cohort: Cohort, source: RandomSource) -> object:
    bits = torch.tensor([sum(0.5 if client.below else -0.5 for client in cohort)])
    noised = NOISE.add_noise(total_of(cohort), C, source.child("update"))
    count = Gaussian(4.0 / BIT_SENSITIVITY).add_noise(bits, BIT_SENSITIVITY, source.child("count"))
    estimator, _ = QuantileEstimator(C, 0.5, 0.2).update(
        float(count), expected_cohort=EXPECTED_COHORT
    )
    return noised / EXPECTED_COHORT, estimator.estimate


def clip_after_noise(cohort: Cohort, source: RandomSource) -> object:
    noised = NOISE.add_noise(sum((client.update for client in cohort), torch.zeros(2)), C, source)
    return noised * min(1.0, C / float(noised.norm()))


def no_clip(cohort: Cohort, source: RandomSource) -> object:
    return (
        NOISE.add_noise(sum((client.update for client in cohort), torch.zeros(2)), C, source)
        / EXPECTED_COHORT
    )


def noise_for_the_next_clip_norm(
    cohort: Cohort, source: RandomSource, *, stddev: float = 0.1, rate: float = 0.2
) -> object:
    bits = torch.tensor([sum(0.5 if client.below else -0.5 for client in cohort)])
    count = Gaussian(stddev / BIT_SENSITIVITY).add_noise(
        bits, BIT_SENSITIVITY, source.child("count")
    )
    estimator, _ = QuantileEstimator(C, 0.5, rate).update(
        float(count), expected_cohort=EXPECTED_COHORT
    )
    noised = NOISE.add_noise(total_of(cohort), estimator.estimate, source.child("update"))
    return noised / EXPECTED_COHORT, estimator.estimate


def data_dependent_denominator(cohort: Cohort, source: RandomSource) -> object:
    return NOISE.add_noise(total_of(cohort), C, source) / len(cohort)


def mean_before_noise(cohort: Cohort, source: RandomSource) -> object:
    return NOISE.add_noise(total_of(cohort) / len(cohort), C / len(cohort), source)


def weights_by_num_examples(cohort: Cohort, source: RandomSource) -> object:
    total = sum((client.num_examples * client.clipped for client in cohort), torch.zeros(2))
    return NOISE.add_noise(total, C, source) / EXPECTED_COHORT


def weights_that_add_up_to_one(cohort: Cohort, source: RandomSource) -> object:
    whole = sum(client.num_examples for client in cohort)
    total = sum((client.num_examples / whole * client.clipped for client in cohort), torch.zeros(2))
    return NOISE.add_noise(total, C / EXPECTED_COHORT, source)


def unclipped_integer_buffer(cohort: Cohort, source: RandomSource) -> object:
    noised = NOISE.add_noise(total_of(cohort), C, source) / EXPECTED_COHORT
    return {
        "weight": noised,
        "num_batches_tracked": sum(client.batches_seen for client in cohort) // 4,
    }


def integer_buffer_noised_but_not_clipped(cohort: Cohort, source: RandomSource) -> object:
    seen = torch.tensor([float(sum(client.batches_seen for client in cohort))])
    return NOISE.add_noise(torch.cat([total_of(cohort), seen]), C, source) / EXPECTED_COHORT


def bits_that_are_not_centred(
    cohort: Cohort, source: RandomSource, *, stddev: float = 4.0
) -> object:
    count = torch.tensor([float(sum(client.below for client in cohort))])
    return Gaussian(stddev / BIT_SENSITIVITY).add_noise(count, BIT_SENSITIVITY, source)


def noise_only_where_somebody_replied(cohort: Cohort, source: RandomSource) -> object:
    return (
        NOISE.add_noise(total_of(cohort), C, source) / EXPECTED_COHORT
        if len(cohort) > 2
        else torch.zeros(2)
    )


def clip_norm_from_the_data(cohort: Cohort, source: RandomSource) -> object:
    median = float(torch.stack([client.update.norm() for client in cohort]).median())
    clipped = [client.update * min(1.0, median / float(client.update.norm())) for client in cohort]
    return NOISE.add_noise(torch.stack(clipped).sum(0), median, source) / EXPECTED_COHORT


def no_noise(cohort: Cohort, source: RandomSource) -> object:
    return Gaussian(0.0).add_noise(total_of(cohort), C, source) / EXPECTED_COHORT


def noise_of_its_own(cohort: Cohort, source: RandomSource) -> object:
    return total_of(cohort) + Z * C * source.normal(2)


Encode = Callable[[Client], Tensor]


def plain_vector(client: Client) -> Tensor:
    return VECTOR.encode(client.update, C, below=client.below)


def vector_without_a_clip(client: Client) -> Tensor:
    steps = (client.update * VECTOR.clip_steps / C).long()
    return torch.cat([steps, plain_vector(client)[2:]])


def vector_with_a_bit_of_one(client: Client) -> Tensor:
    vector = plain_vector(client)
    vector[2] *= 2
    return vector


VECTOR = secure_sum(2, SecureCohort(4, 2), noise_multiplier=Z, count_stddev=4.0)


def masked(
    cohort: Cohort, source: RandomSource, *, encode: Encode = plain_vector, noised: int = 100
) -> Tensor:
    """A masked sum, each client's vector with noise of its own; of the first `noised` only."""
    total = torch.zeros(VECTOR.length, dtype=torch.int64)
    for number, client in enumerate(cohort):
        total += encode(client)
        if number < noised:
            total += VECTOR.noise(source.child(number))
    update, below, _ = VECTOR.decode(VECTOR.centred(total), C)
    return torch.cat([update / EXPECTED_COHORT, torch.tensor([below])])


def masked_without_a_clip(cohort: Cohort, source: RandomSource) -> object:
    return masked(cohort, source, encode=vector_without_a_clip)


def masked_with_bits_of_one(cohort: Cohort, source: RandomSource) -> object:
    return masked(cohort, source, encode=vector_with_a_bit_of_one)


def masked_with_noise_of_nobody(cohort: Cohort, source: RandomSource) -> object:
    return masked(cohort, source, noised=0)


def masked_with_a_mean_of_those_who_replied(cohort: Cohort, source: RandomSource) -> object:
    return masked(cohort, source) / len(cohort)


OTHERS = [Client(torch.tensor([0.1, 0.1])), Client(torch.tensor([-0.2, 0.1]))]
# At the clip norm, with many examples: what a sound round allows for.
EXTRA = Client(torch.tensor([0.3, 0.4]), num_examples=20, batches_seen=900)
LONG = Client(torch.tensor([30.0, 40.0]))

DIFFER, DEPENDS = "the totals differ by", "depends on the data beside what was noised"
FAULTS: dict[Callable[[Cohort, RandomSource], object], tuple[Client, str]] = {
    clip_after_noise: (LONG, DIFFER),
    no_clip: (LONG, DIFFER),
    noise_for_the_next_clip_norm: (EXTRA, DIFFER),
    data_dependent_denominator: (EXTRA, DEPENDS),
    mean_before_noise: (EXTRA, "the noise depends on the data"),
    weights_by_num_examples: (EXTRA, DIFFER),
    weights_that_add_up_to_one: (EXTRA, DIFFER),
    unclipped_integer_buffer: (EXTRA, f"num_batches_tracked {DEPENDS}"),
    integer_buffer_noised_but_not_clipped: (EXTRA, DIFFER),
    bits_that_are_not_centred: (EXTRA, DIFFER),
    noise_only_where_somebody_replied: (
        EXTRA,
        "noise was drawn 1 times for one input and 0 times for the other",
    ),
    clip_norm_from_the_data: (LONG, "the noise depends on the data"),
    no_noise: (EXTRA, "there is no noise"),
    noise_of_its_own: (EXTRA, "nothing was noised"),
    masked_without_a_clip: (LONG, DIFFER),
    masked_with_bits_of_one: (EXTRA, DIFFER),
    masked_with_noise_of_nobody: (EXTRA, "there is no noise"),
    masked_with_a_mean_of_those_who_replied: (EXTRA, DEPENDS),
}


def found_in(run: Callable[[Cohort, RandomSource], object], extra: Client) -> Replay:
    return replay(run, [*OTHERS, extra], OTHERS)


@pytest.mark.parametrize(("run", "planted"), FAULTS.items(), ids=[run.__name__ for run in FAULTS])
def test_a_planted_fault_is_found(
    run: Callable[[Cohort, RandomSource], object], planted: tuple[Client, str]
) -> None:
    extra, message = planted
    assert any(message in fault for fault in found_in(run, extra).faults)


@pytest.mark.parametrize("extra", [EXTRA, LONG, Client(torch.tensor([1e-9, 0.0]))])
def test_a_sound_round_is_not_accused(extra: Client) -> None:
    for run in (sound, masked):
        assert found_in(run, extra).faults == ()
        assert replay(run, OTHERS, [*OTHERS, extra]).faults == ()


def test_noise_of_fewer_clients_than_are_accounted_is_not_taken_for_enough() -> None:
    enough, one = (
        replay(partial(masked, noised=count), [*OTHERS, EXTRA], OTHERS) for count in (2, 1)
    )
    assert one.gaussian_distance == pytest.approx(math.sqrt(2) * enough.gaussian_distance)


def clip_of_the_batch(count: int, source: RandomSource, *, noise: Gaussian = NOISE) -> Tensor:
    whole = torch.stack(gradients(linear(), examples(count))).sum(0)
    return noise.add_noise(whole * min(1.0, C / float(whole.norm())), C / 8, source)


def test_a_batch_that_is_clipped_in_place_of_its_examples_is_found() -> None:
    (fault,) = replay(clip_of_the_batch, 3, 2).faults
    assert DIFFER in fault


LOCAL = {
    "sensitivity of adding, not of replacing": (2, 1.0, Gaussian(Z)),
    "laplace noise for a clip in l2": (2, 2.0, Laplace(Z)),
}


@pytest.mark.parametrize(("order", "sensitivities", "noise"), LOCAL.values(), ids=LOCAL.keys())
def test_a_local_mechanism_with_the_wrong_sensitivity_is_found(
    order: int, sensitivities: float, noise: Gaussian | Laplace
) -> None:
    update = torch.tensor([3.0, 4.0, -5.0])

    def run(value: Tensor, source: RandomSource) -> Tensor:
        clipped = value * min(1.0, C / float(torch.linalg.vector_norm(value, order)))
        return noise.add_noise(clipped, sensitivities * C, source)

    (fault,) = replay(run, update, -update).faults
    assert DIFFER in fault


# A step that clients share, in its worst case: h clients, each with the gradients (m, 2) of its
# examples.
STEP = example_secure_sum(2, SecureCohort(3, 2), noise_multiplier=Z, largest_sum=4)
Shares = list[Tensor]


def clipped_rows(rows: Tensor, *, norm: float = C) -> Tensor:
    return rows * (norm / rows.norm(dim=1, keepdim=True)).clamp(max=1.0)


def on_the_grid(total: Tensor) -> Tensor:
    return STEP.encode_gradients(total, C)


def shared(
    shares: Shares,
    source: RandomSource,
    *,
    sum_of: Callable[[Tensor], Tensor] = lambda rows: clipped_rows(rows).sum(0),
    encode: Callable[[Tensor], Tensor] = on_the_grid,
    noised: Callable[[Tensor], bool] = lambda _: True,
    draws: SecureSum = STEP,
    read: SecureSum = STEP,
) -> Tensor:
    """What the server learns of a step; each argument is one thing that can go wrong."""
    total = torch.zeros(2, dtype=torch.int64)
    for number, rows in enumerate(shares):
        total += encode(sum_of(rows))
        if noised(rows):
            total += draws.noise(source.child(number))
    return read.decode(read.centred(total), C)[0] / 4


def sum_clipped_as_a_whole(rows: Tensor) -> Tensor:
    whole = rows.sum(0)
    return whole * min(1.0, len(rows) * C / max(float(whole.norm()), 1e-9))


def mean_over_the_own_number(rows: Tensor) -> Tensor:
    return clipped_rows(rows).sum(0) * 4 / max(1, len(rows))


def two_epochs(rows: Tensor) -> Tensor:
    return clipped_rows(rows).repeat(2, 1).sum(0)


def batches_that_overlap(rows: Tensor) -> Tensor:
    return clipped_rows(rows[:-1]).sum(0) + clipped_rows(rows[-2:]).sum(0)


def clipped_for_another_norm(rows: Tensor) -> Tensor:
    return clipped_rows(rows, norm=2 * C).sum(0)


def truncated_sum(total: Tensor) -> Tensor:
    """A sum that is truncated as a whole, of which the event says that each example was."""
    return (total * (STEP.clip_steps / C)).long()


FEW_STEPS = torch.tensor([[10.25, 20.65]], dtype=torch.float64) * (C / STEP.clip_steps)
SHARES = [
    torch.cat([FEW_STEPS, torch.zeros(1, 2)]),
    torch.tensor([[-0.1, 0.3]], dtype=torch.float64),
]
EMPTY = [torch.zeros(0, 2, dtype=torch.float64), SHARES[1]]
AT_THE_CLIP, FAR = (
    factor * torch.tensor([[0.3, 0.4]], dtype=torch.float64) for factor in (1.0, 100.0)
)
TOO_LITTLE = "is accounted"
FAULTS_OF_STEPS: dict[str, tuple[dict[str, Any], Shares, Tensor, str]] = {
    "clipped as a sum": ({"sum_of": sum_clipped_as_a_whole}, SHARES, FAR, DIFFER),
    "divided by the own number": (
        {"sum_of": mean_over_the_own_number},
        SHARES,
        AT_THE_CLIP,
        DIFFER,
    ),
    "counted twice over epochs": ({"sum_of": two_epochs}, EMPTY, AT_THE_CLIP, DIFFER),
    "counted twice over batches": (
        {"sum_of": batches_that_overlap},
        [AT_THE_CLIP, SHARES[1]],
        AT_THE_CLIP,
        DIFFER,
    ),
    "noise for another clip norm than clipped": (
        {"sum_of": clipped_for_another_norm},
        SHARES,
        FAR,
        DIFFER,
    ),
    "rounded after summing, and not counted": (
        {
            "encode": truncated_sum,
            "draws": replace(STEP, largest_sum=0),
            "read": replace(STEP, largest_sum=0),
        },
        SHARES,
        AT_THE_CLIP,
        DIFFER,
    ),
    "a share of noise for half the clip norm": (
        {"draws": replace(STEP, variance=STEP.variance // 4)},
        SHARES,
        AT_THE_CLIP,
        TOO_LITTLE,
    ),
    "noise shared among all nodes": (
        {"draws": example_secure_sum(2, SecureCohort(3, 3), noise_multiplier=Z, largest_sum=4)},
        SHARES,
        AT_THE_CLIP,
        TOO_LITTLE,
    ),
    "no noise of clients without examples": (
        {"noised": lambda rows: len(rows) > 0},
        EMPTY,
        AT_THE_CLIP,
        TOO_LITTLE,
    ),
    "no noise of clients": ({"noised": lambda _: False}, SHARES, AT_THE_CLIP, "there is no noise"),
}


def found_in_step(shares: Shares, more: Tensor, how: dict[str, Any]) -> tuple[str, ...]:
    there = [torch.cat([shares[0], more]), *shares[1:]]
    run = partial(shared, **how)
    return (*replay(run, there, shares).faults, *replay(run, shares, there).faults)


@pytest.mark.parametrize("planted", FAULTS_OF_STEPS.values(), ids=FAULTS_OF_STEPS.keys())
def test_a_planted_fault_of_a_shared_step_is_found(
    planted: tuple[dict[str, Any], Shares, Tensor, str],
) -> None:
    how, shares, more, message = planted
    assert any(message in fault for fault in found_in_step(shares, more, how))


@pytest.mark.parametrize("shares", [SHARES, EMPTY], ids=["with others", "empty"])
@pytest.mark.parametrize("more", [AT_THE_CLIP, FAR], ids=["at the clip", "far"])
def test_a_sound_shared_step_is_not_accused(shares: Shares, more: Tensor) -> None:
    assert found_in_step(shares, more, {}) == ()


def test_only_exact_integers_show_the_difference_of_a_sum_rounded_as_a_whole() -> None:
    how, shares, more, _ = FAULTS_OF_STEPS["rounded after summing, and not counted"]
    found = replay(partial(shared, **how), [torch.cat([shares[0], more]), shares[1]], shares)
    assert 1 < found.shares[0] < 1.001
