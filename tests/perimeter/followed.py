"""Follows private values through a run: which functions of Discreet ever hold one, and where one
leaves PyTorch.

A dispatch mode marks the storage of each tensor that is computed from a marked one, and the NumPy
array of a marked tensor is a `PrivateArray`, as is what NumPy's functions make of it. What a noise
mechanism returns is not marked: it may be released. Python numbers and bytes bear no mark, so each
way out of PyTorch is noted instead.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, wraps
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import discreet
from discreet.node import client as node_client
from discreet.privacy import grid, rounded_sums
from discreet.privacy.correlated_gaussian import CorrelatedGaussian
from discreet.privacy.grid import nearest_steps
from discreet.privacy.mechanisms import Gaussian, Laplace

PACKAGE = Path(discreet.__file__).parent
NUMBER = "aten::_local_scalar_dense"
# Results that have the shape of their argument alone.
SHAPES = {f"aten::{name}_like" for name in ("empty", "zeros", "ones", "full", "rand", "randn")}
SHAPES |= {f"aten::new_{name}" for name in ("empty", "zeros", "ones", "full", "empty_strided")}
# What adds noise: its result is what a ledger pays for.
NOISE: tuple[tuple[Any, str], ...] = (
    (Gaussian, "add_noise"),
    (Gaussian, "add_grid_noise"),
    (Laplace, "add_noise"),
    (Laplace, "add_grid_noise"),
    (CorrelatedGaussian, "add_grid_noise"),
    (node_client, "noised_vector"),
)
Place = tuple[str, str]  # a file of discreet/, and a function in it


@dataclass
class Followed:
    """What was seen.

    Attributes:
      held: the functions that had a private value, each with the stack at the first time.
      left: the functions in which one left PyTorch, by the way that it took.
    """

    marks: dict[int, StorageWeakRef] = field(default_factory=dict)
    held: dict[Place, str] = field(default_factory=dict)
    left: dict[tuple[str, Place], str] = field(default_factory=dict)

    def mark(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        self.marks[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]

    def unmark(self, tensor: Tensor) -> None:
        self.marks.pop(tensor.untyped_storage()._cdata, None)

    def is_private(self, tensor: Tensor) -> bool:
        try:
            found = self.marks.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # a tensor without storage
            return False
        return found is not None and not found.expired()  # type: ignore[no-untyped-call]

    def note_held(self) -> None:
        place = _place()
        if place and place not in self.held:  # a stack takes longer than all else
            self.held[place] = _stack()

    def note_left(self, way: str) -> None:
        place = _place()
        if place and (way, place) not in self.left:
            self.left[way, place] = _stack()


class Marks(TorchDispatchMode):
    """Marks each result of an operation on a marked tensor."""

    def __init__(self, followed: Followed) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.followed = followed

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given, _ = tree_flatten((args, kwargs or {}))
        is_private = any(self.followed.is_private(each) for each in given if _is_tensor(each))
        result = func(*args, **(kwargs or {}))
        if not is_private or func._schema.name in SHAPES:
            return result
        self.followed.note_held()
        if func._schema.name == NUMBER:
            self.followed.note_left("item")
        written = [
            value
            for value, argument in zip(args, func._schema.arguments, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        for each in tree_flatten((result, written))[0]:
            if _is_tensor(each):
                self.followed.mark(each)
        return result


class PrivateArray(np.ndarray[Any, Any]):
    """An array that was a private tensor, or that was computed from one."""

    followed: Followed

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        self.followed.note_held()
        if "out" in options:
            options["out"] = tuple(_plain(each) for each in options["out"])
        given = [_plain(each) for each in inputs]
        return self._private(getattr(ufunc, method)(*given, **options))

    def __getitem__(self, key: Any) -> Any:
        return self._private(super().__getitem__(key))

    def _private(self, result: Any) -> Any:
        if isinstance(result, tuple):
            return tuple(self._private(each) for each in result)
        if isinstance(result, np.ndarray):
            return result.view(PrivateArray)
        self.followed.note_left("item")
        return result


def _plain(value: Any) -> Any:
    return value.view(np.ndarray) if isinstance(value, PrivateArray) else value


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def _place() -> Place | None:
    """The innermost function of discreet/ that runs now."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        if file := _of_discreet(frame.f_code.co_filename):
            return file, frame.f_code.co_qualname.partition(".<locals>")[0]
        frame = frame.f_back
    return None


@cache
def _of_discreet(file: str) -> str:
    """The path of a file below discreet/; empty if it is not there."""
    path = Path(file)
    return str(path.relative_to(PACKAGE)) if path.is_relative_to(PACKAGE) else ""


def _stack() -> str:
    return "".join(traceback.format_stack(limit=40)[:-3])


@contextmanager
def followed_from(*tensors: Tensor) -> Iterator[Followed]:
    """A context in which everything that follows from `tensors` is private until it is noised.
    One rounded value in ten is looked at again, down to decimals, in place of one in thousands."""
    seen = Followed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounded_sums, "FAST_ERROR", 0.002)
        patch.setattr(rounded_sums, "SECOND_ERROR", 1.0)
        patch.setattr(PrivateArray, "followed", seen, raising=False)
        patch.setattr(torch, "from_numpy", _marking(torch.from_numpy, seen))
        patch.setattr(rounded_sums, "nearest_steps", _in_decimals)
        for owner, name in NOISE:
            patch.setattr(owner, name, _noising(getattr(owner, name), seen))
        for way in ("numpy", "tolist", "__array__"):
            patch.setattr(Tensor, way, _noted(getattr(Tensor, way), way, seen))
        for each in tensors:
            seen.mark(each)
        with Marks(seen):
            yield seen


def _in_decimals(*args: Any, **kwargs: Any) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "ERROR", 1.0)
        return nearest_steps(*args, **kwargs)


def _noising(add: Callable[..., Tensor], seen: Followed) -> Callable[..., Tensor]:
    @wraps(add)
    def noised(*args: Any, **kwargs: Any) -> Tensor:
        result = add(*args, **kwargs)
        seen.unmark(result)
        return result

    return noised


def _noted(method: Callable[..., Any], way: str, seen: Followed) -> Callable[..., Any]:
    @wraps(method)
    def called(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        if not seen.is_private(self):
            return result
        seen.note_left(way)
        return result.view(PrivateArray) if isinstance(result, np.ndarray) else result

    return called


def _marking(from_numpy: Callable[..., Tensor], seen: Followed) -> Callable[..., Tensor]:
    def marked(array: Any) -> Tensor:
        tensor = from_numpy(_plain(array))
        if isinstance(array, PrivateArray):
            seen.mark(tensor)
        return tensor

    return marked
