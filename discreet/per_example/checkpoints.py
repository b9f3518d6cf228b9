"""Disables gradient checkpointing: vmap can't follow its recomputation in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
    """A context in which `torch.utils.checkpoint.checkpoint` only calls its function."""
    before = {name: vars(checkpoint)[name] for name in _REPLACED if name in vars(checkpoint)}
    vars(checkpoint).update((name, _REPLACED[name]) for name in before)
    try:
        yield
    finally:
        vars(checkpoint).update(before)
