"""Functions and classes of modules that are imported by those who call them."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


def later(module: str, name: str, /, **settings: object) -> Callable[..., Any]:
    """What has this name in a module, to be called with these settings. The module is imported at
    the first call.

    >>> later("math", "hypot")(3, 4)
    5.0
    """

    def called(*given: object) -> Any:
        return getattr(import_module(module), name)(*given, **settings)

    return called
