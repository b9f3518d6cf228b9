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
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from discreet.per_example.layouts import CHECKS, FIRST, Call, Count, Layout, Mixed, Unserved, leaves, picked, place
from discreet.per_example.recurrent import RECURRENT_RULES
from discreet.per_example.terms import Rows, Tape, Term
from discreet.per_example.trial import DRAWING, redispatch, writes
from discreet.per_example.weights import WEIGHT_RULES, Operation, Weight, with_copies

RULES = {**WEIGHT_RULES, **RECURRENT_RULES}

CONSTANT, PLACES, UNSEEN = "constant", "places", "unseen"


def _words(names: str) -> set[str]:
    return set(names.split())


_SIZES = _words("shape size numel nelement")
_FACTS = _words(
    "dim ndimension is_floating_point is_complex is_contiguous stride element_size get_device is_signed storage_offset "
    "data_ptr is_inference is_tensor type has_names repr format hash"
)
_BANNED = _words("register_hook register_post_accumulate_grad_hook backward grad retain_grad set_ resize_")
_READS = _words("__bool__ __int__ __float__ __complex__ __index__ item tolist is_nonzero")
_WHOLE = _words("all any sum mean max min amax amin count_nonzero")
_COMPARED = _words("eq ne lt le gt ge logical_not logical_and logical_or and or invert not neg abs add sub mul to")
_FILLED = _words("zeros ones full empty new_zeros new_ones new_full new_empty rand randn")
_PYTHON = {"embedding_bag", "lstm_layer"}  # functions with rules that are written in Python
_ALIASES = {"radd": "add", "rmul": "mul", "iadd": "add_", "isub": "sub_", "imul": "mul_", "itruediv": "div_"}


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
        self.read: list[tuple[Tensor, int]] = []
        self.known: dict[int, Any] = {}
        self.model, self.modules = model, list(model.modules())
        self.held = self._state()
        for module in self.modules:
            for held in (*module.__dict__.values(), *module._parameters.values(), *module._buffers.values()):
                for value in (held,) if isinstance(held, Tensor) else held if isinstance(held, list | tuple) else ():
                    if isinstance(value, Tensor):
                        self.known[id(value)] = self._own(value)

    def _own(self, value: Tensor) -> Any:
        slot = self.tape.slot(value)
        return CONSTANT if slot is None else Weight(slot, lambda grads: [Rows(slot, grads)], (value,))

    def _state(self) -> list[tuple[Tensor, int]]:
        """The parameters and buffers of the model, and how often each was written."""
        held = (module._parameters.values() for module in self.modules), (m._buffers.values() for m in self.modules)
        return [(value, value._version) for part in held for group in part for value in group if value is not None]

    def _name(self, is_it: Callable[[Tensor], bool]) -> str:
        named = [
            *self.model.named_parameters(remove_duplicate=False),
            *self.model.named_buffers(remove_duplicate=False),
        ]
        return next((name for name, value in named if is_it(value)), "its parameters or buffers")

    def tag(self, value: Tensor) -> Any:
        """What is known of a tensor."""
        own = value.__dict__.get("_discreet")
        if own is not None and own[0] is self:
            return own[1]
        return self.known.get(id(value), UNSEEN)

    def give(self, value: Any, tag: Any) -> Any:
        """Notes what is known of a tensor, or of several."""
        if isinstance(value, Tensor):
            value.__dict__["_discreet"] = (self, tag)
        return value

    def rows(self, inputs: Any) -> None:
        """Notes that tensors have the examples in their first dimension."""
        for value in tree_leaves(inputs):
            if isinstance(value, Tensor):
                self.give(value, FIRST)
                self.read.append((value, value._version))

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
        if any(value._version != version for value, version in self.read):
            raise Unserved("a tensor that a layer has read is overwritten")
        _only_known_derivatives(outputs)

    def __torch_function__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        name = _name_of(func)
        if name in _BANNED or named.get("out") is not None or name == "__set__":
            raise Unserved(f"{name}{place()}")
        tensors = [value for value in leaves((args, named)) if isinstance(value, Tensor)]
        tags = [self.tag(value) for value in tensors]
        if not any(isinstance(tag, Layout | Answers | Mixed) or tag is PLACES for tag in tags):
            return self._constant(func, name, types, args, named, tensors, tags)
        if name in _SIZES and isinstance(tags[0], Layout):
            return self._size(name, args, named, tensors[0], tags[0])
        if name in _FACTS or name in _SIZES or (getattr(func, "__name__", "") == "__get__" and name not in CHECKS):
            return func(*args, **named)
        if (
            name in RULES
            and (type(func) is not FunctionType) == (name not in _PYTHON)
            and all(isinstance(tag, Layout | Weight) or tag is CONSTANT for tag in tags)
        ):
            return self._ruled(func, name, args, named, tensors)
        if type(func) is FunctionType and func is not self.inner:
            return self._composite(func, types, args, named)
        return self._row_by_row(func, name, args, named, tensors, tags)

    def _composite(self, func: Any, types: Iterable[Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Calls a function of PyTorch that is written in Python, and watches what it calls."""
        if redispatch is None:
            raise Unserved(f"{func.__name__}{place()}")
        before, self.inner = self.inner, func
        try:
            with self:
                return redispatch(func, types, args, named)
        finally:
            self.inner = before

    def _constant(
        self,
        func: Any,
        name: str,
        types: Iterable[Any],
        args: tuple[Any, ...],
        named: dict[str, Any],
        tensors: list[Tensor],
        tags: list[Any],
    ) -> Any:
        """Calls a function that reads nothing of the examples."""
        if type(func) is FunctionType and func is not self.inner and redispatch is not None:
            return self._composite(func, types, args, named)
        counted = any(isinstance(value, Count) for value in leaves((args, named)))
        if counted and name in ("expand", "repeat", "expand_as", "broadcast_to", "tile"):
            return self._copied(name, args, named, tensors[0], tags[0])
        if tensors and (name.endswith("_") or name in ("setitem", "numpy")):
            memory = tensors[0].untyped_storage().data_ptr()
            if any(memory == value.untyped_storage().data_ptr() for value, _ in self.held):
                raise ValueError(writes(self._name(lambda value: value.untyped_storage().data_ptr() == memory)))
        result = func(*args, **named)
        found = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        weights = [tag for tag in tags if isinstance(tag, Weight)]
        for value in found:
            if any(value is given for given in tensors):
                continue  # changed in place
            if UNSEEN in tags:
                self.give(value, Mixed(f"a tensor that comes from elsewhere meets {name}{place()}"))
            elif counted:
                self.give(value, _placed(self._made(name, args, named, value), name in DRAWING))
            elif weights and value.requires_grad:
                self.give(value, _derived(self, value, weights, name, args))
            else:
                self.give(value, CONSTANT)
        return result

    def _made(self, name: str, args: tuple[Any, ...], named: dict[str, Any], value: Tensor) -> Any:
        """A tensor with a size that counts examples: all rows alike, or drawn for each; or their numbers."""
        sizes = [size for size in leaves((args, named.get("size", ()))) if isinstance(size, int)]
        counts = [spot for spot, size in enumerate(sizes) if isinstance(size, Count)]
        if (
            name == "arange"
            and args
            and isinstance(args[-1], Count)
            and args[-1].times == 1
            and len(value) == self.count
        ):
            return PLACES
        if name in _FILLED and len(counts) == 1 and len(sizes) >= value.dim():
            return Layout(counts[0], sizes[counts[0]].times)  # type: ignore[attr-defined]
        return Mixed(f"{name} counts examples{place()}")

    def _copied(self, name: str, args: tuple[Any, ...], named: dict[str, Any], value: Tensor, tag: Any) -> Tensor:
        """A constant or a parameter that is repeated for each example."""
        sizes = list(leaves(args[1:]))
        counts = [spot for spot, size in enumerate(sizes) if isinstance(size, Count)]
        more = len(sizes) - value.dim()
        (spot,) = counts if len(counts) == 1 and not named else (None,)
        fits = spot is not None and sizes[spot].times == 1 and (spot < more or value.shape[spot - more] == 1)
        if not fits or tag is UNSEEN:
            raise Unserved(f"{name} counts examples{place()}")
        assert spot is not None
        if isinstance(tag, Weight):
            one = value.squeeze(spot - more) if spot >= more else value
            copies = self.copies(one, tag.reshaped(value.shape))
            ones = [1] * (more - spot - 1)
            given = copies.movedim(0, spot - more) if spot >= more else copies.reshape(self.count, *ones, *one.shape)
            sizes[spot] = 1 if name in ("repeat", "tile") else self.count
            return self.give(getattr(given, name)(*sizes), Layout(spot))  # type: ignore[no-any-return]
        result = getattr(value, name)(*sizes)
        return self.give(result, Layout(spot))  # type: ignore[no-any-return]

    def copies(self, value: Tensor, weight: Weight) -> Tensor:
        """A copy of a parameter for each example, (n, ...), whose gradients are those of the parameter by example."""
        copies = value.detach().expand(self.count, *value.shape).requires_grad_()
        self.tape.add(copies, weight.terms)
        return copies

    def _size(self, name: str, args: tuple[Any, ...], named: dict[str, Any], value: Tensor, layout: Layout) -> Any:
        counted = Count(layout.before * layout.after, self.count)
        if name in ("numel", "nelement"):
            return Count(value.numel() // self.count, self.count)
        shape = torch.Size([*value.shape[: layout.dim], counted, *value.shape[layout.dim + 1 :]])
        dim = args[1] if len(args) > 1 else named.get("dim")
        return shape if dim is None else shape[dim]

    def _ruled(self, func: Any, name: str, args: tuple[Any, ...], named: dict[str, Any], tensors: list[Tensor]) -> Any:
        operation = Operation(self, func, name, args, named)
        before = len(self.tape.uses)
        result, tags = RULES[name](operation)
        drawn = self._drawn(name, [self.tag(value) for value in tensors]) or (name in ("lstm", "gru") and bool(args[5]))
        if len(self.tape.uses) > before:
            self.read += [(value, value._version) for value in tensors if isinstance(self.tag(value), Layout)]
        found = tree_leaves(result)
        for value, tag in zip(found, tags if isinstance(tags, list) else [tags] * len(found), strict=True):
            self.give(value, _placed(tag, drawn))
        return result

    def _drawn(self, name: str, tags: list[Any]) -> bool:
        """True if there are random numbers in what a function gives."""
        return name in DRAWING or any(isinstance(tag, Layout | Answers) and tag.drawn for tag in tags)

    def _row_by_row(
        self,
        func: Any,
        name: str,
        args: tuple[Any, ...],
        named: dict[str, Any],
        tensors: list[Tensor],
        tags: list[Any],
    ) -> Any:
        """Calls a function, and finds what is known of its result."""
        if any(isinstance(tag, Answers) for tag in tags):
            return self._answered(func, name, args, named, tags)
        if name in _READS:
            mixed = next((tag for tag in tags if isinstance(tag, Mixed)), Mixed(f"{name} reads the data"))
            raise Unserved(_placed(mixed).reason)
        if name in _FILLED:
            made = func(*args, **named)
            counted = any(isinstance(value, Count) for value in leaves((args, named)))
            kind = self._made(name, args[1:], named, made) if counted else CONSTANT
            return self.give(made, _placed(kind, name in DRAWING))
        if name in _WHOLE and isinstance(tags[0], Layout) and len(args) == 1 and not named:
            found = getattr(torch, name)(
                tags[0].first(tensors[0]).flatten(1) if tensors[0].dim() > 1 else tensors[0].unsqueeze(1), 1
            )
            values = found if isinstance(found, Tensor) else found[0]
            return self.give(func(*args), Answers(values.detach(), tags[0].drawn))
        in_place, plain = name.endswith("_") or name == "setitem", name.rstrip("_")
        tag: Any = next((tag for tag in tags if isinstance(tag, Mixed)), None)
        if tag is None and UNSEEN in tags:
            tag = Mixed(f"{name} reads a tensor that comes from elsewhere{place()}")
        if tag is None and any(isinstance(tag, Weight) for tag in tags):
            args, named, func, tensors, tags = with_copies(self, func, plain, args, named)
        if name == "view" and not tensors[0].is_contiguous():
            func = Tensor.reshape  # a convolution here may have put its channels last in memory
        result = func(*args, **named)
        if tag is None:
            tag = self._tag_of(plain, args, named, result, tensors, tags)
        if in_place:
            if not isinstance(tag, Mixed) and tag != tags[0]:
                tag = Mixed(f"{name} into another tensor")
            if not isinstance(tag, Layout):
                raise refusal(_placed(tag))
        found = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        if not found and not in_place:
            raise refusal(_placed(tag if isinstance(tag, Mixed) else Mixed(name)))
        for value, one in zip(found, tag if isinstance(tag, list) else [tag] * len(found), strict=True):
            self.give(value, _placed(one, self._drawn(name, tags)))
        return result

    def _tag_of(
        self,
        name: str,
        args: tuple[Any, ...],
        named: dict[str, Any],
        result: Any,
        tensors: list[Tensor],
        tags: list[Any],
    ) -> Any:
        layouts = {
            id(value): tag if isinstance(tag, Layout) else None for value, tag in zip(tensors, tags, strict=True)
        }
        call = Call(name, args, named, result, layouts, self.count)
        places = {id(value) for value, tag in zip(tensors, tags, strict=True) if tag is PLACES}
        try:
            if name == "getitem" and id(args[0]) not in places:
                return picked(call, places)
            if name == "setitem":
                return self._written(call, places)
            if places and name in ("to", "long", "unsqueeze", "view", "reshape", "getitem"):
                return PLACES if result.shape[:1] == (self.count,) == (result.numel(),) else Mixed(name)
            check = CHECKS.get(name)
            if check is None or places:
                return Mixed(f"{name} is not known to keep examples apart")
            counted = any(isinstance(value, Count) for value in leaves((args, named)))
            if counted and name not in ("view", "reshape", "unflatten", "expand", "repeat", "narrow", "split", "chunk"):
                return Mixed(f"{name} counts examples")
            return check(call)
        except Unserved as reason:
            return Mixed(str(reason))

    def _written(self, call: Call, places: set[int]) -> Any:
        """What is known of a tensor after something was written into a part of it: what it was, if that fits."""
        value, index, written = call.args
        part = value[index]
        spot = picked(Call("getitem", (value, index), {}, part, call.tags, self.count), places)
        if not isinstance(spot, Layout) or not isinstance(written, Tensor):
            return self.tag(value) if isinstance(spot, Layout) else spot
        both = Call(
            "setitem", (part, written), {}, part, {id(part): spot, id(written): call.layout(written)}, self.count
        )
        return self.tag(value) if CHECKS["add"](both) == spot else Mixed("setitem pairs examples with each other")

    def _answered(self, func: Any, name: str, args: tuple[Any, ...], named: dict[str, Any], tags: list[Any]) -> Any:
        """A number for each example: reads it if all are alike, works on all of them, or does not know it any more."""

        def of_each(value: Any) -> Any:
            tag = self.tag(value) if isinstance(value, Tensor) else None
            return tag.values if isinstance(tag, Answers) else value

        if name in _READS:
            (answers,) = [tag for tag in tags if isinstance(tag, Answers)]
            if answers.drawn:  # a second pass would draw others: its branch would choose among the draws
                raise Unserved(f"{name} reads what was drawn at random{place()}")
            if bool((answers.values == answers.values[0]).all()):
                return func(answers.values[0])
            raise Split(answers.values, f"{name}{place()}")
        result = func(*args, **named)
        if name not in _COMPARED or not all(isinstance(tag, Answers) or tag is CONSTANT for tag in tags):
            return self.give(result, Mixed(f"{name} of all examples together{place()}"))
        values = func(*map(of_each, args), **{key: of_each(named[key]) for key in named})
        return self.give(result, Answers(values, self._drawn(name, tags)))


def refusal(tag: Mixed) -> Exception:
    """The error for a value that the loss needs, and that does not follow example by example."""
    if not tag.surely:
        return Unserved(tag.reason)
    return MixesExamples(
        f"the model's forward mixes examples: {tag.reason}. Clipping bounds what one example changes only if each goes "
        "through the model alone"
    )


def _placed(tag: Any, drawn: bool = False) -> Any:
    """A reason with the line of the forward that it is about; a layout with random numbers in it, if there are."""
    if isinstance(tag, Layout):
        return replace(tag, drawn=True) if drawn else tag
    return Mixed(f"{tag.reason}{place()}", tag.surely) if isinstance(tag, Mixed) and " at " not in tag.reason else tag


def _name_of(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        return str(func.__self__.__name__)
    if name == "__set__":
        return name
    if name in _READS:
        return name
    bare = name.strip("_") + ("_" if name.endswith("_") and not name.startswith("__") else "")
    return _ALIASES.get(bare, bare)


def _derived(watch: Watch, value: Tensor, weights: list[Weight], name: str, args: tuple[Any, ...]) -> Weight:
    """A value that follows from parameters alone: its gradients are led back to them, example by example."""
    roots = list({id(root): root for weight in weights for root in weight.roots}.values())
    if name == "embedding" and weights[0].slot is not None:
        return weights[0].looked_up(args[1], args[2] if len(args) > 2 else -1)

    def terms(grads: Tensor) -> list[Term]:
        found = torch.autograd.grad(
            value, roots, grads, is_grads_batched=True, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        return [term for root, part in zip(roots, found, strict=True) for term in watch.tag(root).terms(part)]

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
