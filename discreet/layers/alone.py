"""One pass of a model in which each example runs alone: under `torch.func.vmap`, as a batch of one.

So nothing can mix examples, whatever the forward does, and this needs no check. A
`TorchFunctionMode` sees the functions that the forward calls:

- A function with a rule (`layer_rules.py`) runs for all examples at once, below vmap. If it reads
  trainable parameters, the rule notes the edge at which the gradients of its outputs will appear,
  and the terms that follow from them.
- Any other use of a trainable parameter gets a copy for each example, whose gradients are built. So
  every use of a parameter is covered.
- A number that is read, for instance by a branch, is read for each example; see `branches.py`.

Anything that examples share is read-only: parameters, buffers, and all else that existed before the
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from discreet.layers.branches import NOTHING_ASKED, AnswersDiffer, Questions, are_alike
from discreet.layers.computed import ComputedWeights
from discreet.layers.draws import Draws, generator_states, have_moved
from discreet.layers.functions import (
    COUNTING,
    DRAWING,
    DROPPING,
    FILLED,
    INDEXING,
    MADE,
    READ_ALIKE,
    READS,
    Function,
    by_name,
    called_inside,
    function_of,
)
from discreet.layers.lanes import (
    all_of,
    as_lane_like,
    as_one_example,
    bare,
    below_vmap,
    fill,
    is_lane,
    is_lane_of,
    level,
    squeezed,
    tensors_among,
    viewing,
    within,
)
from discreet.layers.model_state import memory_of, state_of, tensors_of, writes
from discreet.layers.refusals import COPYING, DERIVING, FILLING, Needs, Unserved, place
from discreet.layers.terms import Rows, Slot, Term

TermsOf = Callable[[Tensor], list[Term]]
Use = tuple[GradientEdge, TermsOf]
Rule = Callable[..., Any]
_NESTED = (list, tuple)
_OF_GRADIENTS = ("outputs", "inputs", "grad_outputs")
_LAYOUTS = (torch.channels_last, torch.channels_last_3d)


@dataclass(frozen=True, slots=True)
class Shared:
    """A result of a rule that is the same for all examples."""

    value: Any


class Alone(TorchFunctionMode):
    """The functions of one forward that vmap maps over `count` examples. Entered within vmap.

    Attributes:
      slots: slots of trainable parameters, by identity.
      rules: rules by the names of functions.
      uses: the edges where output gradients will appear, and the terms that follow from them.
      settled: questions that have one answer for every batch.
      size: the rows of an example, 1 unless it is a unit of several.
      fills: True if each new tensor is one of its own for each example, so that the forward may
        write what differs between examples into it. Otherwise those are that may be a batch.
      draws: the random numbers of each example.
      derives: True if the forward takes gradients. Each parameter then has a copy for each example,
        since the terms of a rule are not those of a gradient's gradient.
    """

    def __init__(
        self,
        slots: Mapping[int, Slot],
        count: int,
        modules: Sequence[nn.Module],
        *,
        rules: Mapping[str, Rule],
        questions: Questions = NOTHING_ASKED,
    ) -> None:
        super().__init__()
        self.slots = slots
        self.count = count
        self.uses = list[Use]()
        self.rules = rules
        self.settled = questions.settled
        self.fills = FILLING in questions.needs
        self.derives = DERIVING in questions.needs
        self.copies_all = self.derives or COPYING in questions.needs
        self.computed = ComputedWeights()
        self.size = 1
        self.questions = 0
        self.modules = modules
        self.held = state_of(modules)
        self.device = next((value.device for value, _ in self.held), torch.device("cpu"))
        self.draws: Draws  # given by the pass
        self.drawn = generator_states(self.device)
        self.inner: Any = None
        self.level = -1
        self.copies = dict[int, Tensor]()
        self.memory = set[int]()

    def __enter__(self) -> Any:
        if self.level < 0:
            self.level = level()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def slot(self, value: Any) -> Slot | None:
        """The slot of a trainable parameter, or of a weight that is computed from some; None for
        another value."""
        return self.slots.get(id(value)) or self.computed.slot(value)

    def note(self, outputs: Tensor, terms: TermsOf) -> Tensor:
        """Notes a use of trainable parameters with these outputs. They must be new tensors, not
        views, so that a later in-place activation does not move their edge."""
        if outputs.requires_grad:
            self.uses.append((get_gradient_edge(outputs), terms))
        return outputs

    def rows(self, value: Tensor) -> Tensor:
        """The tensor of all examples, (n, ...). A value that all share gives equal rows, and a
        trainable parameter its copies."""
        value = self.copied(value)
        if is_lane(value):
            return all_of(value)
        return value.expand(self.count, *value.shape)

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[Any],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        named = kwargs or {}
        function = function_of(func)
        is_python = function.is_python and func is not self.inner
        rule = self.rules.get(function.name)
        serves = rule is not None and not function.writes and not self.derives
        if function.writes and function.name in DROPPING and level() == self.level:
            return self._dropped_in_place(rule, args, named)
        if rule is not None and serves and is_python == (function.name in PYTHON):
            result = self._ruled(rule, args, named)
            if result is not NotImplemented:
                return result
        if named.get("memory_format") in _LAYOUTS:  # which vmap doesn't know, and changes no value
            named = named | {"memory_format": torch.contiguous_format}
        if function.is_fact:
            if function.name == "requires_grad" and is_lane(args[0]):
                return bare(args[0]).requires_grad
            return func(*args, **named)
        is_gradient = function.name == "grad" and is_python
        if is_gradient and level() == self.level:
            return self._gradient(func, args, named)
        if (function.is_banned and not is_gradient) or named.get("out") is not None:
            raise Unserved(f"{function.name}{place()}")
        if is_python and not function.is_plain:
            return called_inside(self, func, types, args, named)
        if function.is_ordinary and self._has_no_parameter(args, named):
            return self._with_numbers(func, args, named)
        return self._called(func, function, args, named)

    def _has_no_parameter(self, args: tuple[Any, ...], named: dict[str, Any]) -> bool:
        """True for arguments without a trainable parameter or a generator."""
        if level() != self.level or "generator" in named:
            return False
        return not any(map(self.slot, tensors_among((*args, *named.values()))))

    def _ruled(self, rule: Rule, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        given = tensors_among(args)
        lanes = [value for value in (*given, *tensors_among(named.values())) if is_lane(value)]
        if (
            level() != self.level
            or not all(is_lane_of(value, self.level) for value in lanes)
            or not (lanes or any(map(self.slot, given)))
        ):
            return NotImplemented
        with below_vmap(self.level):
            result = rule(self, *args, **named)
        if result is NotImplemented:
            return result
        return self._lifted(result)

    def _dropped_in_place(self, rule: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        given = by_name(("input", "p", "train"), args, named)
        if not given["p"] or not given["train"]:  # nothing is written, so its gradient may need it
            return args[0]
        self._check_writes(args[0], "dropout")
        result = self._ruled(rule, args, named)
        if result is NotImplemented:
            raise Unserved(f"dropout of what all examples share, in place{place()}")
        return args[0].copy_(result)

    def _lifted(self, result: Any) -> Any:
        """Tensors of all examples (n, ...) as the forward sees them: as tensors of one example."""
        if isinstance(result, Tensor):
            return as_one_example(result, self.level)
        if isinstance(result, Shared):
            return result.value
        if isinstance(result, _NESTED):
            return type(result)(map(self._lifted, result))
        return result

    def _called(
        self, func: Any, function: Function, args: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        name = function.name
        if name in READS and is_lane(args[0]):
            return self._read(func, name, args[0])
        if name in INDEXING:
            if name == "setitem" and self._fills_by_mask(*args):
                return fill(*args)
            args = (args[0], self._known(args[1], name), *args[2:])
        elif name in COUNTING and len(args) == 1:
            args = (self._known(args[0] != 0, name),)
        if name == "nested_tensor_from_mask_left_aligned":
            return False  # a faster way for a batch, with the same results
        if name == "requires_grad":
            return self._asked_gradient(func, args, named)
        if function.writes:
            self._check_writes(args[0], name)
            self._check_lanes(args, name)
        elif name == "squeeze" and len(args) == 1 and not named and self._is_own(args[0]):
            return squeezed(args[0]) if self.size == 1 else func(*args)
        elif name == "view" and is_lane(args[0]) and not isinstance(args[1], torch.dtype):
            func = viewing(args[0])
        elif name == "data" and is_lane(args[0]):
            return args[0].detach()
        elif name in READ_ALIKE and self.slot(args[0]) is not None:
            return func(*args)
        given = tensors_among((*args, *named.values()))
        if self._are_parameters(given, function):
            return self.computed.noted(func(*args, **named), given, self.slots)
        args = tuple(map(self.copied, args))
        named = {key: self.copied(value) for key, value in named.items()}
        if named.get("generator") is not None:  # all examples share it, and its numbers
            with below_vmap(self.level):
                return func(*args, **named)
        if function.full in DRAWING and level() == self.level:
            return self._drawn(func, function, args, named)
        result = self._with_numbers(func, args, named)
        if self._is_new(name, result):
            return self._filled(result)
        return result

    def _are_parameters(self, given: list[Tensor], function: Function) -> bool:
        """True for what a function may compute once: of trainable parameters, and of no value of an
        example."""
        if self.copies_all or level() != self.level or any(map(is_lane, given)):
            return False
        varies = function.writes or function.full in DRAWING
        return not varies and any(self.slot(value) is not None for value in given)

    def _drawn(
        self, func: Any, function: Function, args: tuple[Any, ...], named: dict[str, Any]
    ) -> Any:
        """The result of a function that draws random numbers, which it draws for each example."""
        name = function.name
        if function.writes and not is_lane(args[0]):
            if self.fills:
                raise Unserved(f"{name} draws into a tensor of all examples{place()}")
            raise Needs(FILLING, f"{name} draws into a tensor of all examples{place()}")
        leaves, spec = tree_flatten((args, named))
        with below_vmap(self.level):
            rows = [all_of(value) if is_lane(value) else value for value in leaves]

            def of_one(place: int) -> Tensor:
                own = [
                    row[place] if is_lane(value) else value
                    for value, row in zip(leaves, rows, strict=True)
                ]
                given, by_name = tree_unflatten(own, spec)
                return func(*given, **by_name)  # type: ignore[no-any-return]

            found = self.draws.sampled(name, of_one)
        if function.writes:
            return args[0]
        return as_one_example(found, self.level)

    def _is_new(self, name: str, result: Any) -> bool:
        """True for a new tensor that the forward may write into for each example."""
        if not isinstance(result, Tensor) or is_lane(result):
            return False
        return (name in FILLED and self.size in result.shape) or (self.fills and name in MADE)

    def _with_numbers(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """The result of a function; one that takes numbers, such as a length, gets those of the
        examples, which are read."""
        try:
            return func(*args, **named)
        except RuntimeError as error:
            if ".item()" not in str(error):
                raise
        return func(*map(self._number, args), **{key: self._number(named[key]) for key in named})

    def _number(self, value: Any) -> Any:
        if type(value) in _NESTED:
            return type(value)(map(self._number, value))
        if isinstance(value, slice):
            return slice(*map(self._number, (value.start, value.stop, value.step)))
        if self._is_own(value) and value.numel() == 1 and not value.is_floating_point():
            return self._read(Tensor.item, "item", value)
        return value

    def _is_own(self, value: Any) -> bool:
        """True for a value of one example, outside of a transform of the forward's own."""
        return level() == self.level and is_lane_of(value, self.level)

    def _known(self, index: Any, name: str) -> Any:
        """An index whose masks are the same for all examples; examples with other masks run apart.
        vmap can't follow a mask whose count differs between examples."""
        if type(index) in _NESTED:
            return type(index)(self._known(part, name) for part in index)
        if not self._is_mask(index):
            return index
        with below_vmap(self.level):
            rows = all_of(index)
            self.split_by(rows, f"the mask of {name}")
            return rows[0]

    def _is_mask(self, index: Any) -> bool:
        """True for a mask of one example, outside of a vmap of the forward's own."""
        return self._is_own(index) and index.dtype == torch.bool

    def _asked_gradient(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """`requires_grad_` on something else than a parameter: in a transform of the forward's own,
        or with False."""
        value = args[0]
        wanted = by_name(("value", "requires_grad"), args, named).get("requires_grad", True)
        if self.slot(value) is None and wanted and level() != self.level:
            return func(*args, **named)
        if self.slot(value) is not None or (wanted and not is_lane(value)):
            raise Unserved(f"requires_grad_{place()}")
        if wanted and not bare(value).requires_grad:  # else it has a gradient already
            self._check_derives()
            with below_vmap(self.level):
                within(value).requires_grad_()
        return value

    def _check_derives(self) -> None:
        if not self.derives:
            raise Needs(DERIVING, f"a gradient within the forward{place()}")

    def _gradient(self, func: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """`torch.autograd.grad` for values of one example, of which each depends on its own
        example's values alone."""
        self._check_derives()
        given = by_name(_OF_GRADIENTS, args, named)
        values, by, factors = (_listed(given.pop(name, None)) for name in _OF_GRADIENTS)
        by = [self.copied(value) for value in by]
        if not all(self._is_own(value) for value in (*values, *by)):
            raise Unserved(f"a gradient by what all examples share{place()}")
        with below_vmap(self.level):
            rows = [all_of(value) for value in values]
            pairs = zip_longest(rows, factors)
            factors = [torch.ones_like(a) if b is None else self.rows(b) for a, b in pairs]
            found = func(rows, list(map(within, by)), factors, **given)
        return tuple(
            None if value is None else as_lane_like(value, like)
            for value, like in zip(found, by, strict=True)
        )

    def _fills_by_mask(self, target: Any, index: Any, value: Any) -> bool:
        """True for `target[mask] = number`."""
        is_number = isinstance(value, int | float)
        if isinstance(value, Tensor):
            is_number = not value.dim() and self.slot(value) is None
        return is_number and is_lane_of(target, self.level) and self._is_mask(index)

    def _filled(self, value: Tensor) -> Tensor:
        """A copy for each example of a new tensor that may have a batch dimension, of size 1."""
        with below_vmap(self.level):
            rows = value.expand(self.count, *value.shape).clone()
        return as_one_example(rows, self.level)

    def _read(self, func: Any, name: str, value: Tensor) -> Any:
        """A number that the forward reads."""
        with below_vmap(self.level):
            answers = all_of(value).detach()
            flat = answers.reshape(len(answers), -1)
            alike = are_alike(flat)
        if level() != self.level or len(flat) != self.count:
            raise Unserved(f"{name} within a vmap of its own{place()}")
        question = None
        if flat.dtype == torch.bool and flat.shape[1] == 1:
            self.questions += 1
            if self.settled or not alike:
                question = (self.questions, place())
                if question in self.settled:
                    return type(func(flat[0, 0]))(self.settled[question])
        if not alike:
            self._check_drawn(name)
            raise AnswersDiffer(flat, f"{name}{place()}", question)
        return func(answers[0])

    def _check_drawn(self, name: str) -> None:
        # The examples of a group could draw in another order, by its branch.
        if self.draws.calls or have_moved(self.drawn, generator_states(self.device)):
            raise Unserved(f"{name} may read what was drawn at random{place()}")

    def split_by(self, numbers: Tensor, name: str) -> None:
        """Raises AnswersDiffer unless the numbers of the examples, (n,), are all the same."""
        if not are_alike(numbers.reshape(len(numbers), -1)):
            self._check_drawn(name)
            raise AnswersDiffer(numbers.detach(), f"{name}{place()}")

    def _check_writes(self, target: Any, name: str) -> None:
        """Raises ValueError for a write into a parameter or a buffer."""
        if not isinstance(target, Tensor) or is_lane(target):
            return
        if self.computed.slot(target) is not None:
            raise Needs(COPYING, f"{name} changes a computed weight{place()}")
        target = bare(target)
        if not self.memory:
            self.memory = {memory_of(value) for value, _ in self.held}
        memory = memory_of(target)
        if id(target) in self.slots or memory in self.memory:
            raise ValueError(writes(self._name(lambda value: memory_of(value) == memory)))

    def _check_lanes(self, args: tuple[Any, ...], name: str) -> None:
        """Raises Needs for a write of what differs between examples into a tensor that they
        share."""
        if not self.fills and isinstance(args[0], Tensor) and not is_lane(args[0]):
            given = tensors_among(args[1:])
            if any(is_lane(value) or self.slot(value) is not None for value in given):
                raise Needs(FILLING, f"{name} writes into a tensor of all examples{place()}")

    def copied(self, value: Any) -> Any:
        """The copy for each example of a trainable parameter; any other value as it is."""
        if type(value) in _NESTED:
            return type(value)(map(self.copied, value))
        slot = self.slot(value)
        if slot is None:
            if level() == self.level or not isinstance(value, Tensor):
                return value
            return self._copied_inside(value)
        if slot.index not in self.copies:
            with below_vmap(self.level), torch.enable_grad():
                leaf = value.detach().expand(self.count, *value.shape).requires_grad_()
                self.note(leaf, lambda grads: [Rows(slot, grads)])
            self.copies[slot.index] = as_one_example(leaf, self.level)
        return self.copies[slot.index]

    def _copied_inside(self, value: Tensor) -> Tensor:
        """The copy for each example of a parameter that a transform of the forward's own maps."""
        if self.slot(bare(value)) is None or bare(value) is value:
            return value
        if not is_lane(value):
            raise Unserved(f"a parameter within a gradient of its own{place()}")
        return as_lane_like(self.copied(within(value)), value)

    def check(self) -> None:
        """Raises ValueError if the pass has changed a parameter or a buffer; the message names
        it."""
        before = {(id(value), version) for value, version in self.held}
        now = {(id(value), value._version) for value, _ in state_of(self.modules)}
        if now != before:
            raise ValueError(
                writes(self._name(lambda value: (id(value), value._version) not in before))
            )

    def _name(self, is_it: Callable[[Tensor], bool]) -> str:
        named = tensors_of(self.modules[0]).items()
        return next((name for name, value in named if is_it(value)), "its parameters or buffers")


# functions with rules that are written in Python
PYTHON = {"embedding_bag", "lstm_layer", "applied"}


def _listed(values: Any) -> list[Any]:
    if values is None or isinstance(values, Tensor):
        return [] if values is None else [values]
    return list(values)
