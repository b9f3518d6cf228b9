"""Neighbour replay: does a mechanism do what its privacy proof assumes? (Cebere et al. 2026, arXiv
2602.17454.)

A mechanism runs twice, on neighbouring inputs and with the same randomness. The first run is
recorded: what reaches each noise step, and what the step releases. In the second run each noise
step releases again what it released in the first. That is what the composition of adaptive
mechanisms assumes: given equal releases so far, how much does the next step differ? So later steps,
which may depend on releases, are compared fairly too. Three things must hold.

1. The totals that reach a step differ by at most the sensitivity that the step declares.
2. How often noise is drawn, of which kind and for which sensitivity is the same: a function of
   public values and releases.
3. What leaves is the same: a function of public values and releases.

It lives in the tests and not in the package, which should hold no code that takes noise away. To
check a mechanism of your own, draw its noise by `Gaussian` or `Laplace` and call `replay`.

Under secure aggregation each client draws noise by `SecureSum.noise`, and a sum is read by
`SecureSum.decode`: there the sum without noise is compared, in exact integers. As noise only the
least counts that h clients have drawn since the last sum, h being how many are accounted, and it
must have the variance that is accounted.

If noise is correlated over rounds, a step's totals may differ by the sensitivity too; what all
steps cost together is found by taking the earlier noise that is in each off again. Each round's
noise must be the same wherever it is used."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

from discreet.mechanisms.round_state import StateInMemory
from discreet.privacy.correlated_gaussian import CorrelatedGaussian
from discreet.privacy.grid import Grid
from discreet.privacy.mechanisms import Gaussian, Laplace
from discreet.privacy.randomness import RandomSource, seeded_source
from discreet.privacy.secure_grid import SecureSum

Data = TypeVar("Data")
Kind = Gaussian | Laplace | CorrelatedGaussian

BOTH = "add_noise", "add_grid_noise"
DRAWS: dict[Any, tuple[str, ...]] = {Gaussian: BOTH, Laplace: BOTH, CorrelatedGaussian: BOTH[1:]}
SEED = 60913
ROUNDING = 1e-6  # of the sensitivity: sums are float32 or float64


@dataclass(frozen=True, eq=False)
class NoiseStep:
    """What reached one noise step, in the units of the data, and what it released (as the mechanism
    gave it).

    `masked`: the sum that was read, if clients noised it by themselves; its total is in whole
    steps. `parts`: of noise that is correlated over rounds, the weights and keys.
    """

    mechanism: Kind
    total: Tensor
    sensitivity: float
    released: Tensor
    masked: SecureSum | None = None
    parts: tuple[tuple[float, bytes], ...] = ()

    def distance(self, other: NoiseStep) -> float:
        """How far apart two totals are, in the norm that the noise is for."""
        order = 1 if isinstance(self.mechanism, Laplace) else 2
        return float(
            torch.linalg.vector_norm((self.total - other.total).reshape(-1).double(), order)
        )

    def is_within(self, other: NoiseStep, allowed: float) -> bool:
        """Whether two totals differ by at most `allowed` sensitivities: of whole steps exactly, by
        their squares."""
        if self.masked is None:
            return self.distance(other) <= allowed * self.sensitivity * (1 + ROUNDING)
        squares = sum(moved**2 for moved in (self.total - other.total).tolist())
        return bool(squares <= Fraction(allowed) ** 2 * self.masked.sensitivity_squared)


@dataclass(frozen=True)
class Replay:
    """What a replay found.

    Attributes:
      faults: one sentence for each broken assumption; none where all hold.
      shares: of each noise step, how far apart the totals were, as a share of the sensitivity that
        may be: 1 is the worst case, and shows that the neighbours put the bound to the test.
      gaussian_distance: sqrt(sum over steps of (distance / standard deviation)^2), Gaussian steps
        only: all of them together cost one Gaussian of noise multiplier 1 / gaussian_distance.
    """

    faults: tuple[str, ...]
    shares: tuple[float, ...]
    gaussian_distance: float


def replay(
    run: Callable[[Data, RandomSource], object],
    data: Data,
    neighbour: Data,
    *,
    sensitivities: float = 1.0,
) -> Replay:
    """Runs a mechanism on `data`, then on `neighbour`, and compares what its noise steps were given
    and what left.

    Args:
      run: the mechanism: data and a source of all its randomness to everything that leaves. It
        starts from the same state in both calls: what it writes to (a ledger, a model) must be its
        own.
      data, neighbour: two inputs that differ in one unit.
      sensitivities: how many of the declared sensitivities the neighbours may differ by: 2 where a
        unit is replaced and the accounting, rather than the noise step, allows for it.
    """
    first: list[NoiseStep] = []
    second: list[NoiseStep] = []
    with _noise_steps(lambda _, mechanism_release: mechanism_release(), first):
        left = run(data, seeded_source(SEED))
    with _noise_steps(
        lambda number, fresh: first[number].released if number < len(first) else fresh(), second
    ):
        right = run(neighbour, seeded_source(SEED))
    faults = [
        *_compare_numbers(first, second),
        *differences(left, right),
        *_compare_keys(first, second),
    ]
    shares, squares = [], 0.0
    for number, (one, other) in enumerate(zip(first, second, strict=False)):
        faults += [
            f"noise step {number}: {fault}" for fault in _compare_steps(one, other, sensitivities)
        ]
        distance = one.distance(other) if one.total.shape == other.total.shape else math.inf
        shares.append(distance / (sensitivities * one.sensitivity))
        if isinstance(one.mechanism, Gaussian) and one.mechanism.noise_multiplier > 0:
            squares += (distance / one.mechanism.stddev(one.sensitivity)) ** 2
    return Replay(tuple(faults), tuple(shares), math.sqrt(squares + _correlated(first, second)))


def _correlated(first: list[NoiseStep], second: list[NoiseStep]) -> float:
    """The squared distance of correlated steps together: each difference less that of the earlier
    noise in it."""
    moved, squares = dict[bytes, Tensor](), 0.0
    for one, other in zip(first, second, strict=False):
        if one.parts and one.total.shape == other.total.shape and one.mechanism.noise_multiplier:
            (_, own), *earlier = one.parts
            known = [weight * moved[key] for weight, key in earlier if key in moved]
            moved[own] = (one.total - other.total).double() - sum(known)
            squares += float(moved[own].norm() / one.mechanism.stddev(one.sensitivity)) ** 2
    return squares


def _compare_keys(first: list[NoiseStep], second: list[NoiseStep]) -> Iterator[str]:
    """Whether each release has a key of its own, for both inputs, and goes on from the keys of one
    before it."""
    known = dict[bytes, list[bytes]]()
    for own, *earlier in ([key for _, key in step.parts] for step in first if step.parts):
        if own in known or (earlier and earlier != known.get(earlier[0], [])[: len(earlier)]):
            yield "other noise was drawn for an earlier round"
        known[own] = [own, *earlier]
    if any(one.parts != other.parts for one, other in zip(first, second, strict=False)):
        yield "the noise of rounds depends on the data"


def _compare_numbers(first: list[NoiseStep], second: list[NoiseStep]) -> Iterator[str]:
    if not first:
        yield "nothing was noised"
    if len(first) != len(second):
        yield (
            f"noise was drawn {len(first)} times for one input and {len(second)} times for the "
            "other"
        )


def _compare_steps(one: NoiseStep, other: NoiseStep, sensitivities: float) -> Iterator[str]:
    if one.mechanism != other.mechanism or one.sensitivity != other.sensitivity:
        what = [
            f"{step.mechanism} for a sensitivity of {step.sensitivity:g}" for step in (one, other)
        ]
        yield f"the noise depends on the data: {' and '.join(what)}"
    if one.mechanism.noise_multiplier == 0:
        yield "there is no noise"
    elif one.masked is not None and one.mechanism.noise_multiplier < _accounted(one.masked):
        yield (
            f"noise of {one.mechanism.noise_multiplier:g} was drawn, and "
            f"{_accounted(one.masked):g} is accounted"
        )
    if one.total.shape != other.total.shape:
        yield (
            f"the shape depends on the data: {tuple(one.total.shape)} and "
            f"{tuple(other.total.shape)}"
        )
        return
    least = min(one, other, key=lambda step: step.sensitivity)
    if not least.is_within(other if least is one else one, sensitivities):
        allowed = sensitivities * least.sensitivity
        yield f"the totals differ by {one.distance(other):g}, and the sensitivity is {allowed:g}"


def _accounted(vector: SecureSum) -> float:
    """The noise multiplier of h clients' noise together, h being how many are accounted."""
    return math.sqrt(vector.summands * vector.variance / vector.sensitivity_squared)


def differences(one: object, other: object, name: str = "what leaves") -> list[str]:
    """Where two values differ: tensors, numbers, texts, and lists, dictionaries and dataclasses of
    such."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        same = one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())
        return [] if same else [f"{name} depends on the data beside what was noised"]
    if isinstance(one, StateInMemory):  # which stays with the server
        return []
    if dataclasses.is_dataclass(one) and type(one) is type(other):
        return differences(vars(one), vars(other), name)
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [
            fault for key in one for fault in differences(one[key], other[key], f"{name}: {key}")
        ]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [fault for at, (a, b) in pairs for fault in differences(a, b, f"{name}: {at}")]
    return (
        []
        if one == other
        else [f"{name} depends on the data beside what was noised: {one} and {other}"]
    )


@contextmanager
def _noise_steps(
    release: Callable[[int, Callable[[], Tensor]], Tensor], steps: list[NoiseStep]
) -> Iterator[None]:
    """While it lasts, each call of a mechanism's noise is taken down, and releases what `release`
    says."""

    def intercept(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def noised(
            self: Kind, total: Tensor, sensitivity: float, *given: Any, **named: Any
        ) -> Tensor:
            number = len(steps)
            # before the noise, which may take its place
            held = _in_units(total.clone(), named.get("grid"))
            released = release(number, lambda: original(self, total, sensitivity, *given, **named))
            parts = tuple(named.get("parts", ()))
            steps.append(NoiseStep(self, held, sensitivity, released.clone(), parts=parts))
            return released.clone()

        return noised

    with ExitStack() as stack:
        for kind, methods in DRAWS.items():
            for method in methods:
                stack.enter_context(patch.object(kind, method, intercept(getattr(kind, method))))
        for method, replacement in _masked_sums(release, steps).items():
            stack.enter_context(patch.object(SecureSum, method, replacement))
        yield


def _masked_sums(
    release: Callable[[int, Callable[[], Tensor]], Tensor], steps: list[NoiseStep]
) -> dict[str, Any]:
    """What takes the place of a secure sum's methods: clients' noise is counted, and added where
    the sum is read."""
    drawn: list[SecureSum] = []
    draw, read = SecureSum.noise, SecureSum.decode

    def noise(self: SecureSum, source: RandomSource) -> Tensor:
        drawn.append(self)
        return torch.zeros(self.length, dtype=torch.int64)

    def decode(self: SecureSum, total: Tensor, clip_norm: float) -> Any:
        number, least = len(steps), sorted(vector.variance for vector in drawn)[: self.summands]
        sensitivity = math.sqrt(self.sensitivity_squared)
        mechanism = Gaussian(math.sqrt(sum(least) / self.sensitivity_squared))
        source = seeded_source(SEED).child("masked", number)
        released = release(number, lambda: total + draw(self, source))
        steps.append(NoiseStep(mechanism, total.clone(), sensitivity, released.clone(), self))
        drawn.clear()
        return read(self, released, clip_norm)

    return {"noise": noise, "decode": decode}


def _in_units(total: Tensor, grid: Grid | None) -> Tensor:
    return total.detach().double().clone() if grid is None else total.double() * grid.step
