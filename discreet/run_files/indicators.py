"""Indicators of predictions on rows whose targets are known, by scikit-learn."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from discreet.queries.metrics import mean_auc
from discreet.queries.survival import concordance, hazard_loss, risk_of


def label_indicators(probabilities: Tensor, targets: Tensor) -> dict[str, float]:
    """Indicators for labels (n, k): accuracy of single labels, the share of examples with all
    labels correct (subset_accuracy), mean auc, and precision, recall and f1 over all labels
    together. A probability of at least 1/2 predicts a label."""
    from sklearn import metrics

    truth = targets.numpy()
    said = (probabilities >= 0.5).numpy()
    precision, recall, f1, _ = metrics.precision_recall_fscore_support(
        truth, said, average="micro", zero_division=0.0
    )
    loss = functional.binary_cross_entropy(probabilities.double(), targets.double())
    return {
        "accuracy": float((said == truth).mean()),
        "subset_accuracy": float(metrics.accuracy_score(truth, said)),
        "auc": mean_auc(probabilities, targets),
        "precision": float(precision),
        "recall": float(recall),
        "f1": float(f1),
        "loss": float(loss),
    }


def survival_indicators(probabilities: Tensor, targets: Tensor) -> dict[str, float]:
    """Indicators of probabilities of no event, (n, intervals), for targets of `hazard_loss`:
    concordance, and the loss, the mean negative log likelihood."""
    before = functional.pad(probabilities[:, :-1], (1, 0), value=1.0)
    tiny = torch.finfo(torch.float64).tiny
    event = (before - probabilities).clamp_min(tiny).log()
    alive = probabilities.clamp_min(tiny).log()
    logits = event - alive  # of the hazard, since event + alive = before
    return {
        "concordance": concordance(risk_of(probabilities), targets),
        "loss": float(hazard_loss(logits, targets.double()).mean()),
    }


def class_indicators(probabilities: Tensor, targets: Tensor) -> dict[str, float]:
    """Indicators of a classifier: accuracy, precision, recall, f1 and loss; for two classes auc and
    ks too.

    probabilities: (n, k); targets: (n,), class numbers, n at least 1. For two classes, class 1 is
    predicted if its probability is at least 1/2, and precision, recall and f1 are those of class 1;
    for more they are means over the classes. ks is the Kolmogorov-Smirnov distance, max over
    thresholds of true minus false positive rate; with a single class in `targets` auc and ks are
    NaN. loss is the mean cross entropy, finite even if a wrong probability is exactly 0 or 1.
    Precision is 0 without predicted positives, and recall is 0 without actual ones. Raises
    ValueError for a probability that is not finite.
    """
    from sklearn import metrics

    y = targets.cpu().numpy()
    p = probabilities.cpu().double().numpy()
    binary = p.shape[1] == 2
    said, average = (p[:, 1] >= 0.5, "binary") if binary else (p.argmax(axis=1), "macro")
    precision, recall, f1, _ = metrics.precision_recall_fscore_support(
        y, said, average=average, zero_division=0.0
    )
    found = {"accuracy": metrics.accuracy_score(y, said)}
    if binary:
        found |= {"auc": math.nan, "ks": math.nan}
        if 0 < y.sum() < len(y):
            false_positive, true_positive, _ = metrics.roc_curve(
                y, p[:, 1], drop_intermediate=False
            )
            found |= {
                "auc": metrics.roc_auc_score(y, p[:, 1]),
                "ks": (true_positive - false_positive).max(),
            }
    loss = metrics.log_loss(y, p, labels=range(p.shape[1]))
    found |= {"precision": precision, "recall": recall, "f1": f1, "loss": loss}
    return {name: float(value) for name, value in found.items()}
