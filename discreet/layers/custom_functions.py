"""Functions with a derivative of their own (`torch.autograd.Function`) that vmap can't follow: they
run on one example after the other, within a pass that has all else side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import handle_torch_function, has_torch_function

from discreet.layers.alone import Alone, Rule
from discreet.layers.lanes import all_of, is_lane
from discreet.layers.refusals import Unserved, place

_LOCK = Lock()
_before = [vars(Function)["apply"]]  # as it was before the first pass entered `seen`
_inside = list[None]()  # an entry for each pass that is in it


def applied(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args). A rule treats it as one function."""
    if has_torch_function(args):
        return handle_torch_function(applied, args, function, *args)
    return function(*args)


@contextmanager
def seen() -> Iterator[None]:
    """A context in which a mode sees calls of functions that vmap can't follow. Several threads may
    be in it; the last one that leaves puts `apply` back as it was."""
    with _LOCK:
        if not _inside:
            _before[0] = vars(Function)["apply"]
        _inside.append(None)
        Function.apply = classmethod(_apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        with _LOCK:
            _inside.pop()
            if not _inside:
                Function.apply = _before[0]  # type: ignore[method-assign]


def _apply(cls: Any, *args: Any, **named: Any) -> Any:
    own = _before[0].__get__(None, cls)  # a descriptor in Python, or from PyTorch 2.15 on in C
    if named or cls.generate_vmap_rule or cls.vmap is not Function.vmap:
        return own(*args, **named)
    return applied(own, *args)


def _one_by_one(alone: Alone, function: Callable[..., Any], *args: Any) -> Any:
    copies = [alone.copied(value) for value in args]
    rows = [all_of(value) if is_lane(value) else [value] * alone.count for value in copies]
    found = [function(*example) for example in zip(*rows, strict=True)]
    if isinstance(found[0], tuple):
        return tuple(map(_stacked, zip(*found, strict=True)))
    return _stacked(found)


def _stacked(values: Any) -> Tensor:
    if not all(isinstance(value, Tensor) for value in values):
        raise Unserved(f"a function with a derivative of its own gives no tensor{place()}")
    return torch.stack(tuple(values))


RULES: dict[str, Rule] = {"applied": _one_by_one}
