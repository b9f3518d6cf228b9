"""A metric of one's own, `package.module:function`, as values of examples."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from discreet.models.models import MISTAKES, own_builder
from discreet.per_example.memory import Memory
from discreet.queries.answers import Answer

SETTING = "evaluation.metrics"

logger = logging.getLogger("discreet")

_TOLD = set[tuple[str, str]]()  # the metrics that have failed, with the errors


def own_metric(name: str) -> Answer:
    """Values of examples, (n,), by the function `package.module:function` of one's own. It is given
    outputs and targets of one example at a time, each with a first dimension of 1, so that no other
    example moves its value, which is clamped to 0..1; NaN, and an error, count as 0."""
    function = cast("Callable[[Tensor, Tensor], Any]", own_builder(name, setting=SETTING))
    memory = Memory((), function)

    def value(output: Tensor, target: Tensor) -> float:
        try:
            found = float(function(output, target))
        except MISTAKES as error:
            kind = type(error).__name__
            if (name, kind) not in _TOLD:
                _TOLD.add((name, kind))
                said = f"failed with {kind}, which counts as 0 and is told once"
                logger.warning("%s: %s %s: %s", SETTING, name, said, error)
            found = math.nan
        memory.restore()  # what it keeps of an example reaches no other
        return 0.0 if math.isnan(found) else min(1.0, max(0.0, found))

    def values(outputs: Tensor, targets: Tensor) -> Tensor:
        rows = range(len(targets))
        # Copies: a view would lead to all other rows.
        each = [value(outputs[[row]], targets[[row]]) for row in rows]
        return torch.tensor(each, dtype=torch.float64)

    return values
