"""A call of a function of PyTorch on tensors of which something is known."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from discreet.per_example.functions import DRAWING
from discreet.per_example.layouts import BY_PLACE, CONSTANT, PLACES, Count, Layout, Mixed, Tag, Unserved, leaves
from discreet.per_example.terms import Slot, Tape, Term

Names = Sequence[object]
# Types of arguments in which there is no tensor and no number of examples.
_PLAIN = frozenset((int, float, bool, str, type(None), torch.dtype, torch.device))


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

    def reshaped(self, shape: torch.Size) -> Weight:
        """The same value with dimensions of size 1 left out; `shape`: with them."""
        return Weight(None, lambda grads: self.terms(grads.reshape(len(grads), *shape)), self.roots)


class Watcher(Protocol):
    """The keeper of what is known of the tensors of a pass: see `watch.Watch`."""

    tape: Tape
    count: int
    lengths: dict[int, Any]
    settled: Collection[Any]
    questions: int

    def tag(self, value: Tensor) -> Any: ...
    def give(self, value: Tensor, tag: Any) -> Tensor: ...
    def copies(self, value: Tensor, weight: Weight, *, place: int = -1) -> Tensor: ...
    def results(self, result: Any, tags: Any) -> Any: ...
    def joined(self, kinds: Sequence[Any]) -> Any: ...


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

    def __init__(self, watch: Watcher, func: Any, name: str, args: tuple[Any, ...], named: dict[str, Any]) -> None:
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
    def tape(self) -> Tape:
        return self.watch.tape

    @property
    def count(self) -> int:
        return self.watch.count

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

    def note(self, outputs: Tensor, terms: Callable[[Tensor], list[Term]], *weights: Weight | None) -> None:
        """Notes a use of parameters, if there is something to be trained and the loss can reach it."""
        if any(weight is not None for weight in weights) and outputs.requires_grad:
            self.tape.add(outputs, terms)

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
