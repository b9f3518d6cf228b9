"""Calls of functions of PyTorch on tensors of which something is known, as a `TorchFunctionMode` sees them; and what
functions do, by their names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from discreet.per_example.layouts import BY_PLACE, CONSTANT, PLACES, Count, Layout, Mixed, Tag, Unserved, leaves
from discreet.per_example.terms import Slot, Term


def words(names: str) -> set[str]:
    return set(names.split())


SIZES = words("shape size numel nelement")
FACTS = words(
    "dim ndimension is_floating_point is_complex is_contiguous stride element_size get_device is_signed storage_offset "
    "data_ptr is_inference is_tensor type has_names repr format hash"
)
BANNED = words(
    "register_hook register_post_accumulate_grad_hook backward grad retain_grad grad_fn set_ resize_ __set__"
)
READS = words("__bool__ __int__ __float__ __complex__ __index__ item tolist is_nonzero")
WHOLE = words("all any sum mean max min amax amin count_nonzero")
COMPARED = words("eq ne lt le gt ge logical_not logical_and logical_or and or invert not neg abs add sub mul to")
FILLED = words("zeros ones full empty new_zeros new_ones new_full new_empty rand randn")
COPYING = words("expand repeat expand_as broadcast_to tile")
LIKE = words("view_as reshape_as expand_as")  # take the shape of another tensor
VIEWS = words("T mT H mH data real")  # attributes that are tensors
SHAPING = COPYING | words("view reshape unflatten narrow split chunk")  # may be given a size that counts examples
# The layout of what they give follows from the layouts, shapes and plain arguments that they are given, and no data.
BY_SHAPE = words(
    "add sub mul div truediv pow rsqrt exp tanh sigmoid relu gelu silu linear addmm matmul bmm embedding layer_norm "
    "softmax log_softmax dropout scaled_dot_product_attention transpose permute unsqueeze squeeze contiguous view "
    "reshape flatten expand mean to"
)
PYTHON = {"embedding_bag", "lstm_layer"}  # functions with rules that are written in Python
_ALIASES = {"radd": "add", "rmul": "mul", "iadd": "add_", "isub": "sub_", "imul": "mul_", "itruediv": "div_"}
_DRAWN = ("bernoulli", "rand", "randn", "rand_like", "randn_like", "uniform", "normal", "exponential")
DROPPING = {"dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "dropout_"}
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
FILLING = {name + end for name in _DRAWN for end in ("", "_")}
DRAWING = FILLING | DROPPING | {"scaled_dot_product_attention"}  # functions that may draw random numbers
# Of a PyTorch that has it: calls a function that is written in Python under the mode that asks.
redispatch = getattr(torch.overrides, "redispatch_function", None)


def name_of(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        return str(func.__self__.__name__)
    if name == "__set__":
        return name
    if name in READS:
        return name
    bare = name.strip("_") + ("_" if name.endswith("_") and not name.startswith("__") else "")
    return _ALIASES.get(bare, bare)


@dataclass(frozen=True, slots=True)
class Function:
    """A function of PyTorch, and how it is watched.

    Attributes:
      name: without the mark of one that writes.
      writes: True if it changes its first argument.
      is_python: True if it is written in Python, so that what it calls can be watched.
      is_fact: True if it tells nothing of values.
      is_special: True if it reads values, or fills a new tensor.
      may_have_rule: False for a function in Python that calls the one that a rule is for.
      is_by_shape: True if it is one of BY_SHAPE.
    """

    name: str
    writes: bool
    is_python: bool
    is_banned: bool
    is_fact: bool
    is_special: bool
    may_have_rule: bool
    is_by_shape: bool


@lru_cache(maxsize=4096)
def function_of(func: Any) -> Function:
    """A function of PyTorch as a `TorchFunctionMode` is given it."""
    full, is_python = name_of(func), type(func) is FunctionType
    name = full if full.startswith("__") else full.rstrip("_")
    is_fact = name in FACTS or name in SIZES or (getattr(func, "__name__", "") == "__get__" and name not in VIEWS)
    special = name in READS or name in FILLED or name in WHOLE
    writes, ruled = full != name or name == "setitem", is_python == (name in PYTHON)
    by_shape = name in BY_SHAPE and not writes and not is_fact
    return Function(name, writes, is_python, full in BANNED, is_fact, special, ruled, by_shape)


def called_inside(mode: Any, func: Any, types: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Calls a function of PyTorch that is written in Python, with a mode on for what it calls. `mode.inner` is the
    function meanwhile, so that the mode takes it for one that is not written in Python if it calls itself."""
    assert redispatch is not None
    before, mode.inner = mode.inner, func
    try:
        with mode:
            return redispatch(func, types, args, named)
    finally:
        mode.inner = before


Names = Sequence[object]
# Types of arguments in which there is no tensor and no number of examples.
_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))


def signature(watch: Any, func: Any, args: Sequence[Any], named: dict[str, Any]) -> tuple[Any, ...] | None:
    """All that the layout of the result follows from, for a function of BY_SHAPE; None if a parameter takes part, or
    something that is not known to keep examples apart."""
    function = function_of(func)
    if not function.is_by_shape or (function.name == "view" and not args[0].is_contiguous()):
        return None
    found: list[Any] = [func, watch.count, *named]
    for value in (*args, *named.values()) if named else args:
        kind = type(value)
        if isinstance(value, Tensor):
            tag = watch.tag(value)
            if type(tag) is Layout:
                found += (tag.dim, tag.before, tag.after, tag.drawn, value.shape)
            elif tag is CONSTANT:
                found += (tag, value.shape)
            else:
                return None
        elif kind in _PLAIN:
            found += (kind, value)
        else:
            for each in value if kind in (tuple, torch.Size) else (value,):
                if type(each) not in (int, Count):
                    return None
                found += (type(each), each.times if type(each) is Count else each)
            found.append(kind)
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Weight:
    """A value that follows from trainable parameters alone.

    Attributes:
      slot: of a parameter itself, None for what is computed from parameters.
      terms: of the parameters, from the gradient of each example by the value, (n, *shape).
      roots: the parameters.
    """

    slot: Slot | None
    terms: Callable[[Tensor], list[Term]]
    roots: tuple[Tensor, ...]


class Call:
    """A call of a function.

    Attributes:
      name: of the function, without the mark of one that writes.
      tensors: those among its arguments, in their order.
      tags: the knowledge of each tensor.
      of_examples: True if one of them follows from the examples, as far as is known.
      is_known: True if everything that it reads is of the examples, or a constant, or a parameter.
      has_weight: True if one follows from parameters alone.
      places: identities of the tensors that are the numbers of the examples, in order.
      counted: True if an argument counts examples.
      drawn: True if there are random numbers in what it gives.
      result: what it gave, once it ran.
    """

    __slots__ = (
        "args", "counted", "drawn", "func", "has_weight", "is_known", "name", "named", "of_examples", "places",
        "result", "tags", "tensors", "watch",
    )  # fmt: skip

    def __init__(self, watch: Any, func: Any, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.watch, self.func, self.name, self.args, self.named = watch, func, name, args, named
        self.result: Any = None
        self.tensors: list[Tensor] = []
        self.tags: list[Any] = []
        self.places: list[int] = []
        self.of_examples, self.is_known, self.has_weight, self.counted = False, True, False, False
        self.drawn = name in DRAWING
        for value in (*args, *named.values()) if named else args:
            if isinstance(value, Tensor):
                self._add(value)
            elif type(value) not in _PLAIN:
                for each in leaves(value):
                    if isinstance(each, Tensor):
                        self._add(each)
                    elif type(each) is Count:
                        self.counted = True

    def _add(self, value: Tensor) -> None:
        tag = self.watch.tag(value)
        self.tensors.append(value)
        self.tags.append(tag)
        if type(tag) is Layout:
            self.of_examples, self.drawn = True, self.drawn or tag.drawn
        elif type(tag) is Weight:
            self.has_weight = True
        elif tag is not CONSTANT:
            self.of_examples, self.is_known, self.drawn = True, False, self.drawn or getattr(tag, "drawn", False)
            if tag is PLACES:
                self.places.append(id(value))

    @property
    def count(self) -> int:
        count: int = self.watch.count
        return count

    def argument(self, place: int, *names: str, default: Any = None) -> Any:
        """An argument by its place or by one of its names."""
        if len(self.args) > place:
            return self.args[place]
        return next((self.named[name] for name in names if name in self.named), default)

    def dims(self, wide: int, place: int, *names: str, default: Any = None) -> list[int]:
        """Dimensions of a tensor of `wide` of them."""
        given = self.args[place:] if self.name in ("flip", "count_nonzero") else self.args[place : place + 1]
        found = list(leaves(given or self.argument(place, *(names or ("dim",)), default=default)))
        if not all(isinstance(dim, int) and not isinstance(dim, bool) for dim in found):
            raise Unserved(f"{self.name} without dimensions that are numbers")
        return [dim % max(wide, 1) for dim in found]

    def layout(self, value: Any) -> Layout | None:
        """The layout of a tensor of the examples, None for another value."""
        tag = self.watch.tag(value) if isinstance(value, Tensor) else None
        return tag if type(tag) is Layout else None

    def weight(self, value: Any) -> Weight | None:
        """The knowledge of a trainable parameter, or of what is computed from parameters; None for another value."""
        tag = self.watch.tag(value) if isinstance(value, Tensor) else None
        return tag if type(tag) is Weight else None

    @property
    def one(self) -> tuple[Tensor, Layout]:
        """The first tensor, if it alone follows from the examples."""
        first, *others = self.tensors
        layout = self.layout(first)
        if layout is None or any(self.layout(value) is not None for value in others):
            raise Unserved(f"{self.name} of several tensors")
        return first, layout

    def run(self) -> Any:
        """Calls the function, and keeps what it gives."""
        self.result = self.func(*self.args, **self.named)
        return self.result

    def watched(self, function: Callable[..., Tensor], *args: Any) -> Ruled:
        """What other functions make of the arguments, which are watched in the place of this one."""
        with self.watch:
            result = function(*args)
        return result, self.watch.tag(result)

    def note(self, outputs: Tensor, terms: Callable[[Tensor], list[Term]], *weights: Weight | None) -> None:
        """Notes a use of parameters, if there is something to be trained and the loss can reach it."""
        if any(weight is not None for weight in weights) and outputs.requires_grad:
            self.watch.note(outputs, terms)

    def mixes(self, why: str = "works along the examples") -> Mixed:
        return Mixed(f"{self.name} {why}", surely=True)

    def follows(self, parts: Sequence[tuple[Tensor, Names]], result: Names) -> Tag:
        """The layout of the result, by the names of the dimensions of each tensor and of the result."""
        layouts = [self.layout(part) for part, _ in parts]
        found = {
            (names[layout.dim], layout.before, layout.after)
            for layout, (_, names) in zip(layouts, parts, strict=True)
            if layout is not None
        }
        if len(found) != 1:
            return self.mixes("pairs examples with each other")
        ((name, before, after),) = found
        for layout, (part, names) in zip(layouts, parts, strict=True):
            spots = [spot for spot, each in enumerate(names) if each == name]
            if len(spots) > 1 or (spots and layout is None and part.shape[spots[0]] != 1):
                return self.mixes(BY_PLACE)
        return Layout(list(result).index(name), before, after) if name in result else self.mixes()


Ruled = tuple[Any, Any]  # the result, and what is known of it
Rule = Callable[[Call], Ruled]
