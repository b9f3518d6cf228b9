"""Calls that compute, each at least one kernel on a GPU, counted on the CPU."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

# These compute nothing: they are other views of the same memory, or new memory.
FREE = {
    "_unsafe_view",
    "alias",
    "as_strided",
    "as_strided_",
    "detach",
    "diagonal",
    "empty",
    "empty_like",
    "empty_strided",
    "expand",
    "lift_fresh",
    "new_empty",
    "new_empty_strided",
    "permute",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "squeeze",
    "squeeze_",
    "t",
    "transpose",
    "unbind",
    "unfold",
    "unsqueeze",
    "unsqueeze_",
    "view",
}
FILLS_FIRST = {"constant_pad_nd"}  # it fills, then copies


class Calls(TorchDispatchMode):
    """Counts the functions of ATen that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names = Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.names[func._schema.name.removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))

    @property
    def computing(self) -> int:
        """The number of calls that compute."""
        twice = sum(self.names[name] for name in FILLS_FIRST)
        return twice + sum(count for name, count in self.names.items() if name not in FREE)


def as_on(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the choices that the engine makes by the kind of a device."""
    if device != "cpu":
        monkeypatch.setattr("discreet.layers.terms._PROCESSOR", "none")
