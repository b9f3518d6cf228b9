"""Disables what vmap can't follow or what would cost too much: gradient checkpointing, which
computes again in the backward pass; torch.compile, which would compile anew for each pass; and the
hooks by which a FLOP counter follows modules."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils import checkpoint, module_tracker
from torch.utils.hooks import RemovableHandle


def _call(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
    return function(*args)


def _nothing(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _no_hook(*_: Any) -> RemovableHandle:
    return RemovableHandle(OrderedDict())


_REPLACED: list[tuple[Any, str, Any]] = [
    (checkpoint, "CheckpointFunction", SimpleNamespace(apply=_call)),
    (checkpoint, "_checkpoint_without_reentrant_generator", _nothing),
    (checkpoint, "_checkpoint_without_reentrant_generator_impl", _nothing),  # from 2.14 on
    (module_tracker, "register_multi_grad_hook", _no_hook),
]


@contextmanager
def undone() -> Iterator[None]:
    """A context in which `torch.utils.checkpoint.checkpoint` only calls its function, what is
    compiled runs as it was written, and no `ModuleTracker` follows gradients."""
    here = [each for each in _REPLACED if each[1] in vars(each[0])]
    before = [(where, name, vars(where)[name]) for where, name, _ in here]
    _put(here)
    try:
        with _eager():
            yield
    finally:
        _put(before)


def _put(values: list[tuple[Any, str, Any]]) -> None:
    for where, name, value in values:
        setattr(where, name, value)


def _eager() -> AbstractContextManager[Any]:
    if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled
        found: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return found
    return nullcontext()
