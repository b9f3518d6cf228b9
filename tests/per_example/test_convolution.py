"""The weight of a convolution whose patches are never held: norms in parts, and one weighted pass for the sum."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from discreet.per_example import convolution
from discreet.per_example.per_example import clipped_gradient_sum, sequential_sum

LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "1d": (nn.Conv1d(3, 4, 3, stride=2, padding=1), (3, 17)),
    "2d": (nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), (3, 9, 8)),
    "2d, same on both sides": (nn.Conv2d(2, 5, 4, padding="same"), (2, 7, 6)),
    "3d": (nn.Conv3d(2, 3, 2, padding=1), (2, 4, 3, 5)),
    "transposed": (nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1), (4, 5, 4)),
}


class Twice(nn.Module):
    """A layer that is called on an input and on its square."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x).tanh() - self.layer(x * x)).flatten(1)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("name", LAYERS)
def test_sums_and_norms_without_held_patches_are_those_of_single_examples(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(convolution, "_FEW_PATCHES", 0)
    monkeypatch.setattr(convolution, "_PATCH_FLOATS", 400)  # some examples at a time
    monkeypatch.setattr(convolution, "grams_are_cheaper", lambda *_: True)
    made = list[Any]()
    monkeypatch.setattr(convolution.Convolved, "mass", _noting(convolution.Convolved.mass, made))
    layer, shape = LAYERS[name]
    inputs = torch.randn(6, *shape, generator=torch.Generator().manual_seed(40961))
    inputs[4] = float("inf")  # counts as zero

    def loss(outputs: Tensor, _: Tensor) -> Tensor:
        return (outputs * torch.linspace(-1, 1, outputs.shape[1])).sum(1)

    model = Twice(layer)
    total, norms = clipped_gradient_sum(model, inputs, clip_norm=2.0, loss=loss)
    assert torch.allclose(total, sequential_sum(model, inputs, clip_norm=2.0, loss=loss), atol=1e-5)
    assert made
    assert norms.isinf().tolist() == [False] * 4 + [True, False]


def _noting(mass: Any, made: list[Any]) -> Any:
    def noted(self: Any, order: int) -> Tensor:
        made.append(self)
        found: Tensor = mass(self, order)
        return found

    return noted
