"""The noised mean of clients' answers as a server reads it: named estimates, each with its standard error.

What is read is post-processing of what was released, and costs nothing: values are cut to what is possible, and a
cumulative histogram is made monotone. A standard error is that of the noise and of the cohort's sampling together, by
the delta method: to first order in the noise, around what was released. Sampling counts with a bound on how much
clients differ, since how much they do is not released; so the error is rather too large than too small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from discreet.tasks.answers import (
    CLIENT_BINS,
    LARGEST_ERROR,
    LARGEST_LOGIT,
    SCORE_BINS,
    VALUE_BINS,
    Block,
    DataShape,
    score_names,
    weight_of,
)
from discreet.tasks.examples import TaskShape
from discreet.tasks.normalising import Normaliser
from discreet.tasks.targets import LABELS, NUMBERS

QUANTILES = {"clients_worst_tenth": 0.1, "clients_median": 0.5}
QUARTILES = (0.25, 0.5, 0.75)
LEAST_DEVIATION = 0.01  # of a column, over half of its range: what does not vary at all is not blown up


@dataclass(frozen=True)
class Estimate:
    """A number that was read from noise: NaN with an infinite standard error if the noise leaves nothing to read."""

    value: float
    standard_error: float


UNKNOWN = Estimate(math.nan, math.inf)


@dataclass(frozen=True)
class Noise:
    """The difference between the exact mean over a population and what was released.

    Attributes:
      stddev: of the noise on each number of the mean: z / (probability * population).
      probability: with which a client is asked.
      population: the number of clients.
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

    def number(self, place: int, low: float, high: float, *, zero: float, unit: float = 1.0) -> Estimate:
        """One number of the mean, as zero + unit * number, cut to low..high."""
        return self.estimate(lambda mean: zero + unit * mean[place], low, high)

    def error(self, gradient: Tensor, more: float = 0.0) -> float:
        """The root of the mean squared error of gradient * mean, and of an independent error `more`. Sampling counts
        with a bound on the mean square, over clients, of gradient * answer. Shares are weights of at most 1 (Jensen).
        """
        squares = gradient.square()
        spread = self.block.bound**2 * float(squares.sum())
        if self.block.shares:
            spread = float((self.mean.clamp(min=0) * squares).sum()) * self.block.most
        return math.sqrt(self.noise.stddev**2 * float(squares.sum()) + self.noise.sampling * spread + more**2)


def _cut(value: float, error: float, low: float, high: float) -> Estimate:
    known = math.isfinite(value) and math.isfinite(error)
    return Estimate(min(max(value, low), high), error) if known else UNKNOWN


def noised_blocks(blocks: Sequence[Block], mean: Tensor, noise: Noise) -> list[NoisedBlock]:
    """The parts of a noised mean (length,) of joined answers, each in its own units.

    Raises:
      ValueError: the mean has another length.
    """
    length = sum(block.length for block in blocks)
    if mean.shape != (length,):
        raise ValueError(f"the mean must have the shape ({length},), not {tuple(mean.shape)}")
    parts, weight = torch.split(mean.detach().double(), [block.length for block in blocks]), weight_of(blocks)
    return [
        NoisedBlock(block, part * (block.bound / weight), replace(noise, stddev=noise.stddev * block.bound / weight))
        for block, part in zip(blocks, parts, strict=True)
    ]


def read_metrics(blocks: Sequence[Block], mean: Tensor, noise: Noise, *, shape: TaskShape) -> dict[str, Estimate]:
    """The numbers that the noised mean of clients' answers gives of a model, by name.

    accuracy, loss (cut at twice that of chance), auc, mae, rmse (errors cut at half of the public range) and r2 are
    those of the mean over clients, each with the same weight. overconfidence is the mean of confidence less accuracy,
    and calibration_error the expected calibration error by 10 bins of confidence. clients_worst_tenth and
    clients_median are quantiles over clients of a client's own accuracy, in bins of 5 points; of numbers they are of
    its mean absolute error in half ranges, and the worst tenth is the one with the largest. Raises as `noised_blocks`.
    """
    found: dict[str, Estimate] = {}
    for part in noised_blocks(blocks, mean, noise):
        found |= _METRICS[part.block.name](part, shape)
    return found


def _centred(part: NoisedBlock) -> Estimate:
    """A single number that was sent less half of the largest."""
    return part.number(0, 0.0, 2 * part.block.bound, zero=part.block.bound)


def root_of(square: Estimate) -> Estimate:
    """The root of an estimate of at least 0. Its error is not by the slope of the root, which has none at 0, but by how
    far the root moves with the square's own error."""
    error = square.standard_error
    root, low, high = (math.sqrt(max(square.value + step, 0.0)) for step in (0.0, -error, error))
    return Estimate(root, max(high - root, root - low))


def _r2(part: NoisedBlock) -> Estimate:
    def spread_of(mean: Tensor) -> Tensor:
        spread: Tensor = mean.reshape(3, -1)[1] + 0.5 - mean.reshape(3, -1)[2] ** 2
        return spread

    def read(mean: Tensor) -> Tensor:
        unexplained = (mean.reshape(3, -1)[0] + LARGEST_ERROR**2 / 2) / spread_of(mean)
        return torch.mean(1 - unexplained)

    return part.estimate(read, -math.inf, 1.0) if bool((spread_of(part.mean) > 0).all()) else UNKNOWN


def _auc(part: NoisedBlock) -> Estimate:
    """The mean over the scores, one a class or label, of the chance that a positive is in a higher bin than a negative,
    ties by half."""

    def read(mean: Tensor) -> Tensor:
        negatives, positives = mean.reshape(-1, 2, SCORE_BINS).unbind(dim=1)
        below = negatives.cumsum(dim=1) - negatives / 2
        areas = (positives * below).sum(dim=1) / (positives.sum(dim=1) * negatives.sum(dim=1))
        return torch.mean(areas)

    return part.estimate(read, 0.0, 1.0) if bool(_both_kinds(part).all()) else UNKNOWN


def _both_kinds(part: NoisedBlock) -> Tensor:
    """True for each score with enough negatives and positives, (scores,): with as little of a kind as noise makes of
    nothing, a share of it is no number to rely on."""
    totals = part.mean.reshape(-1, 2, SCORE_BINS).sum(dim=2)
    return (totals >= 3 * part.noise.stddev * math.sqrt(SCORE_BINS)).all(dim=1)


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
    edges = torch.linspace(0, 1, CLIENT_BINS + 1, dtype=torch.float64)
    if float(part.mean.sum()) < 3 * part.noise.stddev * math.sqrt(CLIENT_BINS):
        return dict.fromkeys(["clients_mean", *QUANTILES], UNKNOWN)
    middles = (torch.arange(CLIENT_BINS, dtype=torch.float64) + 0.5) / CLIENT_BINS
    mean = part.estimate(lambda mean: (mean * middles).sum() / mean.sum(), 0.0, 1.0)
    within = edges[1] / math.sqrt(12)  # a value is known to its bin
    found = {"clients_mean": replace(mean, standard_error=math.hypot(mean.standard_error, within))}
    for name, share in QUANTILES.items():
        found[name] = quantile(part, 1 - share if shape.target.kind == NUMBERS else share, edges)
    return found


def quantile(part: NoisedBlock, share: float, edges: Tensor) -> Estimate:
    """A quantile of a histogram's shares with edges (length + 1,), and by how much it moves if the cumulative
    histogram, made monotone, moves by its standard error; at least half a bin, for inside a bin nothing is known."""
    total = float(part.mean.sum())
    if not total > 0:
        return UNKNOWN
    curve = _rising(part.mean / total)
    value = _crossing(curve, edges, share)
    place = int(torch.searchsorted(edges, value, right=True).clamp(1, len(edges) - 1))
    below = (torch.arange(part.block.length) < place).double()
    error = part.error((below - share) / total)
    low, high = _crossing(curve, edges, share - error), _crossing(curve, edges, share + error)
    return Estimate(value, max(value - low, high - value, float(edges[place] - edges[place - 1]) / 2))


def _rising(shares: Tensor) -> Tensor:
    """The cumulative histogram (length + 1,) of noised shares that sum to 1, from 0 to 1: the nearest one, in squares,
    that rises."""
    from sklearn.isotonic import isotonic_regression

    heights = isotonic_regression(shares.cumsum(0).numpy(), y_min=0.0, y_max=1.0)
    return torch.cat([torch.zeros(1, dtype=torch.float64), torch.from_numpy(heights)])


def _crossing(curve: Tensor, edges: Tensor, share: float) -> float:
    """The place at which a rising curve over edges reaches a share: the middle if it stays there for a while."""
    share = min(max(share, 0.0), 1.0)
    places = []
    for right in (False, True):
        after = int(torch.searchsorted(curve, share, right=right).clamp(1, len(curve) - 1))
        rise = float(curve[after] - curve[after - 1])
        part = (share - float(curve[after - 1])) / rise if rise > 0 else 0.5
        part = min(max(part, 0.0), 1.0)
        places.append(float(edges[after - 1]) + part * float(edges[after] - edges[after - 1]))
    return sum(places) / 2


_METRICS: Mapping[str, Callable[[NoisedBlock, TaskShape], dict[str, Estimate]]] = {
    **{name: lambda part, _: {part.block.name: _centred(part)} for name in ("accuracy", "loss", "mae")},
    "rmse": lambda part, _: {"rmse": root_of(_centred(part))},
    "r2": lambda part, _: {"r2": _r2(part)},
    "auc": lambda part, _: {"auc": _auc(part)},
    "calibration": lambda part, _: {
        "overconfidence": part.estimate(Tensor.sum, -1.0, 1.0),
        "calibration_error": _sum_of_sizes(part),
    },
    "clients": _clients,
}


@dataclass(frozen=True)
class RocPoint:
    """The effect of a threshold: examples with a score of at least `score`, in logits, are called positive.

    Attributes:
      of: what the score is of: a class, or a label.
      false_positive_rate, true_positive_rate: of the negatives and of the positives, in [0, 1]. Those of the lowest
        score are 1: all that lies below it counts too.
      false_positive_rate_error, true_positive_rate_error: their standard errors, as those of all clients.
    """

    of: str
    score: float
    false_positive_rate: float
    true_positive_rate: float
    false_positive_rate_error: float
    true_positive_rate_error: float


def roc_points(blocks: Sequence[Block], mean: Tensor, noise: Noise, *, shape: TaskShape) -> list[RocPoint]:
    """The points of the ROC curves, from the highest threshold down, of each score in turn; none without `auc` among
    the blocks, and none of a score of whose negatives or positives noise leaves nothing. They are read from the
    histograms that AUC is read from, and cost nothing more. Rates never fall as the threshold does.
    """
    parts = [part for part in noised_blocks(blocks, mean, noise) if part.block.name == "auc"]
    names = score_names(shape)
    return [point for part in parts for place, name in enumerate(names) for point in _curve(part, place, name)]


def _curve(part: NoisedBlock, place: int, name: str) -> Iterator[RocPoint]:
    if not bool(_both_kinds(part)[place]):
        return
    edges = torch.linspace(-LARGEST_LOGIT, LARGEST_LOGIT, SCORE_BINS + 1, dtype=torch.float64)
    negatives, positives = (_rates(part, 2 * place + kind) for kind in range(2))
    for edge in range(SCORE_BINS, -1, -1):
        (false, its_error), (true, error) = negatives[edge], positives[edge]
        yield RocPoint(name, float(edges[edge]), false, true, its_error, error)


def _rates(part: NoisedBlock, kind: int) -> list[tuple[float, float]]:
    """For each edge the share of one histogram that is not below it, and its standard error."""
    mean = part.mean.reshape(-1, SCORE_BINS)[kind]
    total, found = float(mean.sum()), []
    curve = _rising(mean / total).tolist()
    for edge, below in enumerate([*curve[:-1], 1.0]):  # the last sum is 1, but for rounding
        gradient = torch.zeros(part.block.length, dtype=torch.float64)
        chosen = (torch.arange(SCORE_BINS) < edge).double()
        gradient[kind * SCORE_BINS : (kind + 1) * SCORE_BINS] = (chosen - below) / total
        found.append((1 - below, part.error(gradient) if 0 < edge < SCORE_BINS else 0.0))
    return found


Row = dict[str, Estimate]


def read_statistics(
    blocks: Sequence[Block], mean: Tensor, noise: Noise, *, shape: DataShape, shares: Sequence[float] = QUARTILES
) -> dict[str, Row]:
    """The statistics that the noised mean of clients' answers gives of their data: for each what it is of, and the
    estimate.

    mean, variance and deviation of each column, in the units of the inputs; `quantile 0.5` and the other `shares`, to
    the nearest of 40 bins; share of each class or label, or mean of each number in its own units; examples of a
    client. All are those of the mean over clients, each with the same weight. Raises as `noised_blocks`.
    """
    found: dict[str, Row] = {}
    for part in noised_blocks(blocks, mean, noise):
        if part.block.name == "quantiles":
            found |= {f"quantile {share:g}": _quantiles(part, shape, share) for share in shares}
        else:
            found |= _STATISTICS[part.block.name](part, shape)
    return found


def read_normaliser(blocks: Sequence[Block], mean: Tensor, noise: Noise, *, shape: DataShape) -> Normaliser:
    """Means and deviations that inputs can be divided by: a variance that is smaller than its standard error, or than
    that of a hundredth of half the range, counts as that large."""
    found, least = (
        read_statistics(blocks, mean, noise, shape=shape),
        (LEAST_DEVIATION * (shape.high - shape.low) / 2) ** 2,
    )
    variances = [max(one.value, one.standard_error, least) for one in found["variance"].values()]
    return Normaliser(
        tuple(one.value for one in found["mean"].values()), tuple(math.sqrt(variance) for variance in variances)
    )


def _columns(shape: DataShape) -> list[str]:
    return [f"column {number}" for number in range(1, shape.columns + 1)]


def _moments(part: NoisedBlock, shape: DataShape) -> dict[str, Row]:
    middle, half, names = (shape.low + shape.high) / 2, (shape.high - shape.low) / 2, _columns(shape)
    means = [part.number(place, shape.low, shape.high, zero=middle, unit=half) for place in range(len(names))]
    variances = [_variance(part, place, len(names), half) for place in range(len(names))]
    rows = {"mean": means, "variance": variances, "deviation": [root_of(one) for one in variances]}
    return {what: dict(zip(names, row, strict=True)) for what, row in rows.items()}


def _variance(part: NoisedBlock, place: int, count: int, half: float) -> Estimate:
    def read(mean: Tensor) -> Tensor:
        spread: Tensor = (mean[count + place] + 1) / 2 - mean[place].square()
        return spread * half**2

    return part.estimate(read, 0.0, half**2)


def _quantiles(part: NoisedBlock, shape: DataShape, share: float) -> Row:
    """Each column's shares are a histogram of their own, which sums to at most 1."""
    edges = torch.linspace(shape.low, shape.high, VALUE_BINS + 1, dtype=torch.float64)
    block = replace(part.block, length=VALUE_BINS, bound=1.0)
    histograms = zip(_columns(shape), part.mean.reshape(-1, VALUE_BINS), strict=True)
    return {name: quantile(NoisedBlock(block, mean, part.noise), share, edges) for name, mean in histograms}


def _targets(part: NoisedBlock, shape: DataShape) -> dict[str, Row]:
    """Numbers are answered as -1..1, labels less a half, and shares of classes as they are."""
    target = shape.task.target
    if target.kind == NUMBERS:
        numbers = enumerate(zip(target.names, target.low, target.high, strict=True))
        return {
            "target mean": {
                name: part.number(place, low, high, zero=(high + low) / 2, unit=(high - low) / 2)
                for place, (name, low, high) in numbers
            }
        }
    names = target.names or tuple(f"class {number}" for number in range(part.block.length))
    zero = 0.5 if target.kind == LABELS else 0.0
    return {"share": {name: part.number(place, 0.0, 1.0, zero=zero) for place, name in enumerate(names)}}


_STATISTICS: Mapping[str, Callable[[NoisedBlock, DataShape], dict[str, Row]]] = {
    "moments": _moments,
    "targets": _targets,
    "examples": lambda part, _: {"examples": {"a client": _centred(part)}},
}
