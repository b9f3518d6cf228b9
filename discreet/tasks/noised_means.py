"""How a server reads the noised mean of clients' answers: named estimates, each with its standard error.

What is read is post-processing of what was released, and costs nothing: values are cut to what is possible, and a
cumulative histogram is made monotone. A standard error is that of the noise and of the cohort's sampling together, by
the delta method: to first order in the noise, around what was released. Sampling counts with a bound on how much
clients differ, since how much they do is not released; so the error is rather too large than too small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from discreet.tasks.bounded_answers import Block, weight_of
from discreet.tasks.examples import TaskShape
from discreet.tasks.metric_answers import CLIENT_BINS, LARGEST_ERROR, SCORE_BINS, largest_loss
from discreet.tasks.targets import NUMBERS

QUANTILES = {"clients_worst_tenth": 0.1, "clients_median": 0.5}


@dataclass(frozen=True)
class Estimate:
    """A number that was read from noise: NaN with an infinite standard error if the noise leaves nothing to read."""

    value: float
    standard_error: float


@dataclass(frozen=True)
class Noise:
    """What is between the exact mean over a population and what was released.

    Attributes:
      stddev: of the noise on each number of the mean: z / (probability * population).
      probability: with which a client is asked.
      population: how many clients there are.
    """

    stddev: float
    probability: float = 1.0
    population: int = 1

    @property
    def sampling(self) -> float:
        """The variance of the mean over a Poisson cohort of numbers whose mean square over the population is 1."""
        return (1 - self.probability) / (self.probability * self.population)


@dataclass(frozen=True, eq=False)
class NoisedBlock:
    """The noised mean of one block over clients, in the block's own units: a client that did not answer is zeros."""

    block: Block
    mean: Tensor
    noise: Noise

    def estimate(self, function: Callable[[Tensor], Tensor], low: float, high: float) -> Estimate:
        """A smooth function of the mean, cut to low..high, by the delta method."""
        mean = self.mean.clone().requires_grad_()
        value = function(mean)
        (gradient,) = torch.autograd.grad(value, mean)
        return _cut(float(value.detach()), self.error(gradient), low, high)

    def columns(self, count: int) -> list[NoisedBlock]:
        """The block in `count` equal parts, each of whose numbers are shares that sum to at most 1."""
        each = self.block.length // count
        block = replace(self.block, length=each, bound=1.0, total=None)
        return [NoisedBlock(block, part, self.noise) for part in self.mean.reshape(count, each)]

    def error(self, gradient: Tensor, more: float = 0.0) -> float:
        """The root of the mean squared error of gradient * mean, and of an independent error `more`."""
        spread = self.noise.sampling * self._mean_square(gradient)
        return math.sqrt(self.noise.stddev**2 * float(gradient.square().sum()) + spread + more**2)

    def _mean_square(self, gradient: Tensor) -> float:
        """A bound on the mean square, over clients, of gradient * answer. Shares are weights of at most 1 (Jensen)."""
        if self.block.shares:
            return float((self.mean.clamp(min=0) * gradient.square()).sum()) * self.block.most
        return self.block.bound**2 * float(gradient.square().sum())


def _cut(value: float, error: float, low: float, high: float) -> Estimate:
    if not (math.isfinite(value) and math.isfinite(error)):
        return Estimate(math.nan, math.inf)
    return Estimate(min(max(value, low), high), error)


def length_of(blocks: Sequence[Block]) -> int:
    """Of a joined answer."""
    return sum(block.length for block in blocks)


def noised_blocks(blocks: Sequence[Block], mean: Tensor, noise: Noise) -> list[NoisedBlock]:
    """The parts of a noised mean (length,) of joined answers, each in its own units.

    Raises:
      ValueError: the mean has another length.
    """
    if mean.shape != (length_of(blocks),):
        raise ValueError(f"the mean must have the shape ({length_of(blocks)},), not {tuple(mean.shape)}")
    parts, weight = torch.split(mean.detach().double(), [block.length for block in blocks]), weight_of(blocks)
    return [
        NoisedBlock(block, part * (block.bound / weight), replace(noise, stddev=noise.stddev * block.bound / weight))
        for block, part in zip(blocks, parts, strict=True)
    ]


def read_metrics(blocks: Sequence[Block], mean: Tensor, noise: Noise, *, shape: TaskShape) -> dict[str, Estimate]:
    """What the noised mean of clients' answers says of a model, by name.

    accuracy, loss (cut at `largest_loss`), auc, mae, rmse (errors cut at half of the public range) and r2 are those of
    the mean over clients, each with the same weight. overconfidence is the mean of confidence less accuracy, and
    calibration_error the expected calibration error by 10 bins of confidence. clients_worst_tenth and clients_median
    are quantiles over clients of a client's own accuracy, in bins of 5 points; of numbers they are of its mean absolute
    error in half ranges, and the worst tenth is the one with the largest.

    Raises:
      ValueError: the mean has another length.
    """
    found: dict[str, Estimate] = {}
    for part in noised_blocks(blocks, mean, noise):
        found |= _READ[part.block.name](part, shape)
    return found


def expected_errors(blocks: Sequence[Block], noise: Noise) -> dict[str, float]:
    """The standard errors of the noise alone that are known before anything is asked: of accuracy, loss and mae."""
    zero = torch.zeros(length_of(blocks), dtype=torch.float64)
    parts = noised_blocks(blocks, zero, replace(noise, probability=1.0))
    return {
        part.block.name: part.noise.stddev for part in parts if part.block.length == 1 and part.block.name != "rmse"
    }


def _centre(part: NoisedBlock, high: float) -> Estimate:
    return part.estimate(lambda mean: mean[0] + high / 2, 0.0, high)


def _accuracy(part: NoisedBlock, shape: TaskShape) -> dict[str, Estimate]:
    return {"accuracy": _centre(part, 1.0)}


def _loss(part: NoisedBlock, shape: TaskShape) -> dict[str, Estimate]:
    return {"loss": _centre(part, largest_loss(shape))}


def _mae(part: NoisedBlock, shape: TaskShape) -> dict[str, Estimate]:
    return {"mae": _centre(part, 2 * part.block.bound)}


def _rmse(part: NoisedBlock, shape: TaskShape) -> dict[str, Estimate]:
    largest = 2 * part.block.bound
    return {"rmse": root_of(_centre(part, largest))}


def root_of(square: Estimate) -> Estimate:
    """The root of an estimate of at least 0. Its error is not by the slope of the root, which has none at 0, but by how
    far the root moves with the square's own error."""
    error = square.standard_error
    root, low, high = (math.sqrt(max(square.value + step, 0.0)) for step in (0.0, -error, error))
    return Estimate(root, max(high - root, root - low))


def _r2(part: NoisedBlock, shape: TaskShape) -> dict[str, Estimate]:
    def read(mean: Tensor) -> Tensor:
        error, square, truth = mean.reshape(3, -1)
        shares: Tensor = (1 - (error + LARGEST_ERROR**2 / 2) / (square + 0.5 - truth**2)).mean()
        return shares

    _, square, truth = part.mean.reshape(3, -1)
    if not bool((square + 0.5 - truth**2 > 0).all()):
        return {"r2": Estimate(math.nan, math.inf)}
    return {"r2": part.estimate(read, -math.inf, 1.0)}


def _auc(part: NoisedBlock, shape: TaskShape) -> dict[str, Estimate]:
    """The mean over the scores, one a class or label, of the chance that a positive is in a higher bin than a negative,
    ties by half."""

    def read(mean: Tensor) -> Tensor:
        negatives, positives = mean.reshape(-1, 2, SCORE_BINS).unbind(dim=1)
        below = negatives.cumsum(dim=1) - negatives / 2
        areas: Tensor = (positives * below).sum(dim=1) / (positives.sum(dim=1) * negatives.sum(dim=1))
        mean_area: Tensor = areas.mean()
        return mean_area

    if not bool(both_kinds(part).all()):
        return {"auc": Estimate(math.nan, math.inf)}
    return {"auc": part.estimate(read, 0.0, 1.0)}


def both_kinds(part: NoisedBlock) -> Tensor:
    """Of each score whether there are enough negatives and positives, (scores,): with as little of a kind as noise
    makes of nothing, a share of it is no number to rely on."""
    totals = part.mean.reshape(-1, 2, SCORE_BINS).sum(dim=2)
    return (totals >= 3 * part.noise.stddev * math.sqrt(SCORE_BINS)).all(dim=1)


def _calibration(part: NoisedBlock, shape: TaskShape) -> dict[str, Estimate]:
    return {
        "overconfidence": part.estimate(lambda mean: mean.sum(), -1.0, 1.0),
        "calibration_error": _sum_of_sizes(part),
    }


def _sum_of_sizes(part: NoisedBlock) -> Estimate:
    """The sum of absolute values. Noise makes them larger: of each is taken what noise would add to it, if it were as
    large as was released; what is left of that bias is at most 0.47 standard deviations each, and is in the error."""
    ones = torch.ones_like(part.mean)
    stddev = part.error(ones) / math.sqrt(len(ones))
    if stddev == 0:
        return Estimate(min(float(part.mean.abs().sum()), 1.0), 0.0)
    sizes = part.mean.abs() / stddev
    density = torch.exp(-sizes.square() / 2) * math.sqrt(2 / math.pi)
    added = density - 2 * sizes * torch.special.ndtr(-sizes)
    value = float((sizes - added).sum()) * stddev
    return _cut(value, part.error(ones, more=0.47 * stddev * len(ones)), 0.0, 1.0)


def _clients(part: NoisedBlock, shape: TaskShape) -> dict[str, Estimate]:
    middles = (torch.arange(CLIENT_BINS, dtype=torch.float64) + 0.5) / CLIENT_BINS
    edges = torch.linspace(0, 1, CLIENT_BINS + 1, dtype=torch.float64)
    total = float(part.mean.sum())
    if total < 3 * part.noise.stddev * math.sqrt(CLIENT_BINS):
        return dict.fromkeys(["clients_mean", *QUANTILES], Estimate(math.nan, math.inf))
    worst_is_largest = shape.target.kind == NUMBERS
    mean = part.estimate(lambda mean: (mean * middles).sum() / mean.sum(), 0.0, 1.0)
    within = edges[1] / math.sqrt(12)  # a value is known to its bin
    found = {"clients_mean": replace(mean, standard_error=math.hypot(mean.standard_error, within))}
    for name, share in QUANTILES.items():
        found[name] = quantile(part, 1 - share if worst_is_largest else share, edges)
    return found


def quantile(part: NoisedBlock, share: float, edges: Tensor) -> Estimate:
    """A quantile of a histogram's shares with edges (length + 1,), and by how much it moves if the cumulative
    histogram moves by its standard error; at least half a bin, for inside a bin nothing is known.

    The cumulative histogram is made monotone as `rising` says.
    """
    total = float(part.mean.sum())
    if not total > 0:
        return Estimate(math.nan, math.inf)
    curve = rising(part.mean / total)
    value = _crossing(curve, edges, share)
    place = int(torch.searchsorted(edges, value, right=True).clamp(1, len(edges) - 1))
    below = (torch.arange(part.block.length) < place).double()
    error = part.error((below - share) / total)
    low, high = _crossing(curve, edges, share - error), _crossing(curve, edges, share + error)
    least = float(edges[place] - edges[place - 1]) / 2
    return Estimate(value, max(value - low, high - value, least))


def rising(shares: Tensor) -> Tensor:
    """The cumulative histogram (length + 1,) of noised shares that sum to 1, from 0 to 1: the nearest one, in squares,
    that rises."""
    from sklearn.isotonic import isotonic_regression

    heights = isotonic_regression(shares.cumsum(0).numpy(), y_min=0.0, y_max=1.0)
    return torch.cat([torch.zeros(1, dtype=torch.float64), torch.from_numpy(heights)])


def _crossing(curve: Tensor, edges: Tensor, share: float) -> float:
    """Where a rising curve over edges reaches a share: the middle if it stays there for a while."""
    share = min(max(share, 0.0), 1.0)
    places = []
    for right in (False, True):
        after = int(torch.searchsorted(curve, share, right=right).clamp(1, len(curve) - 1))
        rise = float(curve[after] - curve[after - 1])
        part = (share - float(curve[after - 1])) / rise if rise > 0 else 0.5
        part = min(max(part, 0.0), 1.0)
        places.append(float(edges[after - 1]) + part * float(edges[after] - edges[after - 1]))
    return sum(places) / 2


_READ: Mapping[str, Callable[[NoisedBlock, TaskShape], dict[str, Estimate]]] = {
    "accuracy": _accuracy,
    "loss": _loss,
    "auc": _auc,
    "calibration": _calibration,
    "clients": _clients,
    "mae": _mae,
    "rmse": _rmse,
    "r2": _r2,
}
