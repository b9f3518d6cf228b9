"""What a model says of inputs: as a table, and how good it is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from discreet.federated.csv_text import csv_text
from discreet.privacy.rules.objective import PADDING, cross_entropy
from discreet.tasks.metrics import indicators, label_indicators, number_scores
from discreet.tasks.targets import CLASS, CLASSES, LABELS, NUMBERS, SEQUENCES, Target


def predictions_csv(
    said: Tensor,
    targets: Tensor | None = None,
    *,
    classes: Sequence[str] | None = None,
    target: Target = CLASS,
    ids: tuple[str, Sequence[object]] | None = None,
) -> str:
    """A line for each input: its row from 0, its target where known, and what was said: the likeliest class and the
    probability of each; the probability of each label; or each number. Of sequences, position by position from 0: the
    target, empty where it is padding, and the likeliest class, also where it is.

    Args:
      said: as `predictions.predict` gives it.
      targets: as examples have them.
      classes: the names of the classes; their numbers by default.
      target: what is predicted.
      ids: the name of a column that tells the rows apart, and its value in each.
    """
    named = classes or tuple(map(str, range(said.shape[1])))
    if target.kind == CLASSES:
        head, rows = _class_cells(said, targets, named)
    elif target.kind == SEQUENCES:
        head, rows = _position_cells(said, targets, named)
    else:
        head, rows = _column_cells(said, targets, target)
    named_rows = ([row, *([str(ids[1][row])] if ids is not None else []), *cells] for row, cells in enumerate(rows))
    return csv_text([["row", *([ids[0]] if ids is not None else []), *head], *named_rows])


Cells = tuple[list[str], Iterator[list[str]]]  # the heads of columns, and the cells of each row


def _class_cells(said: Tensor, targets: Tensor | None, classes: Sequence[str]) -> Cells:
    known = ["target"] if targets is not None else []
    rows = (
        [
            *([classes[int(targets[row])]] if targets is not None else []),
            classes[int(chances.argmax())],
            *_written(chances),
        ]
        for row, chances in enumerate(said)
    )
    return [*known, "prediction", *(f"probability_{name}" for name in classes)], rows


def _position_cells(said: Tensor, targets: Tensor | None, classes: Sequence[str]) -> Cells:
    names, likeliest = dict(enumerate(classes)) | {PADDING: ""}, said.argmax(dim=1)
    parts = {"prediction": likeliest} if targets is None else {"target": targets, "prediction": likeliest}
    head = [f"{part}_{place}" for part in parts for place in range(said.shape[2])]
    return head, ([names[int(value)] for part in parts.values() for value in part[row]] for row in range(len(said)))


def _column_cells(said: Tensor, targets: Tensor | None, target: Target) -> Cells:
    is_label = target.kind == LABELS
    known = None if targets is None else targets if is_label else target.in_units(targets)
    asked = [] if known is None else [f"target_{name}" for name in target.names]
    answers = [f"{'probability' if is_label else 'prediction'}_{name}" for name in target.names]
    rows = ([*([] if known is None else _written(known[row])), *_written(one)] for row, one in enumerate(said))
    return [*asked, *answers], rows


def _written(values: Tensor) -> list[str]:
    return [f"{float(value):.6g}" for value in values]


def indicators_of(said: Tensor, targets: Tensor, target: Target = CLASS) -> dict[str, float | None]:
    """How right `said`, (n, k) as `predictions.predict` gives it, is about targets; n at least 1. None for no value.

    Two classes: accuracy, auc, ks, precision, recall, f1, loss, see `discreet.tasks.metrics.indicators`. More:
    accuracy, loss, and precision, recall and f1 as the mean over classes. Labels: see `label_indicators`. Numbers: r2
    and mae of each, and the mean r2 if there are several. Sequences: those of classes, over all positions that are not
    padding, but that the loss is the mean over examples of their own mean, as a run has it; nothing if all is padding.
    """
    if target.kind == LABELS:
        found = label_indicators(said, targets)
    elif target.kind == SEQUENCES:
        return _of_sequences(said, targets)
    elif target.kind == NUMBERS:
        found = _of_numbers(said, targets, target)
    elif said.shape[1] == 2:
        found = indicators(targets, said[:, 1])
    else:
        found = _of_many_classes(said, targets)
    return {name: value if math.isfinite(value) else None for name, value in found.items()}


def _of_numbers(said: Tensor, targets: Tensor, target: Target) -> dict[str, float]:
    each = number_scores(said, target.in_units(targets))
    if len(each) == 1:
        return each[0]
    named = {f"{score}_{name}": one[score] for name, one in zip(target.names, each, strict=True) for score in one}
    return {"r2": sum(one["r2"] for one in each) / len(each), **named}


def _of_sequences(probabilities: Tensor, targets: Tensor) -> dict[str, float | None]:
    counted = targets != PADDING
    if not counted.any():
        return {}
    logits = probabilities.clamp_min(torch.finfo(torch.float64).tiny).log()
    of_positions = indicators_of(probabilities.movedim(1, 2)[counted], targets[counted])
    return of_positions | {"loss": float(cross_entropy(logits, targets).mean())}


def _of_many_classes(probabilities: Tensor, targets: Tensor) -> dict[str, float]:
    from sklearn import metrics

    truth, said = targets.numpy(), probabilities.argmax(dim=1).numpy()
    precision, recall, f1, _ = metrics.precision_recall_fscore_support(truth, said, average="macro", zero_division=0.0)
    chances = probabilities[torch.arange(len(targets)), targets].clamp_min(torch.finfo(torch.float64).tiny)
    return {
        "accuracy": float(metrics.accuracy_score(truth, said)),
        "precision": float(precision),
        "recall": float(recall),
        "f1": float(f1),
        "loss": float(-chances.log().mean()),
    }
