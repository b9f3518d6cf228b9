"""How good a model is on examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from discreet.tasks.examples import Examples


@dataclass(frozen=True)
class Evaluation:
    """loss: mean cross entropy in nats an example. accuracy: fraction in [0, 1]. num_examples: at least 1."""

    loss: float
    accuracy: float
    num_examples: int


@torch.no_grad()
def evaluate(model: nn.Module, examples: Examples, *, batch_size: int = 1024) -> Evaluation:
    """Mean cross entropy and accuracy of `model` on `examples`, without gradients and in evaluation mode.

    Runs on the device of the model's parameters and leaves the model's training mode as it was. Logits that
    are not finite make the loss NaN or infinite; an example with a NaN among its logits counts as wrong.
    Raises ValueError for empty examples or batch_size < 1.
    """
    if len(examples) == 0:
        raise ValueError("cannot evaluate on no examples")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, not {batch_size}")
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    was_training = model.training
    model.eval()
    try:
        loss, correct = 0.0, 0
        for start in range(0, len(examples), batch_size):
            inputs = examples.inputs[start : start + batch_size].to(device)
            targets = examples.targets[start : start + batch_size].to(device)
            logits = model(inputs)
            loss += functional.cross_entropy(logits.double(), targets, reduction="sum").item()
            # argmax takes a NaN for the largest value, which would count as right by luck.
            right = (logits.argmax(dim=1) == targets) & ~logits.isnan().any(dim=1)
            correct += int(right.sum())
    finally:
        model.train(was_training)
    return Evaluation(loss / len(examples), correct / len(examples), len(examples))


def indicators(targets: torch.Tensor | Sequence[int], scores: torch.Tensor | Sequence[float]) -> dict[str, float]:
    """Indicators of a binary classifier: accuracy, auc, ks, precision, recall, f1, loss.

    targets: (n,) of 0 and 1. scores: (n,), the probability of class 1 in [0, 1]; a score of at least 1/2
    predicts 1. ks is the Kolmogorov-Smirnov distance, max over thresholds of true minus false positive rate.
    loss is the mean cross entropy, finite even if a wrong score is exactly 0 or 1. Precision with no
    predicted positives is 0, and so is recall with none to find. With a single class in `targets` auc and ks
    are NaN. Raises ValueError for empty, unequal, non-binary or non-finite input.
    """
    from sklearn import metrics

    y, p = torch.as_tensor(targets).cpu().long().numpy(), torch.as_tensor(scores).cpu().double().numpy()
    if y.ndim != 1 or y.shape != p.shape or len(y) == 0:
        raise ValueError(f"targets and scores must be equally long and not empty: {y.shape} and {p.shape}")
    if not ((y == 0) | (y == 1)).all():
        raise ValueError("targets must be 0 or 1")
    if not ((p >= 0) & (p <= 1)).all():
        raise ValueError("scores must be probabilities in [0, 1]")
    said, auc, ks = p >= 0.5, float("nan"), float("nan")
    if 0 < y.sum() < len(y):
        false_positive, true_positive, _ = metrics.roc_curve(y, p, drop_intermediate=False)
        auc, ks = metrics.roc_auc_score(y, p), (true_positive - false_positive).max()
    precision, recall, f1, _ = metrics.precision_recall_fscore_support(y, said, average="binary", zero_division=0.0)
    found = {"accuracy": metrics.accuracy_score(y, said), "auc": auc, "ks": ks}
    found |= {"precision": precision, "recall": recall, "f1": f1, "loss": metrics.log_loss(y, p, labels=[0, 1])}
    return {name: float(value) for name, value in found.items()}
