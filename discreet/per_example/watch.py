"""A forward that is run as it is, and watched: each operation that it calls on something of the examples is checked.

The model is called once on the whole batch, under a `TorchFunctionMode`, which sees every function and method of
PyTorch with its real arguments. Each tensor of the examples has a layout (`layouts.py`), and each operation says what
layout its result has, or that it mixes examples. Functions that read trainable parameters note what gives their part of
each example's gradient (`weights.py`). So asserts, shapes, tuples, loops over positions and layers inside layers are
PyTorch's own business, and nothing is traced.

What is known of a value:

- a `Layout`: it follows from the examples, each entry from its own example;
- `CONSTANT`: it follows from no example and no trainable parameter; or a `Weight`: from parameters alone;
- `PLACES`: the numbers of the examples, 0 to n - 1, which may only pick something in each example;
- `Ragged`, `Numbers`: it has rows of nodes or edges, or numbers of such rows (`graphs.py`);
- `Answers`: a number for each example, such as `mask.all()` gives for each alone. A branch on it asks for examples that
  answer alike (`Split`), unless it has one answer whatever the batch is. Which examples run together moves the places
  at which dropout draws for them, as a missing example does: no branch may read what was drawn;
- `Mixed`: it may mix examples. That is an error only if the loss needs it.

What no check sees is refused: tensors that come from elsewhere, hooks on tensors, functions with a derivative of their
own. What a forward makes of the number of examples as a plain Python number, as `len` gives it, is not seen here; the
trial on made-up examples, against each of them alone, is for that (`passes.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import copy
from typing import Any, Self
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from discreet.per_example.branches import LENGTHS, TOGETHER, Answers, Question, answered, number_of_examples, of_lengths
from discreet.per_example.calls import (
    COPYING,
    DRAWING,
    FILLED,
    LIKE,
    READS,
    RECURRENT,
    SHAPING,
    SIZES,
    Call,
    Function,
    Weight,
    called_inside,
    function_of,
    redispatch,
    signature,
)
from discreet.per_example.graphs import STRAY, Graphs, Numbers, Owners, Ragged, kind_of, moved, note_graphs
from discreet.per_example.layouts import (
    CONSTANT,
    FIRST,
    PLACES,
    UNSEEN,
    Count,
    Layout,
    Mixed,
    Unserved,
    leaves,
    place,
    placed,
    refusal,
)
from discreet.per_example.objective import batches_in
from discreet.per_example.operations import CHECKS
from discreet.per_example.recurrent import RECURRENT_RULES
from discreet.per_example.terms import Rows, Slot, Term
from discreet.per_example.trial import only_known_derivatives, tensors_of, writes
from discreet.per_example.weights import WEIGHT_RULES, derived, repeated_for_each, with_copies

RULES = {**WEIGHT_RULES, **RECURRENT_RULES}
Terms = Callable[[Tensor], list[Term]]
Use = tuple[GradientEdge, Terms]
_OF_MODULES = frozenset(nn.Module().__dict__)
_layouts: dict[Any, Layout] = {}  # of results, by the `signature` of the call: what is found once holds for each pass


class Watch(TorchFunctionMode):
    """Watches one forward pass of a model, whose modules these are, over the `count` examples of a batch.
    `slots`: of trainable parameters, by identity. `uses`: where output gradients will appear, and the terms that follow
    from them.

    `counts`: once the forward has asked for `len(x)`, which is a plain number, a new tensor of that size has a row for
    each example: `lengths` has such numbers, and what their rows are. `counted` are those that a new tensor had, which
    may also be equal by chance. `settled`: `questions` that are answered alike; `in_loss`: it may not ask for `len(x)`.

    Nodes and edges of graphs are other `kinds` of rows. Each is watched by a copy, in which a row is an example.
    """

    settled: Collection[Question] = ()
    questions, in_loss = 0, False

    def __init__(
        self, slots: Mapping[int, Slot], count: int, modules: Sequence[nn.Module], *, counts: bool = True
    ) -> None:
        super().__init__()
        self.counts, self.lengths, self.counted = counts, dict[int, Any](), list[int]()
        self.slots, self.count, self.uses = slots, count, list[Use]()
        self.owners: Owners | None = None
        self.kinds = dict[object, Any]()
        self.inner: Any = None
        self.token = object()  # tags outlive a pass on the tensors of the caller
        self.read: list[tuple[ref[Tensor], int]] = []
        self.modules = modules
        self.groups = [group for part in modules for group in (part._parameters, part._buffers) if group]
        self.held = self._state()
        self.known: dict[int, Any] = {id(value): None for value, _ in self.held}  # None: not asked for yet
        self.has_looked = False

    def _state(self) -> list[tuple[Tensor, int]]:
        """The parameters and buffers of the model, and how often each was written."""
        return [(value, value._version) for group in self.groups for value in group.values() if value is not None]

    def _name(self, is_it: Callable[[Tensor], bool]) -> str:
        named = tensors_of(self.modules[0]).items()
        return next((name for name, value in named if is_it(value)), "its parameters or buffers")

    def tag(self, value: Tensor) -> Any:
        """The knowledge of a tensor: see above."""
        own = value.__dict__.get("_discreet")
        if own is not None and own[0] is self.token:
            return own[1]
        if own is not None and own[0] in self.kinds:
            kind, tag = self.kinds[own[0]], own[1]
            if self.owners is None:
                return Ragged(kind) if isinstance(tag, Layout) else tag
            return tag if tag is CONSTANT or isinstance(tag, Weight | Mixed) else STRAY
        tag = self.known.get(id(value), UNSEEN)
        if tag is UNSEEN and not self.has_looked:
            self._look_at_attributes()
            tag = self.known.get(id(value), UNSEEN)
        if tag is None:
            slot = self.slots.get(id(value))
            tag = CONSTANT if slot is None else Weight(slot, lambda grads: [Rows(slot, grads)], (value,))
            self.known[id(value)] = tag
        return tag

    def _look_at_attributes(self) -> None:
        """Finds the tensors that modules hold as plain attributes, or in lists and tuples."""
        self.has_looked = True
        for module in self.modules:
            for held in (value for name, value in module.__dict__.items() if name not in _OF_MODULES):
                for value in (held,) if isinstance(held, Tensor) else held if isinstance(held, list | tuple) else ():
                    if isinstance(value, Tensor):
                        self.known.setdefault(id(value), None)

    def give(self, value: Tensor, tag: Any) -> Tensor:
        """Notes what is known of a tensor."""
        value.__dict__["_discreet"] = (self.token, tag)
        return value

    def rows(self, inputs: Any) -> None:
        """Notes that tensors have the examples in their first dimension, or of graphs, their nodes or edges."""
        for part in batches_in(inputs):
            if isinstance(part, Graphs):
                note_graphs(self, part)
            elif isinstance(part, Tensor):
                self.give(part, FIRST)
        self.read += [(ref(value), value._version) for value in tree_leaves(inputs) if isinstance(value, Tensor)]

    def note(self, outputs: Tensor, terms: Terms) -> None:
        """Notes a use of trainable parameters with these outputs. Their edge is taken now, so that an in-place
        activation after it does not move it."""
        merged = self.owners.merged if self.owners else None
        self.uses.append((get_gradient_edge(outputs), (lambda grads: merged(terms(grads))) if merged else terms))

    def kind_of_rows(self, owners: Tensor) -> Self:
        """A kind of rows that belong to these examples, (rows,)."""
        kind = copy(self)
        kind.owners, kind.count, kind.token = Owners(owners, self.count), len(owners), object()
        self.kinds |= {self.token: self, kind.token: kind}
        return kind

    def joined(self, kinds: Sequence[Any]) -> Any:
        """The rows of several kinds, one behind the other, as one kind; the same for the same kinds."""
        key = tuple(kind.token for kind in kinds)
        if key not in self.kinds:
            self.kinds[key] = self.kind_of_rows(torch.cat([kind.example_of_rows() for kind in kinds]))
        return self.kinds[key]

    def example_of_rows(self) -> Tensor:
        """The example of each row, (rows,)."""
        device = next(iter(self.held))[0].device
        return torch.arange(self.count, device=device) if self.owners is None else self.owners.of

    def check(self, outputs: Tensor) -> None:
        """Raises Unserved or ValueError unless a result, (n, ...), follows example by example.

        Raises:
          ValueError: it is known that the forward mixes examples; the message names the call.
        """
        now = self._state()
        if [(id(value), version) for value, version in now] != [(id(value), version) for value, version in self.held]:
            before = {(id(value), version) for value, version in self.held}
            raise ValueError(writes(self._name(lambda value: (id(value), value._version) not in before)))
        tag = self.tag(outputs)
        if isinstance(tag, Mixed):
            raise refusal(tag)
        if tag != FIRST or len(outputs) != self.count:
            raise Unserved("the outputs do not have the examples first")
        if any(value._version != version for held, version in self.read if (value := held()) is not None):
            raise Unserved("a tensor that a layer has read is overwritten")
        only_known_derivatives(outputs)

    def __torch_function__(
        self, func: Any, types: Iterable[Any], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named, function = kwargs or {}, function_of(func)
        if function.is_banned or named.get("out") is not None:
            raise Unserved(f"{function.name}{place()}")
        if function.is_fact:
            tag = self.tag(args[0]) if function.name in SIZES else None
            if isinstance(tag, Ragged | Numbers):
                self.lengths[tag.kind.count] = tag.kind
            if isinstance(tag, Layout):
                return self._size(function.name, args[0], tag, args[1] if len(args) > 1 else named.get("dim"))
            return func(*args, **named)
        key = signature(self, func, args, named)
        if key in _layouts:
            return self.give(func(*args, **named), _layouts[key])
        result = self._called(func, types, args, named)
        if key is not None and isinstance(result, Tensor) and isinstance(tag := self.tag(result), Layout):
            if len(_layouts) >= 4096:  # shapes without end, such as those of texts
                _layouts.clear()
            _layouts[key] = tag
        return result

    def _called(self, func: Any, types: Iterable[Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        function = function_of(func)
        if function.name in LIKE and isinstance(tag := self.tag(args[-1]), Layout):
            size = self._size("shape", args[-1], tag)
            func, args = getattr(Tensor, function.name.removesuffix("_as")), (args[0], size)
            function = function_of(func)
        call, is_python = Call(self, func, function.name, args, named), function.is_python and func is not self.inner
        if not call.of_examples:
            return self._composite(types, call) if is_python else self._constant(call, function)
        kind = self
        if self.kinds and not call.is_known:
            kind = kind_of(call) or self
            call = Call(kind, func, function.name, args, named)
        if function.may_have_rule and is_python == function.is_python and call.is_known and call.name in RULES:
            return kind._ruled(call)
        return self._composite(types, call) if is_python else kind.row_by_row(call, function)

    def _composite(self, types: Iterable[Any], call: Call) -> Any:
        """Calls a function of PyTorch that is written in Python, and watches what it calls."""
        if redispatch is None:
            raise Unserved(f"{call.name}{place()}")
        if call.name == "len" and isinstance(call.tags[0], Layout):
            if self.in_loss:
                raise Unserved(f"the loss reads the number of examples{place()}")
            self.lengths[self.count] = self
        return called_inside(self, call.func, types, call.args, call.named)

    def _constant(self, call: Call, function: Function) -> Any:
        """Calls a function that reads nothing of the examples."""
        if call.counted and call.name in COPYING:
            return self.give(*repeated_for_each(call))
        if call.tensors and (function.writes or call.name == "numpy"):
            memory = call.tensors[0].untyped_storage().data_ptr()
            if any(memory == value.untyped_storage().data_ptr() for value, _ in self.held):
                raise ValueError(writes(self._name(lambda value: value.untyped_storage().data_ptr() == memory)))
        result = call.run()
        for value in (result,) if isinstance(result, Tensor) else tree_leaves(result):
            if not isinstance(value, Tensor) or any(value is given for given in call.tensors):
                continue  # changed in place
            if call.name in FILLED or call.counted or (self.kinds and call.name == "arange"):
                self._made(call, value)
            elif value.requires_grad and any(isinstance(tag, Weight) for tag in call.tags):
                self.give(value, derived(value, call))
            else:
                self.give(value, CONSTANT)
        return result

    def _made(self, call: Call, value: Tensor) -> Tensor:
        """A new tensor. With a size that counts rows: all of them alike, or drawn for each; or their numbers."""
        given = leaves((call.args, call.named.get("size", ())))
        numbers = (size for size in given if isinstance(size, int) or (isinstance(size, Tensor) and size.dim() == 0))
        sizes = [int(size) if isinstance(size, Tensor) else size for size in numbers]
        counts, kind = [spot for spot, size in enumerate(sizes) if isinstance(size, Count)], self
        times = sizes[counts[0]].times if counts else 1  # type: ignore[attr-defined]
        if not counts:
            counts = [spot for spot, size in enumerate(sizes[: value.dim()]) if size in self.lengths][:1]
            if not (self.counts and counts):
                return self.give(value, CONSTANT)
            kind = self.lengths[sizes[counts[0]]]
            self.counted.append(kind.count)
        if call.name == "arange" and counts == [len(sizes) - 1] and value.shape == (kind.count,):
            return self.give(value, PLACES if kind.owners is None else Numbers(kind, FIRST, kind))
        if call.name in FILLED and len(counts) == 1 and counts[0] < value.dim():
            return kind.give(value, Layout(counts[0], times, drawn=call.name in DRAWING))
        return self.give(value, Mixed(f"{call.name} counts examples{place()}"))

    def _size(self, name: str, value: Tensor, layout: Layout, dim: int | None = None) -> Any:
        """A fact of SIZES, in which a number counts the examples."""
        if name in ("numel", "nelement"):
            return Count(value.numel() // self.count, self.count)
        counted = Count(layout.before * layout.after, self.count)
        shape = torch.Size([*value.shape[: layout.dim], counted, *value.shape[layout.dim + 1 :]])
        return shape if dim is None else shape[dim]

    def _ruled(self, call: Call) -> Any:
        before = len(self.uses)
        result, tags = RULES[call.name](call)
        if len(self.uses) > before:
            self.read += [(ref(value), value._version) for value in call.tensors if call.layout(value)]
        return self.results(result, tags, drawn=call.drawn or (call.name in RECURRENT and bool(call.args[5])))

    def results(self, result: Any, tags: Any, *, drawn: bool = False) -> Any:
        """Notes what is known of results, each with the line of the forward if it is a reason."""
        if isinstance(result, Tensor):
            self._give(result, tags, drawn)
            return result
        found = [value for value in tree_leaves(result) if isinstance(value, Tensor)]
        for value, tag in zip(found, tags if isinstance(tags, list) else [tags] * len(found), strict=True):
            self._give(value, tag, drawn)
        return result

    def _give(self, value: Tensor, tag: Any, drawn: bool) -> None:
        if isinstance(tag, Layout):
            if value.dim() <= tag.dim or value.shape[tag.dim] != tag.before * self.count * tag.after:
                tag = Mixed("a result has other dimensions than were expected")
            elif drawn and not tag.drawn:
                tag = Layout(tag.dim, tag.before, tag.after, drawn=True)
        self.give(value, placed(tag) if isinstance(tag, Mixed) else tag)

    def row_by_row(self, call: Call, function: Function) -> Any:
        """Calls a function, and finds what is known of its result."""
        name, tags = call.name, call.tags
        mixed = None
        if not call.is_known:
            if any(isinstance(tag, Answers) for tag in tags):
                return answered(call)
            if call.places and all(tag is PLACES or tag is CONSTANT for tag in tags):
                return number_of_examples(call)
            mixed = next((tag for tag in tags if isinstance(tag, Mixed)), None)
        if mixed is None and self.kinds and any(isinstance(tag, Ragged | Numbers) for tag in tags):
            return moved(call, function)
        if name in LENGTHS and tags[-1] == FIRST and call.tensors[-1].dim() == 1 and self.owners is None:
            return of_lengths(call, call.tensors[-1])
        if function.is_special:
            if name in READS:
                raise Unserved(placed(mixed or Mixed(f"{name} reads the data")).reason)
            if name in FILLED:
                return self._made(call, call.run())
            if self.owners is None and isinstance(tags[0], Layout) and len(call.args) == 1 and not call.named:
                rows = tags[0].first(call.tensors[0]).reshape(self.count, -1)
                found = getattr(torch, name)(rows, 1)
                answers = (found if isinstance(found, Tensor) else found[0]).detach()
                return self.give(call.run(), Answers(answers, tags[0].drawn, TOGETHER.get(name)))
        if mixed is None and call.has_weight:
            call = with_copies(call)
        if name == "view" and not call.tensors[0].is_contiguous():
            call.func = Tensor.reshape  # a convolution here may have put its channels last in memory
        result = call.run()
        tag = mixed or self._tag_of(call)
        is_known = isinstance(result, Tensor) or any(isinstance(value, Tensor) for value in leaves(result))
        if tag != call.tags[0] if function.writes else not is_known:
            raise refusal(placed(tag if isinstance(tag, Mixed) else Mixed(f"{name} into another kind of value")))
        return self.results(result, tag, drawn=call.drawn)

    def _tag_of(self, call: Call) -> Any:
        name, check = call.name, CHECKS.get(call.name)
        try:
            if name == "setitem":
                return self._written(call)
            if call.places and name == "index_select":  # in their order
                (dim,) = call.dims(call.tensors[0].dim(), 1)
                return call.tags[0] if call.tags[0] == Layout(dim) else Mixed(f"{name} by the numbers of the examples")
            if check is None or (call.places and name != "getitem"):
                return Mixed(f"{name} is not known to keep examples apart")
            is_counted = call.counted and name not in SHAPING and name != "getitem"
            return Mixed(f"{name} counts examples") if is_counted else check(call)
        except Unserved as reason:
            return Mixed(str(reason))
        except (TypeError, ValueError, LookupError, AttributeError):  # called in a way that its check does not know
            return Mixed(f"{name} in an unusual form")

    def _written(self, call: Call) -> Any:
        """The knowledge of a tensor after something was written into a part of it: what it was, if that fits."""
        value, index, written = call.args
        part = value[index]

        def checked(name: str, *args: Any) -> Any:
            inner = Call(self, None, name, args, {})
            inner.result = part
            return CHECKS[name](inner)

        spot = checked("getitem", value, index)
        if not isinstance(spot, Layout) or not isinstance(written, Tensor):
            return self.tag(value) if isinstance(spot, Layout) else spot
        both = checked("add", self.give(part, spot), written)
        return self.tag(value) if both == spot else Mixed("setitem pairs examples with each other")
