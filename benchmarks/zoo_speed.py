"""The cost of a private step, as `loop`, for image models of timm: those that were once slow, and
others that are drawn at random from it, one of a family.

    pip install timm
    python -m benchmarks.zoo_speed 7        # draws by another seed

A model has random weights, ten classes and GroupNorm in place of BatchNorm, and takes four images
of 128 x 128 pixels, or of its own size if it can take no other. A drawn model with more than 30
million parameters is passed over. T5, a U-Net and a segmentation model are of other makers.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.loop_speed import SECONDS, compared, with_medians
from benchmarks.people_models import Case
from benchmarks.side_by_side import Row
from discreet import to_group_norm
from discreet.cli.console import print_table
from discreet.per_example.objective import cross_entropy

DRAWN, SEED = 20, 1
LARGEST = 30_000_000
IMAGES, SIZE, OWN_SIZE = 4, 128, 224
# Why a model of timm can't take images of another size.
UNFIT = (RuntimeError, AssertionError, TypeError, ValueError)


class UNet(nn.Module):
    """Three levels of two convolutions with GroupNorm, and skip connections between them."""

    def __init__(self, width: int = 16, classes: int = 5) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(4)]
        self.down = nn.ModuleList(map(_convolutions, [3, *widths[:-1]], widths))
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(wide, less, 2, 2) for wide, less in pairs)
        self.joined = nn.ModuleList(_convolutions(wide, less) for wide, less in pairs)
        self.out = nn.Conv2d(width, classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """(n, 3, h, w) to logits (n, classes, h, w); h and w are multiples of 8."""
        kept: list[Tensor] = []
        x = images
        for level in self.down:
            x = level(functional.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        for up, joined, before in zip(self.up, self.joined, kept[-2::-1], strict=True):
            x = joined(torch.cat([up(x), before], 1))
        return self.out(x)  # type: ignore[no-any-return]


def _convolutions(before: int, after: int) -> nn.Module:
    layers: list[nn.Module] = []
    for width in (before, after):
        layers += [nn.Conv2d(width, after, 3, padding=1), nn.GroupNorm(8, after), nn.ReLU()]
    return nn.Sequential(*layers)


def of_timm(name: str) -> Case:
    """A model of timm by its name."""
    model, size = _sized(name)
    model = to_group_norm(model).train()
    return Case(model, torch.randn(IMAGES, 3, size, size), torch.randint(10, (IMAGES,)))


@torch.no_grad()
def _sized(name: str) -> tuple[nn.Module, int]:
    """The model, and the size of its images."""
    create = partial(import_module("timm").create_model, name, num_classes=10)
    for settings in ({"img_size": SIZE}, {}):
        try:
            model = create(**settings).eval()
            model(torch.randn(1, 3, SIZE, SIZE))
        except UNFIT:
            continue
        return model, SIZE
    model = create()
    return model, model.pretrained_cfg.get("input_size", (3, OWN_SIZE, OWN_SIZE))[-1]


def _pixels(model: nn.Module, loss: Callable[[Any, Tensor], Tensor]) -> Case:
    return Case(model, torch.randn(4, 3, 64, 64), torch.randint(5, (4, 64, 64)), loss)


def _of_pixels(outputs: Any, targets: Tensor) -> Tensor:
    logits = outputs["out"] if isinstance(outputs, dict) else outputs
    return functional.cross_entropy(logits, targets, reduction="none").mean((1, 2))


def _lraspp() -> Case:
    build = import_module("torchvision.models.segmentation").lraspp_mobilenet_v3_large
    return _pixels(to_group_norm(build(num_classes=5, weights_backbone=None)), _of_pixels)


def _t5() -> Case:
    found = import_module("transformers")
    sizes = {"vocab_size": 1000, "d_model": 128, "d_ff": 512, "num_layers": 3, "num_heads": 4}
    config = found.T5Config(**sizes, d_kv=32, dropout_rate=0.0, decoder_start_token_id=0)
    answers = torch.randint(1, 1000, (8, 16))
    inputs = {"input_ids": torch.randint(1, 1000, (8, 32)), "labels": answers}
    model = found.T5ForConditionalGeneration(config).train()
    return Case(model, inputs, answers, _of_answers)


def _of_answers(outputs: Any, answers: Tensor) -> Tensor:
    return cross_entropy(outputs.logits.transpose(1, 2), answers)


ONCE_SLOW: dict[str, Callable[[], Case]] = {
    "nf_resnet26": partial(of_timm, "nf_resnet26"),
    "mobilevit_xxs": partial(of_timm, "mobilevit_xxs"),
    "swin_tiny": partial(of_timm, "swin_tiny_patch4_window7_224"),
    "xcit_nano": partial(of_timm, "xcit_nano_12_p16_224"),
    "eva02_tiny": partial(of_timm, "eva02_tiny_patch14_224"),
    "mobilenetv3_small": partial(of_timm, "mobilenetv3_small_100"),
    "resnet18": partial(of_timm, "resnet18"),
    "U-Net": lambda: _pixels(UNet(), _of_pixels),
    "torchvision lraspp": _lraspp,
    "T5": _t5,
}


def drawn(seed: int) -> Iterator[str]:
    """Names of timm's models, one of each family, in random order."""
    timm, draws = import_module("timm"), random.Random(seed)
    families = timm.list_modules()
    for family in draws.sample(families, len(families)):
        names = timm.list_models(module=family)
        if names:
            yield draws.choice(names)


def small(name: str) -> bool:
    """True if the model has few parameters; it is not allocated."""
    with torch.device("meta"):
        try:
            model = import_module("timm").create_model(name, num_classes=10)
        except (RuntimeError, NotImplementedError):  # it computes something when it is made
            return False
    return bool(sum(value.numel() for value in model.parameters()) <= LARGEST)


def rows(seed: int = SEED, *, seconds: float = SECONDS) -> list[Row]:
    """A row for each model that was once slow; and, with the medians below, for the drawn ones."""
    try:
        names = [*itertools.islice(filter(small, drawn(seed)), DRAWN)]
    except ImportError as error:
        return [{"model": "timm", "way": str(error)}]
    slow = compared(ONCE_SLOW, seconds)
    return slow + with_medians(compared({name: partial(of_timm, name) for name in names}, seconds))


if __name__ == "__main__":
    print_table(rows(int(sys.argv[1]) if sys.argv[1:] else SEED))
