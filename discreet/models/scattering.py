"""Scattering features of images: a fixed transform without parameters, as input of a linear model.

Two orders of Morlet wavelets at two scales in eight directions (Bruna and Mallat 2013, arXiv
1203.1513), averaged over 4 x 4 pixels, then normalised in groups of channels of the same image.
Tramer and Boneh 2021 (arXiv 2011.11660) found that linear models on such features beat networks
trained from scratch with the same privacy: most of a network's privacy budget goes into learning
features like these.

The transform reads only the example itself and public constants, so it costs no privacy, and its
features are computed once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

DIRECTIONS = 8
AVERAGED = 4  # pixels, along either side
GROUP = 3  # channels normalised together
# orders 0, 1 (two scales), 2 (fine, then coarse)
CHANNELS = 1 + 2 * DIRECTIONS + DIRECTIONS * DIRECTIONS
LEAST_SIDE = 8
SMALLEST = 1e-12  # added under the root, so that a modulus of zero has a finite gradient


class Scattering(nn.Module):
    """Maps (n, channels, height, width) to (n, out_features), each image separately; the rows of
    the result have a norm of at most 1.

    Args:
        input_shape: (channels, height, width), sides multiples of 4 and at least 8.

    Attributes:
        out_features: channels * 81 * (height / 4) * (width / 4).

    Raises:
        ValueError: for another shape.
    """

    is_fixed = True  # it has no parameters, and is computed once an example

    fine: Tensor
    coarse: Tensor
    blur: Tensor
    blur_half: Tensor

    def __init__(self, input_shape: tuple[int, ...]) -> None:
        super().__init__()
        if len(input_shape) != 3 or any(
            side < LEAST_SIDE or side % AVERAGED for side in input_shape[1:]
        ):
            sides = f"multiples of {AVERAGED} and at least {LEAST_SIDE}"
            raise ValueError(
                f"model.name: scattering reads images whose sides are {sides}, not "
                f"{tuple(input_shape)}"
            )
        channels, height, width = input_shape
        self.out_features = channels * CHANNELS * (height // AVERAGED) * (width // AVERAGED)
        filters = {
            "fine": _wavelets(1.0, 7),
            "coarse": _wavelets(2.0, 13),
            "blur": _gaussian(0.8 * AVERAGED, 13),
            "blur_half": _gaussian(0.4 * AVERAGED, 7),
        }
        for name, values in filters.items():
            # Constants, not saved with a model.
            self.register_buffer(name, values, persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """The features, float32."""
        planes = images.flatten(0, 1).unsqueeze(1)
        edges = _modulus(planes, self.fine, stride=1)
        wide = _modulus(planes, self.coarse, stride=2)
        crossed = _modulus(edges.flatten(0, 1).unsqueeze(1), self.coarse, stride=2)
        crossed = crossed.view(len(planes), -1, *crossed.shape[2:])
        parts = [
            _averaged(planes, self.blur, stride=4),
            _averaged(edges, self.blur, stride=4),
            _averaged(wide, self.blur_half, stride=2),
            _averaged(crossed, self.blur_half, stride=2),
        ]
        features = torch.cat(parts, 1).view(len(images), -1, *parts[0].shape[2:])
        normed = functional.group_norm(features, features.shape[1] // GROUP)
        return normed.flatten(1).div(math.sqrt(self.out_features))


def _wavelets(scale: float, side: int) -> Tensor:
    """Real and imaginary parts of Morlet wavelets in all directions, (2 * DIRECTIONS, 1, side,
    side).

    A Gaussian envelope of 0.8 pixels at scale 1, half as long as it is wide, around a wave of 3 pi
    / 4 at scale 1. A share of the envelope is subtracted, so that the wavelet's mean is zero.
    """
    steps = torch.arange(side, dtype=torch.float64) - side // 2
    y, x = torch.meshgrid(steps, steps, indexing="ij")
    deviation = 0.8 * scale
    frequency = 3 * math.pi / 4 / scale
    slant = 4 / DIRECTIONS
    found = []
    for direction in range(DIRECTIONS):
        angle = direction * math.pi / DIRECTIONS
        along = math.cos(angle) * x + math.sin(angle) * y
        across = math.cos(angle) * y - math.sin(angle) * x
        envelope = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * deviation**2))
        wave = envelope * torch.exp(1j * frequency * along)
        found.append(
            (wave - wave.sum() / envelope.sum() * envelope) * slant / (2 * math.pi * deviation**2)
        )
    wavelets = torch.stack(found)
    return torch.cat([wavelets.real, wavelets.imag]).float().unsqueeze(1)


def _gaussian(deviation: float, side: int) -> Tensor:
    steps = torch.arange(side, dtype=torch.float64) - side // 2
    line = torch.exp(-(steps**2) / (2 * deviation**2))
    plane = torch.outer(line, line)
    return (plane / plane.sum()).float()[None, None]


def _modulus(planes: Tensor, wavelets: Tensor, *, stride: int) -> Tensor:
    """|plane * wavelet| for (m, 1, height, width): (m, DIRECTIONS, height / stride, width /
    stride)."""
    found = functional.conv2d(_padded(planes, wavelets), wavelets, stride=stride)
    real, imaginary = found.chunk(2, dim=1)
    return (real.square() + imaginary.square() + SMALLEST).sqrt()


def _averaged(planes: Tensor, blur: Tensor, *, stride: int) -> Tensor:
    """Every channel of (m, channels, height, width), blurred and subsampled."""
    flat = planes.flatten(0, 1).unsqueeze(1)
    found = functional.conv2d(_padded(flat, blur), blur, stride=stride)
    return found.view(*planes.shape[:2], *found.shape[2:])


def _padded(planes: Tensor, filters: Tensor) -> Tensor:
    side = filters.shape[-1] // 2
    return functional.pad(planes, (side, side, side, side), mode="reflect")
