"""Gradient checkpointing, which is undone: what it would compute again in the backward pass, vmap
could not follow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint


class _Plain:
    """In the place of the function that computes again."""

    @staticmethod
    def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
        return function(*args)


def _nothing(*_: Any, **__: Any) -> Iterator[None]:
    yield


_REPLACED: dict[str, Any] = {
    "CheckpointFunction": _Plain,
    "_checkpoint_without_reentrant_generator": _nothing,
}


@contextmanager
def undone() -> Iterator[None]:
    """Within it `torch.utils.checkpoint.checkpoint` calls its function, and no more."""
    before = {name: vars(checkpoint)[name] for name in _REPLACED if name in vars(checkpoint)}
    vars(checkpoint).update((name, _REPLACED[name]) for name in before)
    try:
        yield
    finally:
        vars(checkpoint).update(before)
