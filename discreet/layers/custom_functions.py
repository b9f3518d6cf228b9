"""Functions with a derivative of their own (`torch.autograd.Function`) that vmap can't follow: they
run on one example after the other, within a pass that has all else side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.overrides import handle_torch_function, has_torch_function

from discreet.layers.alone import Alone, Rule
from discreet.layers.lanes import all_of, is_lane
from discreet.layers.refusals import Unserved, place


def applied(function: Callable[..., Any], *args: Any) -> Any:
    """function(*args). A rule treats it as one function."""
    if has_torch_function(args):
        return handle_torch_function(applied, args, function, *args)
    return function(*args)


@contextmanager
def seen() -> Iterator[None]:
    """A context in which a mode sees calls of functions that vmap can't follow."""
    before = vars(Function)["apply"]

    def apply(cls: Any, *args: Any, **named: Any) -> Any:
        own = partial(before.__func__, cls)
        if named or cls.generate_vmap_rule or cls.vmap is not Function.vmap:
            return own(*args, **named)
        return applied(own, *args)

    Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        Function.apply = before  # type: ignore[method-assign]


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


CUSTOM_RULES: dict[str, Rule] = {"applied": _one_by_one}
