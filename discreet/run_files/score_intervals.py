"""Intervals of a model's scores on the public test set, by the bootstrap.

The test set is public, so they cost no epsilon, and their seed is fixed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor, nn

from discreet.data.examples import Task
from discreet.data.targets import CLASSES, LABELS, NUMBERS, SURVIVAL, Array, Target
from discreet.models.models import outputs_of
from discreet.queries.metrics import is_uneven
from discreet.queries.survival import followed_up, risk_of, survived

FILE = "score_intervals.json"
RESAMPLES = 1000
AT_ONCE = 50
SEED = 59417
TAILS = (2.5, 97.5)  # percent
MOSTLY = 0.9  # of the resamples must have a value, as an AUC has none with a single class
Interval = tuple[float, float, float]  # the score, and the ends of its 95 % interval
# A score with examples weighted: from weights (resamples, n) to (resamples,).
Weighted = Callable[[Array], Array]


def final_intervals(model: nn.Module, task: Task) -> dict[str, Interval]:
    """The scores of the model that leaves a run on its public test set; empty without one."""
    if not len(task.test):
        return {}
    outputs = outputs_of(model, task.test.inputs).double()
    target = task.shape.target
    if target.kind == CLASSES:
        said = outputs.softmax(dim=1)
    elif target.kind == LABELS:
        said = outputs.sigmoid()
    elif target.kind == NUMBERS:
        said = target.in_units(outputs)
    elif target.kind == SURVIVAL:
        said = survived(outputs)
    else:
        return {}
    return intervals_of(said, task.test.targets.cpu(), target, owners=task.test.owners)


def intervals_of(
    said: Tensor, targets: Tensor, target: Target, *, owners: Tensor | None = None
) -> dict[str, Interval]:
    """The scores of predictions `said` (n, k), as `predict` gives them, with 95 % intervals.

    The examples are drawn anew with replacement; with owners, (n,), the owners with all of their
    examples, since the examples of one person are alike. Empty for sequences, for predictions that
    are not finite, and for fewer than two units.
    """
    if owners is None:
        unit = np.arange(len(said))
    else:
        unit = np.unique(owners.cpu().numpy(), return_inverse=True)[1]
    if len(said) < 2 or unit.max() < 1 or not said.isfinite().all():
        return {}
    scores = _scores(said, targets, target)
    with np.errstate(all="ignore"):
        values = {name: float(score(np.ones((1, len(said))))[0]) for name, score in scores.items()}
        drawn = _resampled(scores, unit)
    found = dict[str, Interval]()
    for name, value in values.items():
        kept = drawn[name][np.isfinite(drawn[name])]
        if np.isfinite(value) and len(kept) >= MOSTLY * RESAMPLES:
            low, high = np.percentile(kept, TAILS)
            found[name] = (value, float(low), float(high))
    return found


def _resampled(scores: dict[str, Weighted], unit: Array) -> dict[str, Array]:
    """Each score of every resample; `unit`, (n,), is the unit of each example, from 0."""
    draws = np.random.default_rng(SEED)
    units = int(unit.max()) + 1
    parts: dict[str, list[Array]] = {name: [] for name in scores}
    for _ in range(RESAMPLES // AT_ONCE):
        chosen = draws.integers(units, size=(AT_ONCE, units)) + units * np.arange(AT_ONCE)[:, None]
        counts = np.bincount(chosen.ravel(), minlength=units * AT_ONCE).reshape(AT_ONCE, units)
        weights = counts[:, unit].astype(float)
        for name, score in scores.items():
            parts[name].append(score(weights))
    return {name: np.concatenate(part) for name, part in parts.items()}


def _scores(said: Tensor, targets: Tensor, target: Target) -> dict[str, Weighted]:
    given = said.cpu().double().numpy()
    if target.kind == CLASSES:
        return _of_classes(given, targets.numpy(), uneven=is_uneven(targets))
    if target.kind == LABELS:
        truth = targets.numpy() == 1
        logs = np.log(np.where(truth, given, 1 - given).clip(np.finfo(float).tiny))
        return {
            "accuracy": _mean(((given >= 0.5) == truth).mean(axis=1)),
            "auc": _average([_auc(one, true) for one, true in zip(given.T, truth.T, strict=True)]),
            "loss": _mean(-logs.mean(axis=1)),
        }
    if target.kind == NUMBERS:
        wanted = target.in_units(targets).numpy()
        each = list(zip(given.T, wanted.T, strict=True))
        return {
            "r2": _average([_explained(one, true) for one, true in each]),
            "mae": _mean(np.abs(given - wanted).mean(axis=1)),
        }
    if target.kind == SURVIVAL:
        return {"concordance": _concordance(risk_of(said), *followed_up(targets))}
    return {}


def _of_classes(given: Array, truth: Array, *, uneven: bool) -> dict[str, Weighted]:
    right = given.argmax(axis=1) == truth
    own = given[np.arange(len(truth)), truth].clip(np.finfo(float).tiny)
    found = {"accuracy": _mean(right), "loss": _mean(-np.log(own))}
    classes = np.unique(truth)
    if uneven:
        found["balanced_accuracy"] = _average([_mean(right, truth == each) for each in classes])
    if given.shape[1] == 2:
        found["auc"] = _auc(given[:, 1], truth == 1)
    elif uneven:
        found["auc"] = _average([_auc(given[:, each], truth == each) for each in classes])
    return found


def _mean(values: Array, among: Array | None = None) -> Weighted:
    """The mean of values (n,), over all examples or some."""
    counted = np.ones(len(values)) if among is None else among.astype(float)
    return lambda weights: (weights @ (values * counted)) / (weights @ counted)


def _average(scores: list[Weighted]) -> Weighted:
    """The mean of scores, without those that a resample does not have."""

    def mean(weights: Array) -> Array:
        values = np.stack([score(weights) for score in scores])
        known = np.isfinite(values)
        total: Array = np.where(known, values, 0).sum(axis=0) / known.sum(axis=0)
        return total

    return mean


def _auc(scores: Array, positive: Array) -> Weighted:
    """The probability that a positive has a higher score than a negative; ties count half."""
    pairs = _pairs(scores, positive, ~positive)

    def area(weights: Array) -> Array:
        won, total = pairs(weights)
        share: Array = won / total
        return share

    return area


def _concordance(risk: Array, intervals: Array, has_event: Array) -> Weighted:
    """`discreet.queries.survival.concordance` of the risks."""
    steps = [
        _pairs(risk, has_event & (intervals == each), intervals > each)
        for each in np.unique(intervals[has_event])
    ]

    def share(weights: Array) -> Array:
        won, pairs = np.sum([step(weights) for step in steps], axis=0)
        found: Array = won / pairs
        return found

    return share


def _pairs(scores: Array, high: Array, low: Array) -> Callable[[Array], tuple[Array, Array]]:
    """The weight of the pairs of a `high` and a `low` example in which the first has the higher
    score, ties half, and of all such pairs."""
    order = np.argsort(scores, kind="stable")
    ranked = scores[order]
    first, last = (np.searchsorted(ranked, ranked, side) for side in ("left", "right"))
    is_high = high[order]
    is_low = low[order]

    def counted(weights: Array) -> tuple[Array, Array]:
        mine = weights[:, order]
        highs = mine * is_high
        below = np.pad(np.cumsum(mine * is_low, axis=1), ((0, 0), (1, 0)))
        won = highs * (below[:, first] + below[:, last]) / 2
        return won.sum(axis=1), highs.sum(axis=1) * below[:, -1]

    return counted


def _explained(given: Array, truth: Array) -> Weighted:
    """R2 of a number."""
    centred = truth - truth.mean()
    missed = (given - truth) ** 2

    def r2(weights: Array) -> Array:
        spread = weights @ centred**2 - (weights @ centred) ** 2 / weights.sum(axis=1)
        explained: Array = 1 - (weights @ missed) / spread
        return explained

    return r2


def interval_words(found: Interval) -> str:
    """The ends of an interval, for readers."""
    _, low, high = found
    return f"{low:.4f} to {high:.4f}"
