"""Values of one example under `torch.func.vmap`, and the tensors of all examples below them.

Under vmap a forward sees the value of one example. Below it is one tensor (n, ...) for all. The
public API to reach it, an `autograd.Function` with a `vmap` method, takes 240 us a call; these few
functions of functorch take 5 us.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

_functorch: Any = torch._C._functorch
_unsafe_view = torch.ops.aten._unsafe_view.default


def level() -> int:
    """The level of the innermost vmap, -1 outside."""
    return int(_functorch.maybe_current_level() or -1)


def is_lane(value: Any) -> bool:
    """True for a value of one example."""
    return isinstance(value, Tensor) and bool(_functorch.is_batchedtensor(value))


def is_lane_of(value: Any, of: int) -> bool:
    """True for a value of one example of the vmap of this level, and of no inner vmap."""
    return is_lane(value) and _functorch.maybe_get_level(value) == of


def all_of(value: Tensor) -> Tensor:
    """The tensor of all examples, (n, ...), below the value of one example."""
    dim = _functorch.maybe_get_bdim(value)
    found: Tensor = _functorch.get_unwrapped(value)
    if dim:
        return found.movedim(dim, 0)
    return found


def bare(value: Tensor) -> Tensor:
    """The tensor below all transforms of torch.func."""
    while _functorch.is_batchedtensor(value) or _functorch.is_gradtrackingtensor(value):
        value = _functorch.get_unwrapped(value)
    return value


def as_lane_like(value: Tensor, like: Tensor) -> Tensor:
    """A value of one example as the inner vmap of `like` sees it."""
    dim = _functorch.maybe_get_bdim(like)
    found: Tensor = _functorch._add_batch_dim(value, dim, _functorch.maybe_get_level(like))
    return found


def within(value: Tensor) -> Tensor:
    """The tensor below the innermost transform of torch.func that made `value`."""
    found: Tensor = _functorch.get_unwrapped(value)
    return found


def as_one_example(values: Tensor, of: int) -> Tensor:
    """A tensor of all examples (n, ...) as the value of one example, in the vmap of this level."""
    found: Tensor = _functorch._add_batch_dim(values, 0, of)
    return found


def parted(values: Tensor, count: int) -> Tensor:
    """Rows of all examples (n * k, ...) grouped by example, (n, k, ...)."""
    return values.reshape(count, -1, *values.shape[1:])


def shaped(outputs: Tensor, shape: Sequence[int]) -> Tensor:
    """New outputs of another shape, not as a view: autograd would copy the gradients of a view that
    an activation changes in place. Their own backward pass must not read them."""
    found: Tensor = _unsafe_view(outputs, shape)
    return found


class below_vmap:  # noqa: N801
    """A context in which functions work on tensors of all examples, as outside the vmap of this
    level. It is entered for each function, which is why it is no generator."""

    __slots__ = ("around", "of")

    def __init__(self, of: int) -> None:
        self.of = of
        self.around = list[Any]()

    def __enter__(self) -> None:
        while level() >= self.of:
            self.around.append(_functorch.pop_dynamic_layer_stack())

    def __exit__(self, *_: object) -> None:
        while self.around:
            _functorch.push_dynamic_layer_stack(self.around.pop())


def squeezed(value: Tensor) -> Tensor:
    """`squeeze()` that keeps the first dimension, as it would for a batch of several examples."""
    dims = tuple(dim for dim in range(1, value.dim()) if value.shape[dim] == 1)
    if dims:
        return value.squeeze(dims)
    return value


def fill(target: Tensor, mask: Tensor, value: Any) -> None:
    """Does `target[mask] = value` without counting the mask."""
    wide = mask.reshape(*mask.shape, *[1] * (target.dim() - mask.dim()))
    target.masked_fill_(wide, value)


def viewing(value: Tensor) -> Any:
    """`view`, or `reshape` if a rule has changed the memory layout that the forward expects."""
    if all_of(value).is_contiguous():
        return Tensor.view
    return Tensor.reshape


def tensors_among(values: Iterable[Any]) -> list[Tensor]:
    """The tensors of arguments, also in lists and tuples."""
    found = list[Tensor]()
    for value in values:
        if isinstance(value, Tensor):
            found.append(value)
        elif type(value) in (list, tuple):
            found += tensors_among(value)
    return found
