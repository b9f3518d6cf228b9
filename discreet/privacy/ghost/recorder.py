"""Watch a forward pass: every torch function that is handed a parameter is written down, or refused.

A torch function mode sees each call before it runs, so the books are complete for whatever a model's code does with
its parameters: modules, functional calls, tied weights and reused modules look the same. A call that gets a parameter
and has no rule raises Uncovered. What no mode can see (compiled code, aliases of parameters made beforehand) is left
to the comparison with plain autograd in trial.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from discreet.privacy.ghost.terms import Entry, Slot
from discreet.privacy.ghost.uncovered import Uncovered

Entries = Callable[[Tensor], Iterable[Entry]]
Rule = Callable[..., Any]

_CONTAINERS = (list, tuple, dict)

# What a forward pass may ask of a parameter without using its value.
_PROPERTIES = (
    "shape",
    "dtype",
    "device",
    "layout",
    "ndim",
    "requires_grad",
    "is_cuda",
    "is_sparse",
    "is_nested",
    "is_mkldnn",
)
_READS = {getattr(Tensor, name).__get__ for name in _PROPERTIES} | {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.is_floating_point,
    Tensor.is_contiguous,
    Tensor.__len__,
}


@dataclass(frozen=True, slots=True)
class Use:
    """One layer call: where its output gradient appears, and what follows from that gradient.

    The edge is taken when the layer returns, so that an in-place activation after it does not move it.
    """

    edge: GradientEdge
    entries: Entries
    inputs: Tensor
    version: int

    def read(self, grads: Tensor) -> Iterable[Entry]:
        """What it adds, given the gradients at the output; Uncovered if the inputs were overwritten since."""
        if self.inputs._version != self.version:
            raise Uncovered("a layer's inputs were changed in place after the layer ran")
        return self.entries(grads)


@dataclass(slots=True)
class Records:
    """The uses of one forward pass over `count` examples, and the slots of the trainable parameters by identity."""

    slots: Mapping[int, Slot]
    count: int
    uses: list[Use] = field(default_factory=list)
    transposed: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)  # a view's identity to (view, parameter)

    def slot(self, parameter: Tensor | None) -> Slot | None:
        """The parameter's place in the flat vector; None for a frozen one and for a tensor that is no parameter."""
        return self.slots.get(id(parameter))

    def add(self, inputs: Tensor, outputs: Tensor, entries: Entries) -> None:
        """Write down a call with inputs and outputs (n, ...), examples first."""
        if inputs.shape[0] != self.count or outputs.shape[0] != self.count:
            raise Uncovered("a layer whose first dimension is not the batch")
        if not outputs.requires_grad:
            raise Uncovered("a parameter used where gradients are switched off")
        self.uses.append(Use(get_gradient_edge(outputs), entries, inputs, inputs._version))

    def refuse(self, *values: object) -> None:
        """Raise Uncovered if a parameter stands where a rule expects data."""
        if self.holds_parameter(values):
            raise Uncovered("a parameter used as a layer's input")

    def holds_parameter(self, values: Iterable[object]) -> bool:
        """Whether a trainable parameter is among the values, or in a list, tuple or dict among them."""
        slots, transposed = self.slots, self.transposed
        for value in values:
            if id(value) in slots or id(value) in transposed:
                return True
            if isinstance(value, _CONTAINERS):
                parts = value.values() if isinstance(value, dict) else value
                if self.holds_parameter(parts):
                    return True
        return False


class Recorder(TorchFunctionMode):
    """Runs every call by its rule if it has one, or as it is if no parameter is among its arguments."""

    def __init__(self, records: Records, rules: Mapping[Any, Rule]) -> None:
        super().__init__()
        self._records = records
        self._rules = rules

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        rule = self._rules.get(func)
        if rule is not None:
            return rule(self._records, *args, **(kwargs or {}))
        held = self._records.holds_parameter(args) or (kwargs and self._records.holds_parameter(kwargs.values()))
        if held and func not in _READS:
            raise Uncovered(f"a parameter used directly, by {getattr(func, '__name__', func)}")
        return func(*args, **(kwargs or {}))
