"""One small instance, or several with other settings, of every layer of torch.nn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

Run = Callable[[Any, Tensor], Tensor]
IMAGE, VOLUME = (2, 4, 4), (2, 4, 4, 4)


@dataclass(frozen=True)
class Case:
    """A layer with small arguments: `shape` of one example; `run` if it is called in another way
    than layer(inputs)."""

    layer: Callable[[], nn.Module]
    shape: tuple[int, ...] = (4, 6)
    setting: str = ""
    run: Run | None = None
    ids: bool = False  # inputs are whole numbers, below 6
    training: bool = True


def first(layer: Any, inputs: Tensor) -> Tensor:
    return layer(inputs)[0]


def itself(layer: Any, inputs: Tensor) -> Tensor:
    return layer(inputs, inputs, inputs)[0]


def twice(layer: Any, inputs: Tensor) -> Tensor:
    return layer(inputs, inputs.tanh())


def unpooled(pool: Callable[..., Any], layer: Any, inputs: Tensor) -> Tensor:
    return layer(*pool(inputs, 2, return_indices=True))


def step(layer: Any, inputs: Tensor) -> Tensor:
    found = layer(inputs)
    return found if isinstance(found, Tensor) else found[0]


def held(layer: Any, inputs: Tensor) -> Tensor:
    parts = layer.values() if isinstance(layer, nn.ModuleDict) else layer
    for part in parts:
        inputs = part(inputs)
    return inputs


def weighed(layer: Any, inputs: Tensor) -> Tensor:
    return inputs * next(iter(layer.parameters()))


def cases(*kinds: Callable[[], nn.Module], **options: Any) -> list[Case]:
    return [Case(kind, **options) for kind in kinds]


def encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(6, 2, 5, **options)


def encoders(**options: Any) -> nn.Module:
    return nn.TransformerEncoder(
        encoder(batch_first=True), 2, enable_nested_tensor=False, **options
    )


def norms(kind: Callable[..., nn.Module], shape: tuple[int, ...]) -> list[Case]:
    still = Case(kind, shape, "in eval mode, or its module is", training=False)
    return [Case(kind, shape, "in training mode"), still]


def instance_norms(kind: Callable[..., nn.Module], shape: tuple[int, ...]) -> list[Case]:
    running = partial(kind, track_running_stats=True)
    return [Case(kind, shape), Case(running, shape, "track_running_stats, in training mode")]


def recurrent(kind: Callable[..., nn.Module]) -> list[Case]:
    plain, more = (
        partial(kind, 6, 3, batch_first=True),
        partial(kind, 6, 3, 2, batch_first=True, bidirectional=True),
    )
    return [
        Case(plain, run=first),
        Case(more, setting="several layers, both directions", run=first),
    ]


ELEMENTS = [
    *cases(
        nn.ReLU,
        nn.ReLU6,
        nn.LeakyReLU,
        nn.ELU,
        nn.CELU,
        nn.SELU,
        nn.GELU,
        nn.SiLU,
        nn.Mish,
        nn.Sigmoid,
    ),
    *cases(
        nn.LogSigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.Tanhshrink, nn.Hardtanh, nn.Hardsigmoid
    ),
    *cases(nn.Hardswish, nn.Hardshrink, nn.Softshrink, lambda: nn.Threshold(0.1, 0.2), nn.PReLU),
    Case(nn.RReLU, setting="in training mode"),
    Case(nn.RReLU, setting="in eval mode", training=False),
    *cases(nn.Identity, nn.Flatten, lambda: nn.Unflatten(1, (2, 2)), nn.Dropout, nn.AlphaDropout),
    *cases(
        lambda: nn.Softmax(-1),
        lambda: nn.LogSoftmax(-1),
        lambda: nn.Softmin(-1),
        lambda: nn.GLU(-1),
    ),
    *cases(nn.Dropout1d, nn.FeatureAlphaDropout),
    Case(nn.Dropout2d, IMAGE),
    Case(nn.Dropout3d, VOLUME),
    Case(nn.Softmax2d, IMAGE),
    Case(lambda: nn.Softmax(0), setting="along the examples"),
]
SPACE = [
    *cases(lambda: nn.MaxPool1d(2), lambda: nn.AvgPool1d(2), lambda: nn.LPPool1d(1, 2)),
    *cases(lambda: nn.AdaptiveAvgPool1d(2), lambda: nn.AdaptiveMaxPool1d(2)),
    *cases(
        lambda: nn.MaxPool2d(2), lambda: nn.AvgPool2d(2), lambda: nn.LPPool2d(1, 2), shape=IMAGE
    ),
    *cases(lambda: nn.AdaptiveAvgPool2d(2), lambda: nn.AdaptiveMaxPool2d(2), shape=IMAGE),
    *cases(lambda: nn.FractionalMaxPool2d(2, output_size=2), shape=IMAGE),
    *cases(
        lambda: nn.MaxPool3d(2), lambda: nn.AvgPool3d(2), lambda: nn.LPPool3d(1, 2), shape=VOLUME
    ),
    *cases(lambda: nn.AdaptiveAvgPool3d(2), lambda: nn.AdaptiveMaxPool3d(2), shape=VOLUME),
    *cases(lambda: nn.FractionalMaxPool3d(2, output_size=2), shape=VOLUME),
    Case(lambda: nn.MaxUnpool1d(2), run=partial(unpooled, nn.functional.max_pool1d)),
    Case(lambda: nn.MaxUnpool2d(2), IMAGE, run=partial(unpooled, nn.functional.max_pool2d)),
    Case(lambda: nn.MaxUnpool3d(2), VOLUME, run=partial(unpooled, nn.functional.max_pool3d)),
    *cases(lambda: nn.ZeroPad1d(1), lambda: nn.ConstantPad1d(1, 0.5), lambda: nn.CircularPad1d(1)),
    *cases(lambda: nn.ReflectionPad1d(1), lambda: nn.ReplicationPad1d(1)),
    *cases(
        lambda: nn.ZeroPad2d(1),
        lambda: nn.ConstantPad2d(1, 0.5),
        lambda: nn.CircularPad2d(1),
        shape=IMAGE,
    ),
    *cases(lambda: nn.ReflectionPad2d(1), lambda: nn.ReplicationPad2d(1), shape=IMAGE),
    *cases(
        lambda: nn.ZeroPad3d(1),
        lambda: nn.ConstantPad3d(1, 0.5),
        lambda: nn.CircularPad3d(1),
        shape=VOLUME,
    ),
    *cases(lambda: nn.ReflectionPad3d(1), lambda: nn.ReplicationPad3d(1), shape=VOLUME),
    *cases(
        lambda: nn.Upsample(scale_factor=2),
        lambda: nn.UpsamplingNearest2d(scale_factor=2),
        shape=IMAGE,
    ),
    *cases(
        lambda: nn.UpsamplingBilinear2d(scale_factor=2),
        lambda: nn.LocalResponseNorm(2),
        shape=IMAGE,
    ),
    *cases(
        lambda: nn.Unfold(2),
        lambda: nn.ChannelShuffle(2),
        lambda: nn.PixelUnshuffle(2),
        shape=IMAGE,
    ),
    Case(lambda: nn.Fold(3, 2), (8, 4)),
    Case(lambda: nn.PixelShuffle(2), (4, 2, 2)),
    Case(lambda: nn.CrossMapLRN2d(2), IMAGE),
]
WEIGHTS = [
    *cases(lambda: nn.Linear(6, 3), lambda: nn.Conv1d(4, 3, 2)),
    Case(lambda: nn.Conv2d(2, 3, 2), IMAGE),
    Case(lambda: nn.Conv3d(2, 3, 2), VOLUME),
    Case(lambda: nn.ConvTranspose1d(4, 3, 2)),
    Case(lambda: nn.ConvTranspose2d(2, 3, 2), IMAGE),
    Case(lambda: nn.ConvTranspose3d(2, 3, 2), VOLUME),
    Case(lambda: nn.Bilinear(6, 6, 3), run=twice),
    Case(lambda: nn.Embedding(6, 3), (4,), ids=True),
    *(
        Case(partial(nn.Embedding, 6, 3, **options), (4,), name, ids=True)  # type: ignore[arg-type]
        for name, options in (
            ("max_norm", {"max_norm": 1.0}),
            ("scale_grad_by_freq", {"scale_grad_by_freq": True}),
        )
    ),
    Case(lambda: nn.EmbeddingBag(6, 3), (4,), "mode sum or mean", ids=True),
    Case(lambda: nn.EmbeddingBag(6, 3, mode="max"), (4,), "mode max", ids=True),
    *cases(lambda: nn.LayerNorm(6), lambda: nn.RMSNorm(6), lambda: nn.GroupNorm(2, 4)),
    *norms(lambda: nn.BatchNorm1d(4), (4, 6)),
    *norms(lambda: nn.BatchNorm2d(2), IMAGE),
    *norms(lambda: nn.BatchNorm3d(2), VOLUME),
    *norms(lambda: nn.SyncBatchNorm(2), IMAGE),
    *instance_norms(partial(nn.InstanceNorm1d, 4, affine=True), (4, 6)),
    *instance_norms(partial(nn.InstanceNorm2d, 2, affine=True), IMAGE),
    *instance_norms(partial(nn.InstanceNorm3d, 2, affine=True), VOLUME),
]
SEQUENCES = [
    *(case for kind in (nn.LSTM, nn.GRU, nn.RNN) for case in recurrent(kind)),
    *(Case(partial(kind, 6, 3), (6,), run=step) for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell)),
    Case(lambda: nn.MultiheadAttention(6, 2, batch_first=True), run=itself),
    Case(lambda: encoder(batch_first=True, dropout=0.0), setting="batch_first"),
    Case(
        lambda: encoder(dropout=0.0),
        setting="examples second",
        run=lambda layer, x: layer(x.transpose(0, 1)).transpose(0, 1),
    ),
    Case(encoders, setting="of layers with batch_first", training=False),
    Case(lambda: nn.TransformerDecoderLayer(6, 2, 5, 0.0, batch_first=True), run=twice),
    Case(
        lambda: nn.TransformerDecoder(
            nn.TransformerDecoderLayer(6, 2, 5, 0.0, batch_first=True), 1
        ),
        run=twice,
    ),
    Case(lambda: nn.Transformer(6, 2, 1, 1, 5, 0.0, batch_first=True), run=twice),
    Case(nn.CosineSimilarity, run=twice),
    Case(nn.PairwiseDistance, run=twice),
]
DATA_OWNERS = [
    Case(lambda: nn.Sequential(nn.Linear(6, 3), nn.Tanh()), setting="of layers with a fast rule"),
    Case(lambda: nn.ModuleList([nn.Linear(6, 3)]), run=held),
    Case(lambda: nn.ModuleDict({"one": nn.Linear(6, 3)}), run=held),
    Case(lambda: nn.ParameterList([nn.Parameter(torch.ones(6))]), run=weighed),
    Case(lambda: nn.ParameterDict({"one": nn.Parameter(torch.ones(6))}), run=weighed),
]
LAZY = [
    *cases(
        lambda: nn.LazyLinear(3), lambda: nn.LazyConv1d(3, 2), lambda: nn.LazyConvTranspose1d(3, 2)
    ),
    *cases(
        lambda: nn.LazyConv2d(3, 2),
        lambda: nn.LazyConvTranspose2d(3, 2),
        nn.LazyBatchNorm2d,
        shape=IMAGE,
    ),
    *cases(
        lambda: nn.LazyConv3d(3, 2),
        lambda: nn.LazyConvTranspose3d(3, 2),
        nn.LazyBatchNorm3d,
        shape=VOLUME,
    ),
    *cases(nn.LazyBatchNorm1d, lambda: nn.LazyInstanceNorm1d(affine=True)),
    Case(lambda: nn.LazyInstanceNorm2d(affine=True), IMAGE),
    Case(lambda: nn.LazyInstanceNorm3d(affine=True), VOLUME),
]
GROUPS: dict[str, Sequence[Case]] = {
    "Layers with weights": WEIGHTS,
    "Sequences": SEQUENCES,
    "Activations, dropout and shapes": ELEMENTS,
    "Pools, padding and space": SPACE,
    "Containers": DATA_OWNERS,
    "Lazy layers": LAZY,
}
LOSSES: Sequence[nn.Module] = (
    nn.CrossEntropyLoss(),
    nn.NLLLoss(),
    nn.MSELoss(),
    nn.L1Loss(),
    nn.SmoothL1Loss(),
    nn.HuberLoss(),
    nn.BCELoss(),
    nn.BCEWithLogitsLoss(),
    nn.SoftMarginLoss(),
    nn.PoissonNLLLoss(),
    nn.KLDivLoss(),
    nn.HingeEmbeddingLoss(),
    nn.MultiMarginLoss(),
    nn.MultiLabelMarginLoss(),
    nn.MultiLabelSoftMarginLoss(),
    nn.GaussianNLLLoss(),
    nn.CTCLoss(),
    nn.CosineEmbeddingLoss(),
    nn.MarginRankingLoss(),
    nn.TripletMarginLoss(),
    nn.TripletMarginWithDistanceLoss(),
    nn.AdaptiveLogSoftmaxWithLoss(6, 3, [1]),
    nn.LinearCrossEntropyLoss(6, 3),
)
# Names that are no layers: what others inherit from, and old names of others.
BASES = ("Module", "RNNBase", "RNNCellBase", "Container", "NLLLoss2d")
