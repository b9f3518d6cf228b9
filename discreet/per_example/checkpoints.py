"""Disables gradient checkpointing, whose recomputation in the backward pass vmap can't follow, and
torch.compile, which would compile anew for each pass."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils import checkpoint


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


@contextmanager
def undone() -> Iterator[None]:
    """A context in which `torch.utils.checkpoint.checkpoint` only calls its function, and what is
    compiled runs as it was written."""
    before = {name: vars(checkpoint)[name] for name in _REPLACED if name in vars(checkpoint)}
    vars(checkpoint).update((name, _REPLACED[name]) for name in before)
    try:
        with _eager():
            yield
    finally:
        vars(checkpoint).update(before)


def _eager() -> AbstractContextManager[Any]:
    if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled
        found: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
        return found
    return nullcontext()
