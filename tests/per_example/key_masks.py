"""Dropout in a plain pass, with the masks that a key draws for each example."""

from __future__ import annotations

import math
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from discreet.layers.draws import Draws
from discreet.layers.functions import called_inside, function_of

KEY = bytes(range(32))
CPU = torch.device("cpu")


class Masked(TorchFunctionMode):
    """A context in which dropout over a batch takes the masks of `draws`, by PyTorch's formulas."""

    def __init__(self, draws: Draws) -> None:
        super().__init__()
        self.draws = draws
        self.inner: Any = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function_of(func).name
        if type(func) is FunctionType and func is not self.inner:
            return called_inside(self, func, types, args, kwargs or {})
        if "dropout" not in name or not args[2]:
            return func(*args, **(kwargs or {}))
        values, p = args[:2]
        dim = list(values.shape).index(len(self.draws.identities))  # some put time first
        return self.dropped(name, values.movedim(dim, 0), p).movedim(0, dim)

    def dropped(self, name: str, values: Tensor, p: float) -> Tensor:
        shape = (*values.shape[:2], *[1] * (values.dim() - 2))
        shape = shape if "feature" in name else values.shape
        each = math.prod(shape[1:])
        words = self.draws.words(-(-each // 4), CPU).numpy().view(np.int16)[:, :each]
        noise = torch.from_numpy((words < round((1 - p) * 65536) - 32768).reshape(shape)).float()
        if "alpha" not in name:
            return values * noise / (1 - p)
        a = 1 / math.sqrt((1.7580993408473766**2 * p + 1) * (1 - p))
        return values * noise * a + 1.7580993408473766 * a * ((noise - 1) + p)
