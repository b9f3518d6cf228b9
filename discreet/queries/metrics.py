"""Scores of a model on public examples, by scikit-learn."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from discreet.data.examples import Examples
from discreet.data.targets import CLASS, LABELS, NUMBERS, Target
from discreet.models.models import outputs_of
from discreet.per_example.objective import PADDING, Loss, cross_entropy
from discreet.queries.scores import EvaluationResult


def right_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """True for each example (n,), or each of its labels or positions (n, k), that is right: padding never is. NaN is
    wrong, though argmax takes it for the largest value."""
    if targets.dtype == torch.int64:
        return (outputs.argmax(dim=1) == targets) & ~outputs.isnan().any(dim=1)
    return ((outputs >= 0) == (targets == 1)) & ~outputs.isnan()


@torch.no_grad()
def evaluate(
    model: nn.Module,
    examples: Examples,
    *,
    loss: Loss = cross_entropy,
    target: Target = CLASS,
    batch_size: int = 1024,
) -> EvaluationResult:
    """Mean loss and scores of `model` on `examples`, at least one, without gradients and in evaluation mode.

    Cross entropy is in nats. The scores of classes and sequences: accuracy, the share that is right, of all positions
    that are not padding. Of labels: accuracy, the share of all labels that is right, and auc, the mean over the labels
    (NaN if every label is all 0 or all 1). Of numbers: r2, and mae, the mean absolute error in their own units, both as
    the mean over the numbers.

    Runs on the device of the model's parameters and leaves the model's training mode as it was. Outputs that are not
    finite make the loss NaN or infinite; an example with a NaN among its logits counts as wrong.
    """
    total, right, counted, kept = 0.0, 0, 0, []
    parts = (torch.split(values, batch_size) for values in (examples.inputs, examples.targets.cpu()))
    for inputs, targets in zip(*parts, strict=True):
        outputs = outputs_of(model, inputs)
        total += loss(outputs.double(), targets.double() if targets.is_floating_point() else targets).sum().item()
        if target.kind in (LABELS, NUMBERS):
            kept.append(outputs)  # of sequences they might be many
        if target.kind != NUMBERS:
            right += int(right_of(outputs, targets).sum())
            counted += int((targets != PADDING).sum())
    scores = {"accuracy": right / counted if counted else math.nan}
    if target.kind == LABELS:
        scores["auc"] = mean_auc(torch.cat(kept), examples.targets.cpu())
    if target.kind == NUMBERS:
        each = number_scores(target.in_units(torch.cat(kept)), target.in_units(examples.targets.cpu()))
        scores = {name: sum(one[name] for one in each) / len(each) for name in ("r2", "mae")}
    return EvaluationResult(total / len(examples), scores)


def mean_auc(outputs: Tensor, targets: Tensor) -> float:
    """The mean AUC of the labels (n, k) that are 0 somewhere and 1 somewhere; NaN without any and with NaN outputs."""
    from sklearn.metrics import roc_auc_score

    both = (targets.min(dim=0).values < targets.max(dim=0).values).nonzero().flatten()
    if not len(both) or outputs.isnan().any():
        return math.nan
    finite = outputs.double().nan_to_num()  # infinite ones stay the first and the last
    return float(roc_auc_score(targets[:, both].numpy(), finite[:, both].numpy(), average="macro"))


def number_scores(said: Tensor, truth: Tensor) -> list[dict[str, float]]:
    """R2 and the mean absolute error of each of k numbers, of predictions and truth (n, k) in their own units. NaN if a
    prediction is not finite, and R2 also for a single example. R2 of a constant truth is 0, or 1 if it is met."""
    from sklearn.metrics import mean_absolute_error, r2_score

    if not said.isfinite().all():
        return [{"r2": math.nan, "mae": math.nan}] * said.shape[1]
    found = []
    for true, given in zip(truth.T.numpy(), said.T.numpy(), strict=True):
        r2 = float(r2_score(true, given)) if len(true) > 1 else math.nan
        found.append({"r2": r2, "mae": float(mean_absolute_error(true, given))})
    return found


def label_indicators(probabilities: Tensor, targets: Tensor) -> dict[str, float]:
    """Of labels (n, k): accuracy of single labels, the share of examples with all labels right (subset_accuracy), mean
    auc, and precision, recall and f1 over all labels together. A probability of at least 1/2 says that a label holds.
    """
    from sklearn import metrics

    truth, said = targets.numpy(), (probabilities >= 0.5).numpy()
    precision, recall, f1, _ = metrics.precision_recall_fscore_support(truth, said, average="micro", zero_division=0.0)
    loss = nn.functional.binary_cross_entropy(probabilities.double(), targets.double())
    return {
        "accuracy": float((said == truth).mean()),
        "subset_accuracy": float(metrics.accuracy_score(truth, said)),
        "auc": mean_auc(probabilities, targets),
        **{"precision": float(precision), "recall": float(recall), "f1": float(f1), "loss": float(loss)},
    }


def class_indicators(probabilities: Tensor, targets: Tensor) -> dict[str, float]:
    """Indicators of a classifier: accuracy, precision, recall, f1 and loss, of two classes auc and ks too.

    probabilities: (n, k); targets: (n,), class numbers, n at least 1. Of two classes a probability of class 1 of at
    least 1/2 predicts it, and precision, recall and f1 are those of class 1; of more they are means over the classes.
    ks is the Kolmogorov-Smirnov distance, max over thresholds of true minus false positive rate; with a single class in
    `targets` auc and ks are NaN. loss is the mean cross entropy, finite even if a wrong probability is exactly 0 or 1.
    Precision with no predicted positives is 0, and so is recall with none to find. Raises ValueError for a probability
    that is not finite.
    """
    from sklearn import metrics

    y, p = targets.cpu().numpy(), probabilities.cpu().double().numpy()
    binary = p.shape[1] == 2
    said, average = (p[:, 1] >= 0.5, "binary") if binary else (p.argmax(axis=1), "macro")
    precision, recall, f1, _ = metrics.precision_recall_fscore_support(y, said, average=average, zero_division=0.0)
    found = {"accuracy": metrics.accuracy_score(y, said)}
    if binary:
        found |= {"auc": math.nan, "ks": math.nan}
        if 0 < y.sum() < len(y):
            false_positive, true_positive, _ = metrics.roc_curve(y, p[:, 1], drop_intermediate=False)
            found |= {"auc": metrics.roc_auc_score(y, p[:, 1]), "ks": (true_positive - false_positive).max()}
    loss = metrics.log_loss(y, p, labels=range(p.shape[1]))
    found |= {"precision": precision, "recall": recall, "f1": f1, "loss": loss}
    return {name: float(value) for name, value in found.items()}
