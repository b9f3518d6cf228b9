"""A client's answer to a question about a model or about its data: blocks of numbers, joined in one vector of L2 norm
at most 1.

Each block has a public length and a bound that the L2 norm of no client's block passes. A joined vector holds each
block divided by its bound and times a weight, the same for all, whose squares sum to 1: so one Gaussian of sensitivity
1 pays for all. Blocks are centred if that halves their bound: a share in 0..1 is sent as -1/2..1/2.

A client's own mean counts, not its number of examples: each client weighs the same. So does each example in a client's
mean: of a sequence, its own share of right positions and its own mean loss count, and one of padding alone has 0 of
both, so that no number of positions moves what another example adds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from discreet.privacy.rules.objective import PADDING, cross_entropy
from discreet.settings.data import STATISTICS
from discreet.tasks.examples import TaskShape
from discreet.tasks.targets import CLASSES, LABELS, NUMBERS, SEQUENCES

METRICS = {
    CLASSES: ("accuracy", "loss", "auc", "calibration", "clients"),
    LABELS: ("accuracy", "loss", "auc", "clients"),
    NUMBERS: ("mae", "rmse", "r2", "clients"),
    SEQUENCES: ("accuracy", "loss", "clients"),
}
SCORE_BINS, LARGEST_LOGIT = 32, 8.0  # of scores, in logits: half a logit each
CONFIDENCE_BINS, CLIENT_BINS = 10, 20
VALUE_BINS = 40  # of a column's public range, for its quantiles
LARGEST_ERROR = 1.0  # of a number, where numbers are learned as -1..1: half of its public range

# From the values (n, ...) and the targets of at least one example to a block, (length,) float64. The values are a
# model's outputs for a metric, and inputs for a statistic.
Answer = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Block:
    """A part of an answer; `name` says what is read from it. `shares`: its numbers are shares of a whole, none of them
    negative. `total`: the most that their sizes sum to, if that is less than `most` would say."""

    name: str
    length: int
    bound: float
    answer: Answer
    shares: bool = False
    total: float | None = None

    @property
    def most(self) -> float:
        """The bound on the L1 norm of every client's block: of shares the square of `bound`, of others what their
        number and their L2 norm allow, if `total` is not given."""
        if self.total is not None:
            return self.total
        return self.bound**2 if self.shares else self.bound * math.sqrt(self.length)


@dataclass(frozen=True)
class DataShape:
    """The public facts of the data that statistics are about.

    The columns of inputs (n, k) are their k numbers; of images (n, channels, height, width) they are the channels, in
    which each pixel counts as a value.

    Attributes:
      task: what an example is.
      low, high: the range of all inputs; a value outside counts as the nearer end.
      most_examples: a client with more examples counts as one with so many.

    Raises:
      ValueError: there are no columns of numbers, the range is empty, or most_examples is below 1.
    """

    task: TaskShape
    low: float
    high: float
    most_examples: int = 1000

    def __post_init__(self) -> None:
        if self.task.num_tokens or len(self.task.input_shape) not in (1, 3):
            raise ValueError(f"statistics are of columns or of images, not of inputs {self.task.input_shape} of text")
        if not -math.inf < self.low < self.high < math.inf:
            raise ValueError(f"high must be above low, and both finite (got {self.high} and {self.low})")
        if self.most_examples < 1:
            raise ValueError(f"most_examples must be at least 1 (got {self.most_examples})")

    @property
    def columns(self) -> int:
        """The number of columns of the inputs."""
        return self.task.input_shape[0]

    def centred(self, inputs: Tensor) -> Tensor:
        """Inputs (n, ...) as rows (m, columns) float64 in -1..1, which is low..high; NaN is the middle."""
        rows = inputs.double() if inputs.ndim == 2 else inputs.double().movedim(1, -1).reshape(-1, self.columns)
        share = (rows - self.low) / (self.high - self.low)
        return (share.clamp(0, 1) * 2 - 1).nan_to_num(0.0)


def metric_blocks(names: Sequence[str], shape: TaskShape) -> tuple[Block, ...]:
    """The blocks that metrics are read from, in their order.

    Raises:
      ValueError: a name is unknown for what is predicted, or is given twice; it names the choices.
    """
    kind = shape.target.kind
    _check_names(names, METRICS[kind], when=f" if {kind} are predicted")
    return tuple(_METRICS[name](shape) for name in names)


def statistic_blocks(names: Sequence[str], shape: DataShape) -> tuple[Block, ...]:
    """The blocks that statistics are read from, in their order. Raises as `metric_blocks`."""
    _check_names(names, STATISTICS)
    return tuple(_STATISTICS[name](shape) for name in names)


def _check_names(names: Sequence[str], known: Sequence[str], *, when: str = "") -> None:
    unknown = [name for name in names if name not in known]
    if unknown or not names or len({*names}) < len(names):
        why = f" ({unknown[0]} is none of them)" if unknown else ""
        raise ValueError(f"must be a list of different names of {', '.join(known)}{when}{why}")


def weight_of(blocks: Sequence[Block]) -> float:
    """The factor of each block, beside its bound's inverse."""
    return 1 / math.sqrt(len(blocks))


def l1_norm_of(blocks: Sequence[Block]) -> float:
    """The bound on the L1 norm of every joined answer.

    >>> l1_norm_of([Block("accuracy", 1, 0.5, lambda *_: torch.zeros(1))])
    1.0
    """
    return weight_of(blocks) * sum(block.most / block.bound for block in blocks)


def joined_answer(blocks: Sequence[Block], values: Tensor, targets: Tensor) -> Tensor:
    """A client's answer, (length,) float64, of L2 norm at most 1: zeros without examples, as one that is missing.
    The bound does not rest on the blocks: one that is not finite is zeros, and one beyond its bound is shortened."""
    if len(targets) == 0:
        return torch.zeros(sum(block.length for block in blocks), dtype=torch.float64)
    values, targets, weight = values.detach().cpu().double(), targets.detach().cpu(), weight_of(blocks)
    return torch.cat([_within(block.answer(values, targets), block.bound) * (weight / block.bound) for block in blocks])


def _within(block: Tensor, bound: float) -> Tensor:
    if not block.isfinite().all():
        return torch.zeros_like(block)
    norm = float(block.norm())
    return block * (bound / norm) if norm > bound else block


def bins_of(values: Tensor, low: float, high: float, count: int) -> Tensor:
    """The number of the bin, of `count` equally wide ones of low..high, that holds each value. Values outside, and
    NaN, go to the nearest bin, NaN to the first.

    >>> bins_of(torch.tensor([-9.0, 0.0, 0.3, 1.0, torch.nan]), 0, 1, 4).tolist()
    [0, 0, 1, 3, 0]
    """
    places = ((values.double() - low) / (high - low) * count).nan_to_num(0.0, posinf=count, neginf=0.0)
    return places.clamp(0, count - 1).floor().long()


def _shares_of(places: Tensor, count: int) -> Tensor:
    """For each column of places (n, k) the share of rows at each of `count` places: (k * count,), norm <= sqrt(k)."""
    counts = torch.stack([torch.bincount(column, minlength=count) for column in places.T])
    return (counts.double() / len(places)).reshape(-1)


def score_names(shape: TaskShape) -> tuple[str, ...]:
    """The scores that AUC is about, by name: class 1 of two, each class against the rest, or each label."""
    if shape.target.kind != CLASSES:
        return tuple(shape.target.names)
    return ("class 1",) if shape.num_classes == 2 else tuple(f"class {place}" for place in range(shape.num_classes))


def right_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """True for each example (n,), or each of its labels or positions (n, k), that is right: padding never is. NaN is
    wrong, though argmax takes it for the largest value."""
    if targets.dtype == torch.int64:
        return (outputs.argmax(dim=1) == targets) & ~outputs.isnan().any(dim=1)
    return ((outputs >= 0) == (targets == 1)) & ~outputs.isnan()


def _scalar(name: str, largest: float, value: Answer) -> Block:
    """The mean of values in 0..largest, less the middle; NaN counts as the largest."""

    def answer(values: Tensor, targets: Tensor) -> Tensor:
        return value(values, targets).double().nan_to_num(largest).clamp(0, largest).mean().reshape(1) - largest / 2

    return Block(name, 1, largest / 2, answer)


def _rights(outputs: Tensor, targets: Tensor) -> Tensor:
    """`right_of`, but of a sequence (n,) the share of its positions that are right."""
    right = right_of(outputs, targets)
    if targets.dtype != torch.int64 or targets.ndim == 1:
        return right
    return right.sum(dim=1) / (targets != PADDING).sum(dim=1).clamp(min=1)


def _loss(shape: TaskShape) -> Block:
    """The loss, cut at twice that of a model that gives every class, or label, one chance."""

    def losses(outputs: Tensor, targets: Tensor) -> Tensor:
        if targets.dtype == torch.int64:
            return cross_entropy(outputs, targets)
        return functional.binary_cross_entropy_with_logits(outputs, targets.double(), reduction="none")

    return _scalar("loss", 2 * math.log(shape.num_classes or 2), losses)


def _errors(outputs: Tensor, targets: Tensor) -> Tensor:
    """Absolute errors (n, k) where numbers are learned as -1..1, cut; an output beyond the range counts as its end."""
    return (outputs.clamp(-1, 1) - targets.double()).abs().nan_to_num(LARGEST_ERROR).clamp(0, LARGEST_ERROR)


def _powers(name: str, power: int, shape: TaskShape) -> Block:
    """The mean of the errors, or of their squares, in the numbers' own units."""
    high, low = (torch.tensor(bounds, dtype=torch.float64) for bounds in (shape.target.high, shape.target.low))
    units = (high - low) / 2
    largest = float((LARGEST_ERROR * units).pow(power).mean())
    return _scalar(name, largest, lambda said, truth: (_errors(said, truth) * units).pow(power).mean(dim=1))


def _r2(shape: TaskShape) -> Block:
    """For each number the mean squared error and the mean square of the truth, both less 1/2, and the truth's mean."""

    def answer(outputs: Tensor, targets: Tensor) -> Tensor:
        truth = targets.double().clamp(-1, 1)
        parts = [_errors(outputs, targets).square() - LARGEST_ERROR**2 / 2, truth.square() - 0.5, truth]
        return torch.cat([part.mean(dim=0) for part in parts])

    count = len(shape.target.names)
    return Block("r2", 3 * count, math.sqrt(count * (LARGEST_ERROR**4 / 4 + 0.25 + 1)), answer)


def _auc(shape: TaskShape) -> Block:
    """For each score a histogram of negatives and one of positives: shares of all.

    Of more than two classes an example is a positive of one class and a negative of all others. Negatives are
    multiplied by (classes - 1)^(-1/2), so that both kinds have the same part of the norm: the few positives get less
    noise than if all had the same weight, and a constant factor changes no share of negatives.
    """
    count, rest = len(score_names(shape)), shape.num_classes - 1
    several = shape.target.kind == CLASSES and count > 1

    def answer(outputs: Tensor, targets: Tensor) -> Tensor:
        if several:
            scores, positive = _against_rest(outputs), functional.one_hot(targets, count)
        else:
            scores, positive = outputs[:, 1:2] - outputs[:, 0:1] if targets.ndim == 1 else outputs, targets
        places = bins_of(scores, -LARGEST_LOGIT, LARGEST_LOGIT, SCORE_BINS)
        found = _shares_of(places + SCORE_BINS * positive.reshape(len(targets), -1).long(), 2 * SCORE_BINS)
        if several:
            found.view(count, 2, SCORE_BINS)[:, 0] *= 1 / math.sqrt(rest)
        return found

    if several:
        return Block("auc", count * 2 * SCORE_BINS, math.sqrt(2), answer, shares=True, total=1 + math.sqrt(rest))
    return Block("auc", count * 2 * SCORE_BINS, math.sqrt(count), answer, shares=True)


def _against_rest(outputs: Tensor) -> Tensor:
    """The logit of each class's probability, (n, k), of logits (n, k)."""
    own = torch.eye(outputs.shape[1], dtype=torch.bool)
    return outputs - outputs.unsqueeze(1).masked_fill(own, -math.inf).logsumexp(dim=2)


def _gaps(outputs: Tensor, targets: Tensor) -> Tensor:
    """For each bin of confidence, the mean over examples of (confidence - right) if it falls there: L1 norm <= 1."""
    confidence = outputs.softmax(dim=1).max(dim=1).values.nan_to_num(1.0)
    gap = (confidence - right_of(outputs, targets).double()) / len(confidence)
    places = bins_of(confidence, 0.0, 1.0, CONFIDENCE_BINS)
    return torch.zeros(CONFIDENCE_BINS, dtype=torch.float64).index_add(0, places, gap)


def _clients(shape: TaskShape) -> Block:
    """A client's own accuracy, or mean absolute error, as one of its bins that is 1."""
    own = _errors if shape.target.kind == NUMBERS else _rights

    def answer(outputs: Tensor, targets: Tensor) -> Tensor:
        value = own(outputs, targets).double().mean().reshape(1, 1)
        return _shares_of(bins_of(value, 0.0, 1.0, CLIENT_BINS), CLIENT_BINS)

    return Block("clients", CLIENT_BINS, 1.0, answer, shares=True)


_METRICS: dict[str, Callable[[TaskShape], Block]] = {
    "accuracy": lambda _: _scalar("accuracy", 1.0, _rights),
    "loss": _loss,
    "auc": _auc,
    "calibration": lambda _: Block("calibration", CONFIDENCE_BINS, 1.0, _gaps, total=1.0),
    "clients": _clients,
    "mae": lambda shape: _powers("mae", 1, shape),
    "rmse": lambda shape: _powers("rmse", 2, shape),
    "r2": _r2,
}


def _moments(shape: DataShape) -> Block:
    """Of each column u in -1..1 the mean of u, then of each the mean of 2 u^2 - 1: all of them in -1..1."""

    def answer(inputs: Tensor, targets: Tensor) -> Tensor:
        rows = shape.centred(inputs)
        return torch.cat([rows.mean(dim=0), (2 * rows.square() - 1).mean(dim=0)])

    return Block("moments", 2 * shape.columns, math.sqrt(2 * shape.columns), answer)


def _quantiles(shape: DataShape) -> Block:
    """Of each column the shares of its values in equally wide bins of the range."""

    def answer(inputs: Tensor, targets: Tensor) -> Tensor:
        return _shares_of(bins_of(shape.centred(inputs), -1.0, 1.0, VALUE_BINS), VALUE_BINS)

    return Block("quantiles", shape.columns * VALUE_BINS, math.sqrt(shape.columns), answer, shares=True)


def _targets(shape: DataShape) -> Block:
    """The share of examples of each class; of sequences, the mean over examples of the shares of their own positions,
    zeros for one of padding alone; or of each label, or number in -1..1, the mean, labels less 1/2."""
    target, count = shape.task.target, shape.task.num_classes

    def shares(_: Tensor, targets: Tensor) -> Tensor:
        rows = targets.reshape(len(targets), -1)
        counts = (functional.one_hot(rows.clamp(min=0), count) * (rows != PADDING).unsqueeze(2)).sum(dim=1).double()
        return (counts / counts.sum(dim=1, keepdim=True).clamp(min=1)).mean(dim=0)

    if not target.names:
        return Block("targets", count, 1.0, shares, shares=True)
    width, (middle, largest) = len(target.names), (0.5, 0.5) if target.kind == LABELS else (0.0, 1.0)

    def answer(_: Tensor, targets: Tensor) -> Tensor:
        return (targets.double() - middle).nan_to_num(0.0).clamp(-largest, largest).mean(dim=0)

    return Block("targets", width, largest * math.sqrt(width), answer)


def _examples(shape: DataShape) -> Block:
    """The number of examples that a client has, of at most so many, less half of that."""
    most = shape.most_examples

    def answer(_: Tensor, targets: Tensor) -> Tensor:
        return torch.tensor([min(len(targets), most) - most / 2], dtype=torch.float64)

    return Block("examples", 1, most / 2, answer)


_STATISTICS: dict[str, Callable[[DataShape], Block]] = {
    "moments": _moments,
    "quantiles": _quantiles,
    "targets": _targets,
    "examples": _examples,
}
