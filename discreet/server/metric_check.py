"""Metrics of one's own, tried on made-up examples before a run starts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from discreet.data.examples import TaskShape
from discreet.data.targets import CLASSES, NUMBERS, SEQUENCES
from discreet.models.models import MISTAKES, own_builder
from discreet.queries.own_metric import SETTING
from discreet.settings.data import own_metrics
from discreet.settings.rules import ConfigError

ROWS = 4  # made-up examples

logger = logging.getLogger("discreet")


def check_metrics(names: Sequence[str], shape: TaskShape) -> None:
    """Tries the metrics of one's own, and warns of one whose values are clamped. Raises ConfigError
    for one that fails on all made-up examples, and ValueError if there is none of its name."""
    outputs, targets = _made_up(shape)
    for name in own_metrics(names):
        metric = own_builder(name, setting=SETTING)
        parts = zip(torch.split(outputs, 1), torch.split(targets, 1), strict=True)
        tried = [_tried(metric, *each) for each in parts]
        values = [each for each in tried if isinstance(each, float)]
        if not values:
            raise ConfigError(
                f"{SETTING}: {name} {tried[0]}. It is called with the outputs "
                f"{tuple(outputs[:1].shape)} and targets {tuple(targets[:1].shape)} of one example "
                "at a time, here of a made-up one, and must return a number in 0..1"
            )
        outside = [value for value in values if value < 0 or value > 1]
        if outside:
            wrong = f"gave {outside[0]:g} for a made-up example"
            logger.warning("%s: %s %s: all values are clamped to 0..1", SETTING, name, wrong)


def _tried(metric: Callable[..., object], output: Tensor, target: Tensor) -> float | str:
    """The value of an example, or what is wrong with the metric."""
    try:
        value: Any = metric(output, target)
    except MISTAKES as error:
        return f"fails with {type(error).__name__}: {error}"
    try:
        return float(value)
    except MISTAKES:
        return f"gives {type(value).__name__}, which is not one number"


def _made_up(shape: TaskShape) -> tuple[Tensor, Tensor]:
    """Outputs and targets of `ROWS` examples, of which every other one is predicted well."""
    each = torch.Size((ROWS, *shape.output_shape))
    outputs = torch.linspace(-1.0, 1.0, each.numel()).reshape(each)
    kind = shape.target.kind
    if kind in (CLASSES, SEQUENCES):
        targets = outputs.argmax(dim=1)
    elif kind == NUMBERS:
        targets = outputs.clone()
    else:  # labels, or the intervals of survival
        targets = (outputs >= 0).float()
    targets[::2] = 0
    return outputs, targets
