"""Models as people write them, for cohorts: custom forwards, dropout, frozen parts, a recurrent
layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Residual(nn.Module):
    """Images to logits: a convolution, then single-head attention over the rows with a residual
    connection.

    With `drop` it has dropout of channels and of numbers; with `frozen` only the last layers learn.
    """

    def __init__(
        self, shape: tuple[int, ...], classes: int, *, drop: float = 0.0, frozen: bool = False
    ) -> None:
        super().__init__()
        self.entry, self.heads = (
            nn.Conv2d(shape[0], 4, 3, padding=1),
            nn.Linear(shape[2], 3 * 16, bias=False),
        )
        self.norm, self.exit = nn.LayerNorm(16), nn.Linear(16, classes)
        self.channels, self.numbers = nn.Dropout2d(drop), nn.Dropout(drop)
        generator = torch.Generator().manual_seed(50_333)
        for values in [*self.entry.parameters(), *self.heads.parameters()] if frozen else []:
            values.requires_grad_(False).copy_(torch.rand(values.shape, generator=generator) - 0.5)

    def forward(self, images: Tensor) -> Tensor:
        rows = self.channels(torch.relu(self.entry(images))).mean(1)
        query, key, value = self.heads(rows).chunk(3, dim=-1)
        found = value + torch.softmax(query @ key.transpose(1, 2), -1) @ value
        logits: Tensor = self.exit(self.numbers(self.norm(found)).amax(1))
        return logits


def dropping(shape: tuple[int, ...], classes: int) -> nn.Module:
    """`Residual` with dropout."""
    return Residual(shape, classes, drop=0.3)


def partly_frozen(shape: tuple[int, ...], classes: int) -> nn.Module:
    """`Residual` with frozen convolution and heads."""
    return Residual(shape, classes, frozen=True)


class Recurrent(nn.Module):
    """Rows of images to logits by PyTorch's own recurrent layer."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.recurrent, self.exit = nn.LSTM(shape[2], 16, batch_first=True), nn.Linear(16, classes)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.exit(self.recurrent(images[:, 0])[0][:, -1])
        return logits


OWN = tuple(
    f"benchmarks.own_models:{name}"
    for name in ("Residual", "dropping", "partly_frozen", "Recurrent")
)
