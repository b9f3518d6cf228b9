"""Layers without parameters, which work on each example by itself; what they draw at random too.

A layer that reads channels or space takes an input without the examples as well. So that the first dimension is never
one that it works on, it needs one dimension more than it reads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from torch import Tensor, nn

from discreet.privacy.rules.terms import Rule, Tape

_ANY: Sequence[type[nn.Module]] = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.Threshold, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Sigmoid, nn.LogSigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.Tanhshrink),
    *(nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Hardshrink, nn.Softshrink),
    *(nn.Dropout, nn.AlphaDropout, nn.Identity, nn.Flatten, nn.Unflatten),
)
# By the number of dimensions that their inputs have at least, the examples counted.
_SPATIAL: Mapping[int, Sequence[type[nn.Module]]] = {
    2: (
        *(nn.MaxPool1d, nn.AvgPool1d, nn.LPPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d, nn.Dropout1d),
        *(nn.ZeroPad1d, nn.ConstantPad1d, nn.CircularPad1d, nn.ReflectionPad1d, nn.ReplicationPad1d),
        nn.FeatureAlphaDropout,
    ),
    3: (
        *(nn.MaxPool2d, nn.AvgPool2d, nn.LPPool2d, nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.Dropout2d),
        *(nn.ZeroPad2d, nn.ConstantPad2d, nn.CircularPad2d, nn.ReflectionPad2d, nn.ReplicationPad2d),
        *(nn.FractionalMaxPool2d, nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d),
        *(nn.Fold, nn.LocalResponseNorm, nn.ChannelShuffle),
    ),
    4: (
        *(nn.MaxPool3d, nn.AvgPool3d, nn.LPPool3d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool3d, nn.Dropout3d),
        *(nn.ZeroPad3d, nn.ConstantPad3d, nn.CircularPad3d, nn.ReflectionPad3d, nn.ReplicationPad3d),
        *(nn.FractionalMaxPool3d, nn.Unfold, nn.PixelShuffle, nn.PixelUnshuffle, nn.Softmax2d),
    ),
}
_ALONG: Sequence[type[nn.Module]] = (nn.Softmax, nn.LogSoftmax, nn.Softmin, nn.GLU)


def covers_dimension(layer: nn.Module) -> bool:
    """True if a layer along one dimension names it, and it is not that of the examples."""
    return layer.dim not in (None, 0)


def _free(least: int) -> Rule:
    def run(tape: Tape, layer: nn.Module, inputs: Tensor) -> Tensor:
        tape.rows(inputs, least=least)
        outputs: Tensor = layer(inputs)
        tape.rows(outputs, least=1)
        return outputs

    return run


def _along(tape: Tape, layer: nn.Module, inputs: Tensor) -> Tensor:
    dim = cast(int, layer.dim)
    tape.rows(inputs, least=1 + (dim if dim > 0 else -dim))
    outputs: Tensor = layer(inputs)
    return outputs


def check_draws(name: str, layer: nn.Module) -> None:
    """ValueError for a layer in which an example's values decide how many numbers are drawn, so which others get."""
    if isinstance(layer, nn.RReLU) and layer.training:
        raise ValueError(f"layer {name!r} (RReLU) draws a number for each value below 0: use LeakyReLU or PReLU")


without_parameters: Rule = _free(1)

FREE_RULES: dict[type[nn.Module], Rule] = {
    **dict.fromkeys(_ANY, without_parameters),
    **{kind: _free(least) for least, kinds in _SPATIAL.items() for kind in kinds},
    **dict.fromkeys(_ALONG, _along),
}
