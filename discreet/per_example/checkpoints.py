"""Disables what vmap can't follow or what would cost too much: gradient checkpointing, which
computes again in the backward pass; torch.compile, which would compile anew for each pass; and the
hooks by which a FLOP counter follows modules."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn.modules import module
from torch.utils import checkpoint
from torch.utils.module_tracker import ModuleTracker


class _Plain:
    """A replacement for the autograd function that recomputes."""

    @staticmethod
    def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        return function(*args)


def _nothing(*_: Any, **__: Any) -> Iterator[None]:
    yield


_REPLACED: dict[str, Any] = {
    "CheckpointFunction": _Plain,
    "_checkpoint_without_reentrant_generator": _nothing,
    "_checkpoint_without_reentrant_generator_impl": _nothing,  # from PyTorch 2.14 on
}


_HOOKS_OF_ALL: list[Any] = [module._global_forward_hooks, module._global_forward_pre_hooks]


@contextmanager
def undone() -> Iterator[None]:
    """A context in which `torch.utils.checkpoint.checkpoint` only calls its function, what is
    compiled runs as it was written, and no `ModuleTracker` notes where it is."""
    before = {name: vars(checkpoint)[name] for name in _REPLACED if name in vars(checkpoint)}
    vars(checkpoint).update((name, _REPLACED[name]) for name in before)
    try:
        with _eager(), _untracked():
            yield
    finally:
        vars(checkpoint).update(before)


def _eager() -> AbstractContextManager[Any]:
    if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled
        found: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return found
    return nullcontext()


@contextmanager
def _untracked() -> Iterator[None]:
    kept = [(hooks, dict(hooks)) for hooks in _HOOKS_OF_ALL]
    for hooks, before in kept:
        for number, hook in before.items():
            if isinstance(getattr(hook, "__self__", None), ModuleTracker):
                del hooks[number]
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.clear()
            hooks.update(before)
