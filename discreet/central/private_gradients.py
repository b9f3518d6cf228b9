"""The clipped and noised sums of a loop's batches, each charged before its noise is drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from discreet.central.loop_settings import check_whole
from discreet.central.step_account import StepAccount
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.per_example import Loss, clipped_gradient_sum, cross_entropy
from discreet.privacy.randomness import RandomSource
from discreet.privacy.rules.objective import PADDING
from discreet.tasks.models import trainable_part
from discreet.training.local_training import step_noise
from discreet.training.losses import per_example_loss

Pair = tuple[Tensor, Tensor]
Chosen = Callable[[Tensor], Loss]


def one_value_an_example(loss: Loss) -> Chosen:
    """From a batch's targets to the loss of one value an example to use for them.

    A loss of torch.nn becomes `per_example_loss`; the plain one for class numbers, the cross-entropy whose gradient is
    known.

    Raises:
      ValueError: the loss gives one value for a whole batch.
    """
    reduction = getattr(loss, "reduction", "none")
    if reduction != "none":
        raise ValueError(
            f"loss: {type(loss).__name__} with reduction={reduction!r} gives one value for a whole batch: "
            'give it reduction="none", so that each example\'s gradient can be clipped'
        )
    known = isinstance(loss, nn.Module) and type(loss).__module__.startswith("torch.nn.")
    wrapped = per_example_loss(loss) if known and isinstance(loss, nn.Module) else loss
    if not _is_plain(loss):
        return lambda targets: wrapped
    return lambda targets: cross_entropy if _are_classes(targets) else wrapped


def _is_plain(loss: Loss) -> bool:
    """Whether it is the cross-entropy without weights, smoothing or padding of another number."""
    if type(loss) is not nn.CrossEntropyLoss:
        return False
    return loss.weight is None and loss.label_smoothing == 0 and loss.ignore_index == PADDING


def _are_classes(targets: Tensor) -> bool:
    return targets.dim() == 1 and targets.dtype == torch.int64 and not bool((targets < 0).any())


@dataclass(frozen=True, eq=False)
class PrivateGradients:
    """A loop's single row of `local_training.NoisedSums`: sums are (1, trainable parameters).

    Attributes:
      most: examples that are worked on at once; a larger batch is cut, and its sums are added up. None: all.
    """

    model: nn.Module
    loss: Chosen
    most: int | None
    mechanism: Gaussian
    account: StepAccount
    source: RandomSource

    def __post_init__(self) -> None:
        if self.most is not None:
            check_whole("max_physical_batch", self.most)

    def clipped_sums(self, params: list[Tensor], batch: Pair, l2_norm_clip: float) -> Tensor:
        """The sum over a batch, of any size. `params` are the model's own, and are not read here."""
        inputs, targets = batch
        most, total = self.most or max(1, len(inputs)), None
        for some, wanted in zip(torch.split(inputs, most), torch.split(targets, most), strict=True):
            loss = self.loss(wanted)
            found, _ = clipped_gradient_sum(self.model, some, targets=wanted, l2_norm_clip=l2_norm_clip, loss=loss)
            total = found if total is None else total.add_(found)
        assert total is not None  # an empty batch is one empty piece
        return trainable_part(self.model, total).unsqueeze(0)

    def add_noise(self, sums: Tensor, l2_norm_clip: float, *, step: int) -> Tensor:
        """Charges the step, then noises it."""
        self.account.charge()
        return self.mechanism.add_noise(sums, l2_norm_clip, step_noise(self.source, step))
