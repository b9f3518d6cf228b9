"""A forward pass that notes where each layer's output gradient appears, and what follows from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from discreet.privacy.rules.terms import Slot, Term

Terms = Callable[[Tensor], list[Term]]


@dataclass(frozen=True, slots=True)
class Use:
    """One layer call: where its output gradient appears, and the terms that follow from that gradient.

    The edge is taken when the layer returns, so that an in-place activation after it does not move it.
    """

    edge: GradientEdge
    terms: Terms


@dataclass(slots=True)
class Tape:
    """The layer calls of one forward pass over `count` examples, for norms of one order.

    Attributes:
      slots: the place of each trainable parameter, by identity.
    """

    slots: Mapping[int, Slot]
    count: int
    order: int
    uses: list[Use] = field(default_factory=list)

    def slot(self, parameter: Tensor | None) -> Slot | None:
        """The parameter's place in the flat vector; None for a frozen one and for no parameter at all."""
        return self.slots.get(id(parameter))

    def add(self, outputs: Tensor, terms: Terms) -> None:
        """Notes a call with trainable parameters and these outputs, (n, ...)."""
        self.uses.append(Use(get_gradient_edge(outputs), terms))

    def rows(self, values: Tensor, *, least: int, most: int | None = None) -> None:
        """Raises ValueError unless `values` has the examples in its first dimension, and so many dimensions."""
        dims = values.dim()
        if dims < least or (most is not None and dims > most) or len(values) != self.count:
            wanted = f"{least}" if most == least else f"{least} or more"
            raise ValueError(
                f"a layer reads a tensor of shape {tuple(values.shape)}: it needs {wanted} dimensions, "
                f"the first of them the {self.count} examples"
            )


# From the tape, a layer and its inputs (n, ...) to its outputs (n, ...), with what it does noted on the tape.
Rule = Callable[[Tape, Any, Tensor], Tensor]


def unchanged(layer: nn.Module) -> bool:
    """Whether a layer does what its class says: it has no hooks and no forward of its own."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks or layer._backward_pre_hooks
    return not hooks and "forward" not in layer.__dict__
