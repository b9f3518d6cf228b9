"""The last model's results on the public test set that plots are drawn from: a confusion matrix,
the ROC curve, and calibration."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from discreet.data.examples import Task
from discreet.data.targets import CLASSES
from discreet.models.models import outputs_of

FILE = "test_set.json"
MOST_CLASSES = 20  # of a confusion matrix
MOST_POINTS = 200  # of a ROC curve
BINS = 10


def final_results(model: nn.Module, task: Task) -> dict[str, Any] | None:
    """The content of test_set.json; None without classes, without a test set, or if outputs are not
    finite."""
    classes = task.shape.num_classes
    if task.shape.target.kind != CLASSES or not len(task.test) or classes > MOST_CLASSES:
        return None
    outputs = outputs_of(model, task.test.inputs).double()
    targets = task.test.targets.cpu()
    if not outputs.isfinite().all():
        return None
    if task.description is not None:
        named = task.description.classes
    else:
        named = ()
    said = outputs.softmax(dim=1)
    pairs = targets * classes + said.argmax(dim=1)
    confusion = torch.bincount(pairs, minlength=classes**2).reshape(classes, classes)
    found: dict[str, Any] = {
        "classes": list(named or map(str, range(classes))),
        "confusion": confusion.tolist(),
        "calibration": _calibration(said, targets),
    }
    return found | ({"roc": _roc(outputs, targets)} if classes == 2 else {})


def _roc(outputs: Tensor, targets: Tensor) -> list[list[float]]:
    """(false positive rate, true positive rate) of class 1, at most MOST_POINTS; empty with a
    single class."""
    from sklearn.metrics import roc_curve

    if len(torch.unique(targets)) < 2:
        return []
    wrong, right, _ = roc_curve(targets.numpy(), (outputs[:, 1] - outputs[:, 0]).numpy())
    places = np.unique(
        np.linspace(0, len(wrong) - 1, min(MOST_POINTS, len(wrong))).round().astype(int)
    )
    return np.stack([wrong[places], right[places]], axis=1).round(5).tolist()  # type: ignore[no-any-return]


def _calibration(said: Tensor, targets: Tensor) -> list[list[float]]:
    """(mean probability, fraction that is true, examples) for each tenth of the probability that
    has examples: of class 1 for two classes, otherwise of the most likely class."""
    if said.shape[1] == 2:
        probability = said[:, 1]
        true = targets == 1
    else:
        probability = said.max(dim=1).values
        true = said.argmax(dim=1) == targets
    places = (probability * BINS).long().clamp(max=BINS - 1)
    rows = list[list[float]]()
    for place in torch.unique(places):
        here = places == place
        rows.append(
            [float(probability[here].mean()), float(true[here].double().mean()), float(here.sum())]
        )
    return rows
