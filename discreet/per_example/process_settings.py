"""Settings of the process that code of one's own may change in a pass, and modes of PyTorch that it
may enter and never leave. They would reach other examples, and end later passes in errors.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils import _device, _python_dispatch

_CPU = "cpu"
_PAIRS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (
        partial(torch.is_autocast_enabled, _CPU),
        partial(torch.set_autocast_enabled, _CPU),
    ),
    (partial(torch.get_autocast_dtype, _CPU), partial(torch.set_autocast_dtype, _CPU)),
)


class ProcessSettings:
    """Settings of Python and of PyTorch, its default device, and the modes of functions and of
    dispatch that were entered, as they are now."""

    def __init__(self) -> None:
        self._values = [read() for read, _ in _PAIRS]
        self._device = _device.CURRENT_DEVICE
        self._device_mode = _device_mode()
        self._functions = _function_modes()
        self._dispatch = _python_dispatch._get_current_dispatch_mode_stack()

    def restore(self) -> None:
        """Undoes all changes."""
        for (read, write), before in zip(_PAIRS, self._values, strict=True):
            if read() != before:
                write(before)
        if _device_mode() is not self._device_mode:
            torch._GLOBAL_DEVICE_CONTEXT.device_context = self._device_mode
        _device.CURRENT_DEVICE = self._device
        _leave(
            _function_modes(),
            self._functions,
            torch._C._pop_torch_function_stack,
            torch._C._push_on_torch_function_stack,
        )
        _leave(
            _python_dispatch._get_current_dispatch_mode_stack(),
            self._dispatch,
            _python_dispatch._pop_mode,
            _python_dispatch._push_mode,
        )


def _leave(
    entered: Sequence[Any],
    before: Sequence[Any],
    pop: Callable[[], object],
    push: Callable[[Any], object],
) -> None:
    """Makes the modes that are entered those of before. The last one is the first to be popped."""
    shared = 0
    for one, other in zip(entered, before, strict=False):
        if one is not other:
            break
        shared += 1
    for _ in entered[shared:]:
        pop()
    for mode in before[shared:]:
        push(mode)


def _device_mode() -> Any:
    """The mode of the default device; None if none was set."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


def _function_modes() -> list[Any]:
    count = torch._C._len_torch_function_stack()
    return [torch._C._get_function_stack_at(place) for place in range(count)]
