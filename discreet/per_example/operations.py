"""The operations that work on each example alone, judged by their arguments, for models with a forward of their own.

A tensor of the examples has them in its first dimension, (n, ...). An operation is served if row i of its outputs
follows from row i of its inputs, whatever stands in the other rows and however many there are. That is decided by the
operation's name and its arguments, before it runs, and its outputs must have n rows. What is not listed here, or is
used in another way, is not served: `Unserved` sends the model to torch.func, in which each example goes through it
alone.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


class Unserved(Exception):
    """The computation is not known to treat each example alone."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """A tensor that does not follow from the examples: a buffer, or a frozen parameter."""

    value: Tensor


@dataclass(frozen=True, slots=True)
class Weight:
    """A trainable parameter that no layer reads, copied for each example: copies (n, ...)."""

    copies: Tensor

    def beside(self, dim: int) -> Tensor:
        """The copies as they meet tensors of the examples of `dim` dimensions in an operation on their elements."""
        own = self.copies.dim() - 1
        _require(own < dim or (own == dim and self.copies.shape[1] == 1))
        if own == dim:
            return self.copies[:, 0]
        return self.copies.reshape(len(self.copies), *[1] * (dim - 1 - own), *self.copies.shape[1:])


@dataclass(frozen=True, slots=True)
class Count:
    """A number that follows from how many examples there are. It may say how many rows a tensor has, and no more."""

    value: Any


Arguments = tuple[Any, ...]
Named = dict[str, Any]
# Raises Unserved unless the call treats each example alone. Tensors of the examples come as they are.
Check = Callable[[Arguments, Named], None]


def leaves(value: Any) -> Iterator[Any]:
    """The values in nested tuples, lists, slices and dictionaries."""
    if isinstance(value, tuple | list):
        for part in value:
            yield from leaves(part)
    elif isinstance(value, dict):
        yield from leaves(tuple(value.values()))
    elif isinstance(value, slice):
        yield from leaves((value.start, value.stop, value.step))
    else:
        yield value


def plain(value: Any) -> Any:
    """The same with the tensors and numbers that Fixed and Count hold."""
    if isinstance(value, Tensor):
        return value
    if isinstance(value, Fixed | Count):
        return value.value
    if type(value) is slice:
        return slice(plain(value.start), plain(value.stop), plain(value.step))
    if isinstance(value, tuple | list):
        return tuple(plain(part) for part in value)
    return value


def _require(wanted: bool) -> None:
    if not wanted:
        raise Unserved


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _only_first_is_a_tensor(args: Arguments, named: Named) -> Tensor:
    _require(bool(args) and isinstance(args[0], Tensor))
    _require(not any(isinstance(value, Tensor | Fixed | Weight | Count) for value in leaves((args[1:], named))))
    first: Tensor = args[0]
    return first


def elementwise(args: Arguments, named: Named) -> None:
    """Tensors of the examples of equally many dimensions; others must look the same to every example."""
    _require(named.get("out") is None)
    values = list(leaves((args, named)))
    dims = {value.dim() for value in values if isinstance(value, Tensor)}
    _require(len(dims) == 1)
    (dim,) = dims
    for value in values:
        _require(not isinstance(value, Count))
        if isinstance(value, Fixed):
            given = value.value
            _require(given.dim() < dim or (given.dim() == dim and len(given) == 1))


def _in_place(args: Arguments, named: Named) -> None:
    _require(bool(args) and isinstance(args[0], Tensor))
    elementwise(args, named)


def _choice(args: Arguments, named: Named) -> None:
    _require(len(args) == 3)  # with a condition alone, rows are the places where it holds
    elementwise(args, named)


def _alone(args: Arguments, named: Named) -> None:
    """Of one tensor; that the result has n rows says the rest."""
    _only_first_is_a_tensor(args, named)


def _view(args: Arguments, named: Named) -> None:
    """With n rows before and after, each row is made of the numbers of its own example, in their order."""
    _require(bool(args) and isinstance(args[0], Tensor))
    first, *others = leaves((args[1:], named))
    _require(isinstance(first, Count | Tensor) or first == -1)  # a literal number would be right for one n alone
    _require(all(_whole(size) for size in others))


def _expand(args: Arguments, named: Named) -> None:
    _view(args, named)
    sizes = args[1].shape if isinstance(args[1], Tensor) else args[1:]
    _require(len(list(leaves(tuple(sizes)))) == args[0].dim())


def _repeat(args: Arguments, named: Named) -> None:
    first = _only_first_is_a_tensor(args, named)
    times = list(leaves(args[1:]))
    _require(not named and len(times) == first.dim() and times[0] == 1)


def _transpose(args: Arguments, named: Named) -> None:
    first = _only_first_is_a_tensor(args, named)
    _require(not named and len(args) == 3 and all(_whole(dim) and dim % first.dim() for dim in args[1:]))


def _permute(args: Arguments, named: Named) -> None:
    first = _only_first_is_a_tensor(args, named)
    dims = list(leaves((args[1:], named)))
    _require(len(dims) == first.dim() and _whole(dims[0]) and dims[0] % first.dim() == 0)


def _not_over_examples(dims: Any, count: int) -> None:
    found = list(leaves(dims))
    _require(bool(found) and all(_whole(dim) and dim % count for dim in found))


def _along(place: int, default: int | None = None) -> Check:
    """Along dimensions that are named at this place, or by default, none of which is that of the examples."""

    def check(args: Arguments, named: Named) -> None:
        first = _only_first_is_a_tensor(args, named)
        dims = args[place] if len(args) > place else named.get("dim", named.get("dims", default))
        _not_over_examples(dims, first.dim())

    return check


def _unsqueeze(args: Arguments, named: Named) -> None:
    first = _only_first_is_a_tensor(args, named)
    _not_over_examples(args[1] if len(args) > 1 else named.get("dim"), first.dim() + 1)


def _joined(more: int) -> Check:
    """Tensors of the examples along a dimension that is not theirs; `more`: dimensions that the result has beyond."""

    def check(args: Arguments, named: Named) -> None:
        parts: Any = args[0] if args else named.get("tensors")
        _require(isinstance(parts, tuple | list) and all(isinstance(part, Tensor) for part in parts))
        _require(not named.keys() - {"tensors", "dim"} and bool(parts))
        dims = args[1] if len(args) > 1 else named.get("dim", 0)
        _not_over_examples(dims, parts[0].dim() + more)

    return check


def _over_space(args: Arguments, named: Named) -> None:
    """Over the last dimensions, at least one of which is behind that of the examples and the channels."""
    _require(_only_first_is_a_tensor(args, named).dim() >= 3)


def _pad(args: Arguments, named: Named) -> None:
    first = _only_first_is_a_tensor(args, named)
    _require(len(args) > 1 and isinstance(args[1], tuple | list) and len(args[1]) < 2 * first.dim())


def _pixels(args: Arguments, named: Named) -> None:
    _require(_only_first_is_a_tensor(args, named).dim() >= 4)


def _product(args: Arguments, named: Named) -> None:
    """A matrix product within each example, or with a matrix that is the same for all."""
    _require(len(args) == 2 and not named)
    left, right = args
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        _require(left.dim() == right.dim() >= 3)
    elif isinstance(left, Tensor):
        _require(isinstance(right, Fixed) and right.value.dim() <= 2 <= left.dim())
    else:
        _require(isinstance(left, Fixed) and isinstance(right, Tensor) and left.value.dim() <= 2 < right.dim())


def _attention(args: Arguments, named: Named) -> None:
    elementwise(args, named)
    _require(args[0].dim() >= 3 and all(isinstance(value, Tensor) for value in args[:3]))
    _require((args[4] if len(args) > 4 else named.get("dropout_p", 0.0)) == 0)


def _sum_of_products(args: Arguments, named: Named) -> None:
    """einsum with one letter for the examples, first everywhere, of tensors of the examples alone."""
    _require(not named and isinstance(args[0], str) and "->" in args[0] and "." not in args[0])
    _require(all(isinstance(value, Tensor) for value in leaves(args[1:])))
    terms = [term.strip() for term in args[0].replace("->", ",").split(",")]
    _require(all(term and term[0] == terms[0][0] and term.count(term[0]) == 1 for term in terms))


def _item(args: Arguments, named: Named) -> None:
    """All rows, and then what is taken of each."""
    value, index = args[0], args[1] if isinstance(args[1], tuple) else (args[1],)
    _require(all(part is None or part is ... or _whole(part) or isinstance(part, slice) for part in index))
    _require(all(number is None or number is ... or _whole(number) for number in leaves(index)))
    if isinstance(value, Tensor):  # not a buffer, and not one of the parts that chunk gives
        behind = sum(part is not None and part is not ... for part in index) < value.dim()
        _require(index[:1] == (slice(None),) or (index[:1] == (...,) and behind))


_ELEMENTWISE = (
    "add sub mul div true_divide truediv multiply subtract divide pow neg abs exp expm1 log log1p log2 sqrt rsqrt "
    "square reciprocal sin cos tanh sigmoid erf sign clamp clamp_min clamp_max maximum minimum lerp addcmul addcdiv "
    "eq ne lt le gt ge logical_and logical_or logical_not relu relu6 gelu silu elu selu celu leaky_relu softplus "
    "softsign hardtanh hardswish hardsigmoid logsigmoid mish tanhshrink softshrink hardshrink masked_fill "
    "contiguous clone detach float double type_as to long zeros_like ones_like"
)
_IN_PLACE = "add_ sub_ mul_ div_ relu_ tanh_ sigmoid_ clamp_ neg_ exp_ leaky_relu_ elu_ masked_fill_"
_POOLS = (
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d interpolate"
)
_ALONG_SECOND = (
    "mean sum amax amin prod var std logsumexp softmax log_softmax cumsum cumprod argmax argmin max min flip select "
    "narrow unbind"
)
_BY_NAMES: list[tuple[str, Check]] = [
    (_ELEMENTWISE, elementwise),
    (_IN_PLACE, _in_place),
    ("where", _choice),
    ("dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout", _alone),
    ("view reshape view_as reshape_as", _view),
    ("flatten", _alone),
    ("squeeze unflatten", _along(1)),
    ("unsqueeze", _unsqueeze),
    ("expand expand_as", _expand),
    ("repeat", _repeat),
    ("transpose swapaxes swapdims", _transpose),
    ("permute", _permute),
    (_ALONG_SECOND, _along(1)),
    ("norm roll repeat_interleave", _along(2)),
    ("chunk split tensor_split", _along(2, 0)),
    ("normalize", _along(2, 1)),
    ("glu", _along(1, -1)),
    ("cat concat", _joined(0)),
    ("stack", _joined(1)),
    (_POOLS, _over_space),
    ("pad", _pad),
    ("pixel_shuffle pixel_unshuffle", _pixels),
    ("matmul bmm", _product),
    ("scaled_dot_product_attention", _attention),
    ("einsum", _sum_of_products),
    ("getitem", _item),
]


def _table() -> dict[object, Check]:
    """Checks by function, as torch, torch.nn.functional and operator have them, and by the names of tensor methods."""
    found: dict[object, Check] = {}
    for names, check in _BY_NAMES:
        for name in names.split():
            homes = (torch, functional, operator)
            found |= dict.fromkeys((getattr(home, name) for home in homes if hasattr(home, name)), check)
            if hasattr(Tensor, name):
                found[name] = check
    return found


CHECKS = _table()


def with_copies(check: Check, args: Arguments) -> Arguments:
    """The arguments of an operation, some of them parameters, with tensors in their place."""
    first, *others = args
    if check is _item and isinstance(first, Weight):
        index = others[0] if isinstance(others[0], tuple) else (others[0],)
        return (first.copies, (slice(None), *index))
    if check is _expand and isinstance(first, Weight):
        return (first.beside(first.copies.dim() - 1), *others)
    _require(check is elementwise)
    dims = {value.dim() for value in args if isinstance(value, Tensor)}
    _require(len(dims) == 1)
    return tuple(value.beside(max(dims)) if isinstance(value, Weight) else value for value in args)
