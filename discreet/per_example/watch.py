"""A forward that is run as it is, and watched: each operation that it calls on something of the examples is checked.

The model is called once on the whole batch, under a `TorchFunctionMode`, which sees every function and method of
PyTorch with its real arguments. Each tensor of the examples has a layout (`layouts.py`), and each operation says what
layout its result has, or that it mixes examples. Functions that read trainable parameters note on a tape what gives the
parameter's part of each example's gradient (`weights.py`). So asserts, shapes, tuples, loops over positions and layers
inside layers are PyTorch's own business, and nothing is traced.

What is known of a value:

- a `Layout`: it follows from the examples, each entry from its own example;
- `CONSTANT`: it follows from no example and no trainable parameter; or a `Weight`: from parameters alone;
- `PLACES`: the numbers of the examples, 0 to n - 1, which may only pick something in each example;
- `Answers`: a number for each example, such as `mask.all()` gives for each alone. A branch on it asks for examples that
  answer alike: `Split` says which do. Which examples run together moves the places at which dropout draws for them, as
  a missing example does, and never what they draw: no branch may read what was drawn;
- `Mixed`: it may mix examples. That is an error only if the loss needs it.

What no check sees is refused: tensors that come from elsewhere, hooks on tensors, functions with a derivative of their
own. What a forward makes of the number of examples as a plain Python number, as `len` gives it, is not seen here; the
trial on made-up examples, against each of them alone, is for that (`per_example.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from types import FunctionType
from typing import Any, cast
from weakref import ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from discreet.per_example.functions import (
    BANNED,
    COMPARED,
    COPYING,
    DRAWING,
    FACTS,
    FILLED,
    PYTHON,
    READS,
    RECURRENT,
    SHAPING,
    SIZES,
    WHOLE,
    called_inside,
    name_of,
    redispatch,
)
from discreet.per_example.layouts import CONSTANT, FIRST, Count, Layout, Mixed, Unserved, leaves, place
from discreet.per_example.norms import NORM_RULES
from discreet.per_example.operations import CHECKS, Call, picked
from discreet.per_example.recurrent import RECURRENT_RULES
from discreet.per_example.terms import Rows, Tape, Term
from discreet.per_example.trial import tensors_of, writes
from discreet.per_example.weights import WEIGHT_RULES, Operation, Weight, with_copies

RULES = {**WEIGHT_RULES, **NORM_RULES, **RECURRENT_RULES}

PLACES, UNSEEN = "places", "unseen"
_OF_MODULES = frozenset(nn.Module().__dict__)


@dataclass(frozen=True, slots=True)
class Answers:
    """One value for each example, (n,), of which a forward wants a single one. `drawn`: random numbers are in it."""

    values: Tensor
    drawn: bool


class MixesExamples(ValueError):
    """A forward that mixes examples."""


class Split(Exception):
    """Examples answer differently to a question of the forward: `answers`, (n,), are to be run apart."""

    def __init__(self, answers: Tensor, where: str) -> None:
        super().__init__(where)
        self.answers, self.where = answers, where


class Watch(TorchFunctionMode):
    """Watches one forward pass of a model over the `tape.count` examples of a batch."""

    def __init__(self, tape: Tape, model: nn.Module) -> None:
        super().__init__()
        self.tape, self.count = tape, tape.count
        self.inner: Any = None
        self.token = object()  # tags outlive a pass on the tensors of the caller
        self.read: list[tuple[ref[Tensor], int]] = []
        self.known: dict[int, Any] = {}
        self.model, self.modules = model, list(model.modules())
        self.held = self._state()
        for module in self.modules:
            own = (value for name, value in module.__dict__.items() if name not in _OF_MODULES)
            for held in (*own, *module._parameters.values(), *module._buffers.values()):
                for value in (held,) if isinstance(held, Tensor) else held if isinstance(held, list | tuple) else ():
                    if isinstance(value, Tensor):
                        self.known[id(value)] = self._own(value)

    def _own(self, value: Tensor) -> Any:
        slot = self.tape.slot(value)
        return CONSTANT if slot is None else Weight(slot, lambda grads: [Rows(slot, grads)], (value,))

    def _state(self) -> list[tuple[Tensor, int]]:
        """The parameters and buffers of the model, and how often each was written."""
        groups = (group for module in self.modules for group in (module._parameters, module._buffers))
        return [(value, value._version) for group in groups for value in group.values() if value is not None]

    def _name(self, is_it: Callable[[Tensor], bool]) -> str:
        named = tensors_of(self.model).items()
        return next((name for name, value in named if is_it(value)), "its parameters or buffers")

    def tag(self, value: Tensor) -> Any:
        """The knowledge of a tensor: see above."""
        own = value.__dict__.get("_discreet")
        if own is not None and own[0] is self.token:
            return own[1]
        return self.known.get(id(value), UNSEEN)

    def give(self, value: Tensor, tag: Any) -> Tensor:
        """Notes what is known of a tensor."""
        value.__dict__["_discreet"] = (self.token, tag)
        return value

    def rows(self, inputs: Any) -> None:
        """Notes that tensors have the examples in their first dimension."""
        for value in tree_leaves(inputs):
            if isinstance(value, Tensor):
                self.give(value, FIRST)
                self.read.append((ref(value), value._version))

    def check(self, outputs: Tensor) -> None:
        """Raises Unserved or ValueError unless a result, (n, ...), follows example by example.

        Raises:
          ValueError: it is known that the forward mixes examples; the message names the call.
        """
        now, before = self._state(), {(id(value), version) for value, version in self.held}
        if len(now) != len(self.held) or any((id(value), version) not in before for value, version in now):
            raise ValueError(writes(self._name(lambda value: (id(value), value._version) not in before)))
        tag = self.tag(outputs)
        if isinstance(tag, Mixed):
            raise refusal(tag)
        if tag != FIRST or len(outputs) != self.count:
            raise Unserved("the outputs do not have the examples first")
        if any(value._version != version for held, version in self.read if (value := held()) is not None):
            raise Unserved("a tensor that a layer has read is overwritten")
        _only_known_derivatives(outputs)

    def __torch_function__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named, name = kwargs or {}, name_of(func)
        if name in BANNED or named.get("out") is not None:
            raise Unserved(f"{name}{place()}")
        flat = leaves((args, named))
        given, counted = [value for value in flat if isinstance(value, Tensor)], any(type(v) is Count for v in flat)
        ran = Operation(self, func, name, args, named, given, [self.tag(value) for value in given], counted)
        is_python = type(func) is FunctionType and func is not self.inner
        if not any(isinstance(tag, Layout | Answers | Mixed) or tag is PLACES for tag in ran.tags):
            return self._composite(func, types, ran) if is_python else self._constant(ran)
        if name in SIZES and isinstance(ran.tags[0], Layout):
            return self._size(ran, ran.tags[0])
        if name in FACTS or name in SIZES or (getattr(func, "__name__", "") == "__get__" and name not in CHECKS):
            return func(*args, **named)
        if name in RULES and is_python == (name in PYTHON) and ran.is_known:
            return self._ruled(ran)
        return self._composite(func, types, ran) if is_python else self._row_by_row(ran)

    def _composite(self, func: Any, types: Iterable[Any], ran: Operation) -> Any:
        """Calls a function of PyTorch that is written in Python, and watches what it calls."""
        if redispatch is None:
            raise Unserved(f"{ran.name}{place()}")
        return called_inside(self, func, types, ran.args, ran.named)

    def _constant(self, ran: Operation) -> Any:
        """Calls a function that reads nothing of the examples."""
        if ran.counted and ran.name in COPYING:
            return self._copied(ran)
        writes_it = ran.name.endswith("_") or ran.name in ("setitem", "numpy")
        if ran.tensors and writes_it:
            memory = ran.tensors[0].untyped_storage().data_ptr()
            if any(memory == value.untyped_storage().data_ptr() for value, _ in self.held):
                raise ValueError(writes(self._name(lambda value: value.untyped_storage().data_ptr() == memory)))
            if UNSEEN in ran.tags:
                raise Unserved(f"{ran.name} of a tensor that comes from elsewhere{place()}")
        result = ran.run()
        for value in tree_leaves(result):
            if not isinstance(value, Tensor) or any(value is given for given in ran.tensors):
                continue  # changed in place
            if UNSEEN in ran.tags:
                self.give(value, Mixed(f"a tensor that comes from elsewhere meets {ran.name}{place()}"))
            elif ran.counted:
                self.give(value, self._made(ran, ran.args, value))
            elif value.requires_grad and any(isinstance(tag, Weight) for tag in ran.tags):
                self.give(value, _derived(self, value, ran))
            else:
                self.give(value, CONSTANT)
        return result

    def _made(self, ran: Operation, args: tuple[Any, ...], value: Tensor) -> Any:
        """A tensor with a size that counts examples: all rows alike, or drawn for each; or their numbers."""
        sizes = [size for size in leaves((args, ran.named.get("size", ()))) if isinstance(size, int)]
        counts = [spot for spot, size in enumerate(sizes) if isinstance(size, Count)]
        if ran.name == "arange" and counts == [len(sizes) - 1] and value.shape == (self.count,):
            return PLACES
        if ran.name in FILLED and len(counts) == 1 and len(sizes) >= value.dim():
            return Layout(counts[0], cast(Count, sizes[counts[0]]).times, drawn=ran.name in DRAWING)
        return Mixed(f"{ran.name} counts examples{place()}")

    def _copied(self, ran: Operation) -> Tensor:
        """A constant or a parameter that is repeated for each example."""
        value, tag, sizes = ran.tensors[0], ran.tags[0], list(leaves(ran.args[1:]))
        counts = [spot for spot, size in enumerate(sizes) if isinstance(size, Count) and size.times == 1]
        spot, more = (counts or [-1])[0], len(sizes) - value.dim()
        if len(counts) != 1 or ran.named or tag is UNSEEN or (spot >= more and value.shape[spot - more] != 1):
            raise Unserved(f"{ran.name} counts examples{place()}")
        if isinstance(tag, Weight):
            value = self.copies(value, tag, place=spot - more)
            sizes[spot] = 1 if ran.name in ("repeat", "tile") else self.count
        result: Tensor = getattr(value, ran.name)(*sizes)
        return self.give(result, Layout(spot))

    def copies(self, value: Tensor, weight: Weight, *, place: int = -1) -> Tensor:
        """A copy of a parameter for each example, whose gradients are those of the parameter by example.

        `place`: of the examples among the dimensions of the value, which has size 1 there; or before them if it is
        negative: -1 directly, -2 with a dimension of size 1 between, and so on.
        """
        one = value.squeeze(place) if place >= 0 else value
        copies = one.detach().expand(self.count, *one.shape).requires_grad_()
        self.tape.add(copies, weight.reshaped(value.shape).terms)
        ones = [1] * (-place - 1)
        return copies.movedim(0, place) if place >= 0 else copies.reshape(self.count, *ones, *one.shape)

    def _size(self, ran: Operation, layout: Layout) -> Any:
        value = ran.tensors[0]
        if ran.name in ("numel", "nelement"):
            return Count(value.numel() // self.count, self.count)
        counted = Count(layout.before * layout.after, self.count)
        shape = torch.Size([*value.shape[: layout.dim], counted, *value.shape[layout.dim + 1 :]])
        dim = ran.argument(1, "dim")
        return shape if dim is None else shape[dim]

    def _ruled(self, ran: Operation) -> Any:
        before = len(self.tape.uses)
        result, tags = RULES[ran.name](ran)
        if len(self.tape.uses) > before:
            self.read += [(ref(value), value._version) for value in ran.tensors if ran.layout(value)]
        drawn = ran.drawn or (ran.name in RECURRENT and bool(ran.args[5]))
        return self._given(result, tags, drawn=drawn)

    def _given(self, result: Any, tags: Any, *, drawn: bool) -> Any:
        """Notes what is known of results, each with the line of the forward if it is a reason."""
        found = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        for value, tag in zip(found, tags if isinstance(tags, list) else [tags] * len(found), strict=True):
            if isinstance(tag, Layout):
                if value.dim() <= tag.dim or value.shape[tag.dim] != tag.before * self.count * tag.after:
                    tag = Mixed("a result has other dimensions than were expected")
                elif drawn:
                    tag = replace(tag, drawn=True)
            self.give(value, placed(tag) if isinstance(tag, Mixed) else tag)
        return result

    def _row_by_row(self, ran: Operation) -> Any:
        """Calls a function, and finds what is known of its result."""
        name, tags, mixed = ran.name, ran.tags, next((tag for tag in ran.tags if isinstance(tag, Mixed)), None)
        if any(isinstance(tag, Answers) for tag in tags):
            return self._answered(ran)
        if name in READS:
            raise Unserved(placed(mixed or Mixed(f"{name} reads the data")).reason)
        if name in FILLED:
            made = ran.run()
            return self.give(made, self._made(ran, ran.args[1:], made) if ran.counted else CONSTANT)
        if name in WHOLE and isinstance(tags[0], Layout) and len(ran.args) == 1 and not ran.named:
            rows = tags[0].first(ran.tensors[0]).reshape(self.count, -1)
            found = getattr(torch, name)(rows, 1)
            values = found if isinstance(found, Tensor) else found[0]
            return self.give(ran.run(), Answers(values.detach(), tags[0].drawn))
        if mixed is None and UNSEEN in tags:
            mixed = Mixed(f"{name} reads a tensor that comes from elsewhere")
        if mixed is None and any(isinstance(tag, Weight) for tag in tags):
            ran = with_copies(ran)
        if name == "view" and not ran.tensors[0].is_contiguous():
            ran = replace(ran, func=Tensor.reshape)  # a convolution here may have put its channels last in memory
        result = ran.run()
        tag, in_place = mixed or self._tag_of(ran, result), name.endswith("_") or name == "setitem"
        if in_place and tag != ran.tags[0]:
            raise refusal(placed(tag if isinstance(tag, Mixed) else Mixed(f"{name} into another tensor")))
        if not in_place and not any(isinstance(value, Tensor) for value in tree_leaves(result)):
            raise refusal(placed(tag if isinstance(tag, Mixed) else Mixed(name)))
        return self._given(result, tag, drawn=ran.drawn)

    def _tag_of(self, ran: Operation, result: Any) -> Any:
        name, layouts = ran.name.rstrip("_"), {id(value): ran.layout(value) for value in ran.tensors}
        call = Call(name, ran.args, ran.named, result, layouts, self.count)
        places = {id(value) for value in ran.tensors if self.tag(value) is PLACES}
        check = CHECKS.get(name)
        try:
            if name == "getitem" and id(ran.args[0]) not in places:
                return picked(call, places)
            if name == "setitem":
                return self._written(call, places)
            if places and name in ("to", "long", "unsqueeze", "view", "reshape", "getitem"):
                return PLACES if result.shape[:1] == (self.count,) == (result.numel(),) else Mixed(name)
            if check is None or places:
                return Mixed(f"{name} is not known to keep examples apart")
            return Mixed(f"{name} counts examples") if ran.counted and name not in SHAPING else check(call)
        except Unserved as reason:
            return Mixed(str(reason))
        except (TypeError, ValueError, LookupError, AttributeError):  # called in a way that its check does not know
            return Mixed(f"{name} in an unusual form")

    def _written(self, call: Call, places: set[int]) -> Any:
        """The knowledge of a tensor after something was written into a part of it: what it was, if that fits."""
        value, index, written = call.args
        part = value[index]
        spot = picked(Call("getitem", (value, index), {}, part, call.tags, self.count), places)
        if not isinstance(spot, Layout) or not isinstance(written, Tensor):
            return self.tag(value) if isinstance(spot, Layout) else spot
        tags = {id(part): spot, id(written): call.tags[id(written)]}
        both = CHECKS["add"](Call("setitem", (part, written), {}, part, tags, self.count))
        return self.tag(value) if both == spot else Mixed("setitem pairs examples with each other")

    def _answered(self, ran: Operation) -> Any:
        """A number for each example: reads it if all are alike, works on all of them, or does not know it any more."""

        def of_each(value: Any) -> Any:
            tag = self.tag(value) if isinstance(value, Tensor) else None
            return tag.values if isinstance(tag, Answers) else value

        if ran.name in READS:
            (answers,) = [tag for tag in ran.tags if isinstance(tag, Answers)]
            if answers.drawn:  # a second pass would draw others: its branch would choose among the draws
                raise Unserved(f"{ran.name} reads what was drawn at random{place()}")
            if bool((answers.values == answers.values[0]).all()):
                return ran.func(answers.values[0])
            raise Split(answers.values, f"{ran.name}{place()}")
        result = ran.run()
        if ran.name not in COMPARED or not all(isinstance(tag, Answers) or tag is CONSTANT for tag in ran.tags):
            return self.give(result, Mixed(f"{ran.name} of all examples together{place()}"))
        values = ran.func(*map(of_each, ran.args), **{key: of_each(value) for key, value in ran.named.items()})
        return self.give(result, Answers(values, ran.drawn))


def refusal(tag: Mixed) -> Exception:
    """The error for a value that the loss needs, and that does not follow example by example."""
    if not tag.surely:
        return Unserved(tag.reason)
    return MixesExamples(
        f"the model's forward mixes examples: {tag.reason}. Clipping bounds what one example changes only if each goes "
        "through the model alone"
    )


def placed(tag: Mixed) -> Mixed:
    """A reason with the line of the forward that it is about."""
    return tag if " at " in tag.reason else Mixed(f"{tag.reason}{place()}", tag.surely)


def _derived(watch: Watch, value: Tensor, ran: Operation) -> Weight:
    """A value that follows from parameters alone: its gradients are led back to them, example by example."""
    weights = [tag for tag in ran.tags if isinstance(tag, Weight)]
    roots = list({id(root): root for weight in weights for root in weight.roots}.values())
    tags = [watch.tag(root) for root in roots]
    if ran.name == "embedding" and weights[0].slot is not None:
        return weights[0].looked_up(ran.args[1], ran.argument(2, "padding_idx", -1))

    def terms(grads: Tensor) -> list[Term]:
        found = torch.autograd.grad(
            value, roots, grads, is_grads_batched=True, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return [term for own, part in zip(tags, found, strict=True) for term in own.terms(part)]

    return Weight(None, terms, tuple(roots))


def _only_known_derivatives(outputs: Tensor) -> None:
    """Raises Unserved if a function whose derivative is Python code of its own leads to the outputs."""
    seen, waiting = set[Any](), [outputs.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch._C._FunctionBase):
            raise Unserved(f"{type(node).__name__} has a derivative of its own")
        waiting += [before for before, _ in node.next_functions]
