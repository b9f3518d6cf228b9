"""Hooks that see gradients. In a pass over several examples one would see those of all, and one of
a parameter none: with them each example runs by itself."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


def gradient_hooks(modules: Iterable[nn.Module], parameters: Iterable[Tensor]) -> str:
    """A message that names the first such hook of modules or parameters, or ""."""
    everywhere = nn.modules.module
    if everywhere._global_backward_hooks or everywhere._global_backward_pre_hooks:
        return "a backward hook of all modules"
    for module in modules:
        if module._backward_hooks or module._backward_pre_hooks:
            return f"a backward hook of {type(module).__name__}"
    if any(value._backward_hooks for value in parameters):
        return "a hook on a parameter's gradient"
    return ""
