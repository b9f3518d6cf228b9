"""The integer vector that a client adds to a secure sum: its clipped update on a grid, its bit,
query answer and noise.

Vectors are added up modulo 2^k. The grid is tied to the clip norm: R steps, a constant of the run,
are one clip norm in every round. So the event is the same in every round.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from discreet.accounting.events import check_noise_multiplier
from discreet.privacy.clipping import clip_to_grid
from discreet.privacy.discrete_gaussian import discrete_gaussian
from discreet.privacy.grid import Grid
from discreet.privacy.randomness import RandomSource

if TYPE_CHECKING:
    from dp_accounting import DpEvent

FEWEST_BITS = 16
MOST_BITS = 24
MOST_BITS_OF_EXAMPLES = 32
# steps in C / sqrt(num_params): truncation moves an update by less than C / steps
FINEST = 1024
COARSEST = 16
# The rounding error of a float64 sum is counted for this many times `SecureSum.largest_sum`
# gradients.
MOST_GRADIENTS = 16
# Standard deviations of all clients' noise together that fit beside the largest sum. The noise is
# sub-Gaussian with its own variance (Canonne, Kamath and Steinke 2020): it wraps a coordinate
# around 2^k with a chance of at most 2 exp(-12^2 / 2) = 1.1e-31, which spoils the coordinate and
# costs no privacy.
NOISE_ROOM = 12
_WHOLE_STEPS = Grid(1.0)


@dataclass(frozen=True)
class SecureCohort:
    """The clients of a secure sum: at most `nodes` (n) clients add a vector with noise, and a sum
    that is opened has at least `summands` (h) honest ones. Only the honest clients' noise is
    accounted.
    """

    nodes: int
    summands: int

    def __post_init__(self) -> None:
        if not 1 <= self.summands <= self.nodes:
            raise ValueError(
                f"summands must be within [1, nodes = {self.nodes}], not {self.summands}"
            )


@dataclass(frozen=True)
class SecureSum:
    """The public constants of a secure sum of vectors, one from each client; made by `secure_sum`.

    Guarantee: zeroing out one client's encoded vector (or one example of one client, at example
    level) moves the sum by an integer vector whose squared L2 norm is at most
    `sensitivity_squared`, exactly, whatever that client's data is. A dishonest client can send any
    integers: nobody sees them.

    Attributes:
        num_params: length of an update.
        clip_steps: R, one clip norm in steps.
        variance: sigma_i^2 of one client's noise in each coordinate, in steps^2, a whole number; 0
          without noise.
        bits: k; sums are taken modulo 2^k.
        nodes, summands: n and h of `SecureCohort`.
        bit_steps: size of the bit's entry, in steps; 0 without a bit.
        answer_length, answer_steps: length and norm of a query answer; 0 without one.
        largest_sum: number of examples whose gradients fit into a client's sum; 0 at user level.
    """

    num_params: int
    clip_steps: int
    variance: int
    bits: int
    nodes: int
    summands: int
    bit_steps: int = 0
    answer_length: int = 0
    answer_steps: int = 0
    largest_sum: int = 0

    @property
    def length(self) -> int:
        """The length of a client's vector: update, bit and answer."""
        return self.num_params + (self.bit_steps > 0) + self.answer_length

    @property
    def sensitivity_squared(self) -> int:
        """R^2 + bit_steps^2 + answer_steps^2, in steps^2; at example level (R +
        `gradient_slack`)^2."""
        return (
            (self.clip_steps + self.gradient_slack) ** 2 + self.bit_steps**2 + self.answer_steps**2
        )

    @property
    def gradient_slack(self) -> int:
        """The steps in L2 by which an example may move its client's vector beyond R; 0 at user
        level.

        Truncation to steps moves each coordinate of the difference of two sums by less than 1:
        sqrt(num_params) in L2. A node's sum is exact before that, for up to 2^29 examples
        (`shared_step`), but for the rounding of a product, which is clamped at R * `largest_sum`. A
        simulation that trains clients together adds up m gradients in float64, m at most 16 times
        `largest_sum`: the error is at most (m + 8) 2^-53 of the sum of their sizes (Higham 2002,
        section 4.2), which is at most m R in L2, and an example's own gradient is assumed not to
        depend on the rest, up to 1e-12 of its norm. These errors are the larger ones: they are
        counted, for both sums.
        """
        if not self.largest_sum:
            return 0
        most = MOST_GRADIENTS * self.largest_sum
        each = (most + 8) * 2.0**-53 + 1e-12
        return math.isqrt(self.num_params - 1) + 2 + math.ceil(2 * most * self.clip_steps * each)

    @property
    def own_noise_stddev(self) -> float:
        """The standard deviation of one client's noise, in clip norms."""
        return math.sqrt(self.variance) / self.clip_steps

    @property
    def largest_entry(self) -> int:
        """The bound on each coordinate of a client's vector without noise."""
        return max(self.clip_steps * max(1, self.largest_sum), self.bit_steps, self.answer_steps)

    def event_of(self, *, trains: bool = True, rates: bool = True) -> DpEvent:
        """The event of a sum in which clients send an update with its bit only if it `trains`, and
        an answer only if it `rates`. By a public rule all other entries of every client's vector
        hold noise alone. Adjacency: zero-out. `NonPrivateDpEvent` without noise."""
        from dp_accounting import NonPrivateDpEvent

        from discreet.accounting.distributed_gaussian import DistributedDiscreteGaussianDpEvent

        if self.variance == 0:
            return NonPrivateDpEvent()
        answer = self.answer_steps**2
        moved = trains * (self.sensitivity_squared - answer) + rates * answer
        return DistributedDiscreteGaussianDpEvent(self.variance, self.summands, moved, self.length)

    def encode(
        self,
        update: Tensor | None,
        clip_norm: float,
        *,
        below: bool | None = None,
        answer: Tensor | None = None,
    ) -> Tensor:
        """A client's vector without noise, int64 (length,). Parts that are missing or not finite
        count as zeros.

        The update (num_params,) is truncated to steps of clip_norm / R; if its sum of squares is
        above R^2 in exact integer arithmetic, it is scaled first (`ClippedSum`). The same is done
        to the answer (answer_length,), whose norm is at most 1: neither is trusted. `below` is True
        if the norm was at or below C, the `clip_norm` of this round. Raises ValueError: a bit or an
        answer that this sum has no room for.
        """
        if (below is not None and not self.bit_steps) or (
            answer is not None and not self.answer_length
        ):
            raise ValueError("this secure sum has no room for a bit or an answer")
        vector = torch.zeros(self.length, dtype=torch.int64)
        if update is not None:
            vector[: self.num_params] = _steps_of(update, clip_norm, self.clip_steps)
        if below is not None:
            vector[self.num_params] = self.bit_steps if below else -self.bit_steps
        if answer is not None:
            vector[self.length - self.answer_length :] = _steps_of(answer, 1.0, self.answer_steps)
        return vector

    def encode_gradients(self, total: Tensor, clip_norm: float) -> Tensor:
        """The vector without noise, int64 (length,), of a client that adds up a clipped gradient of
        each of its examples.

        `total` (num_params,) is the sum, to which each example adds a vector of L2 norm at most
        `clip_norm`, computed in float64 throughout. It is truncated to steps of clip_norm / R, and
        each coordinate is clamped to what `largest_sum` examples can reach. A sum that is not
        finite counts as zeros. `gradient_slack` bounds by how much more than R one example moves
        it.
        """
        if (
            not self.largest_sum
            or total.shape != (self.num_params,)
            or total.dtype != torch.float64
        ):
            raise ValueError(
                f"a client's gradients must be a float64 sum of {self.num_params} numbers"
            )
        if not 0 < clip_norm < math.inf:
            raise ValueError(f"clip_norm must be finite and > 0, not {clip_norm}")
        most = self.clip_steps * self.largest_sum
        steps = total * (self.clip_steps / clip_norm)
        if bool(steps.isfinite().all()):
            finite = steps
        else:
            finite = torch.zeros_like(steps)
        return finite.clamp(-most, most).long()

    def noise(self, source: RandomSource) -> Tensor:
        """One client's noise: N_Z(0, sigma_i^2) in each coordinate, int64 (length,)."""
        return discrete_gaussian(self.length, self.variance, source)

    def centred(self, total: Tensor) -> Tensor:
        """A sum modulo 2^k, int64 (length,), as the integers in [-2^(k-1), 2^(k-1)) that it
        represents."""
        half = 2 ** (self.bits - 1)
        centred: Tensor = (total + half).remainder(2**self.bits) - half
        return centred

    def decode(self, total: Tensor, clip_norm: float) -> tuple[Tensor, float | None, Tensor | None]:
        """A centred sum, int64 (length,), in the units of the data: the sum of the updates,
        (num_params,) float64; the sum of (bit - 1/2), or None without bits; and the sum of the
        answers, (answer_length,) float64, or None without answers."""
        values = total.double()
        update = values[: self.num_params] * (clip_norm / self.clip_steps)
        if self.bit_steps:
            below = float(values[self.num_params]) / (2 * self.bit_steps)
        else:
            below = None
        if self.answer_length:
            answers = values[self.length - self.answer_length :] / self.answer_steps
        else:
            answers = None
        return update, below, answers


def secure_sum(
    num_params: int,
    cohort: SecureCohort,
    *,
    noise_multiplier: float,
    count_stddev: float | None = None,
    answers: tuple[int, float] | None = None,
) -> SecureSum:
    """The secure sum of a round at user level: one update (num_params,) from each client, with an
    optional bit and an optional answer.

    Everything together is one release, of noise multiplier (z^-2 + (2 count_stddev)^-2 +
    z_answers^-2)^(-1/2) or more: sigma_i^2 = ceil((z R)^2 / h), so that the noise of h clients has
    a standard deviation of at least z R; a bit is +- floor(z R / (2 count_stddev)) steps, an answer
    has norm floor(z R / z_answers). R = F * 2^e, where 2^e is the power of two at or above
    sqrt(num_params), and F the largest power of two up to 1024 for which 24 bits hold the largest
    sum and 12 standard deviations of the noise of all clients; there are at least 16 bits.

    Args:
        noise_multiplier: z of the update alone: the noise on the sum over the clip norm. 0: no
          noise at all.
        count_stddev: standard deviation of the noise on the sum of (bit - 1/2); None: no bit.
        answers: length of an answer, and z_answers, the noise on the sum of answers; None: no
          answers.

    Raises:
        ValueError: the number of parameters or the noise is out of range, or no F of 16 or more
          fits.

    >>> found = secure_sum(10_000, SecureCohort(10, 7), noise_multiplier=1.0)
    >>> found.bits, found.clip_steps, found.summands, round(found.own_noise_stddev, 4)
    (23, 131072, 7, 0.378)
    """
    length, answer_noise = answers or (0, None)
    bare = SecureSum(
        num_params, 0, 0, FEWEST_BITS, cohort.nodes, cohort.summands, answer_length=length
    )
    beside = (count_stddev and 2 * count_stddev, answer_noise)
    return _finest(bare, noise_multiplier, beside=beside, most_bits=MOST_BITS)


def example_secure_sum(
    num_params: int, cohort: SecureCohort, *, noise_multiplier: float, largest_sum: int
) -> SecureSum:
    """The secure sum of a step at example level: each client adds up a clipped gradient of each of
    its examples.

    It is as `secure_sum`, but C clips one example's gradient, up to 32 bits hold the sum, and a
    client's sum is clamped to what `largest_sum` examples, a public number, can reach. Zeroing out,
    adding or removing one example moves the sum by at most the root of `sensitivity_squared` in L2.

    >>> example_secure_sum(14, SecureCohort(4, 3), noise_multiplier=8.0, largest_sum=200).bits
    23
    """
    if largest_sum < 1:
        raise ValueError(f"largest_sum must be at least 1, not {largest_sum}")
    bare = SecureSum(
        num_params, 0, 0, FEWEST_BITS, cohort.nodes, cohort.summands, largest_sum=largest_sum
    )
    return _finest(bare, noise_multiplier, beside=(None, None), most_bits=MOST_BITS_OF_EXAMPLES)


# noise multipliers of the bit and of the answer; None if there is no bit or no answer
Beside = tuple[float | None, float | None]


def _finest(
    bare: SecureSum, noise_multiplier: float, *, beside: Beside, most_bits: int
) -> SecureSum:
    check_noise_multiplier(noise_multiplier)
    if not 1 <= bare.num_params <= 2**30:
        raise ValueError(f"num_params must be in [1, 2^30], not {bare.num_params}")
    fineness = FINEST
    while (found := _at(fineness, bare, noise_multiplier, beside=beside)).bits > most_bits:
        fineness //= 2
        if fineness < COARSEST:
            raise ValueError(
                f"secure aggregation of {found.nodes} clients (sampling.population_size) with "
                f"{found.num_params} parameters and a noise_multiplier of {noise_multiplier:g} "
                f"needs {found.bits} bits a value; it has at most {most_bits}: lower one of the "
                "three"
            )
    return found


def _at(fineness: int, bare: SecureSum, noise_multiplier: float, *, beside: Beside) -> SecureSum:
    """The secure sum for a fineness, with as many bits as it needs, at least 16."""
    clip_steps = fineness << -(-(bare.num_params - 1).bit_length() // 2)
    noise = Fraction(noise_multiplier) * clip_steps  # exact: that of h clients together, in steps
    bit_steps, answer_steps = (_entry_for(noise, each, clip_steps) for each in beside)
    found = replace(
        bare,
        clip_steps=clip_steps,
        variance=math.ceil(noise**2 / bare.summands),
        bit_steps=bit_steps,
        answer_steps=answer_steps,
    )
    # Room for the sum of all clients and 12 standard deviations of all their noise, rounded up.
    reached = (
        found.nodes * found.largest_entry
        + math.isqrt(NOISE_ROOM**2 * found.nodes * found.variance)
        + 1
    )
    return replace(found, bits=max(FEWEST_BITS, reached.bit_length() + 1))


def _entry_for(noise: Fraction, noise_multiplier: float | None, clip_steps: int) -> int:
    """The norm, in whole steps, for which `noise` has the noise multiplier; one clip norm if there
    is no noise."""
    if noise_multiplier is None:
        return 0
    if noise == 0:
        return clip_steps
    steps = math.floor(noise / Fraction(noise_multiplier))
    if steps < 1:
        raise ValueError(
            f"noise on bits or answers of {noise_multiplier:g} times their norm leaves nothing of "
            "them"
        )
    return steps


def _steps_of(values: Tensor, norm: float, steps: int) -> Tensor:
    """Values (size,) clipped to `norm`, in whole steps, int64; `norm` is `steps` steps long."""
    return clip_to_grid(values.detach().double() * (steps / norm), float(steps), grid=_WHOLE_STEPS)
