"""The objective: a model's loss as a function of its parameters, differentiated for each
example."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, is_dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map

from discreet.layers.terms import Parts, Slot
from discreet.per_example.attributes import Outside, put_back
from discreet.per_example.checkpoints import undone
from discreet.per_example.graphs import Graphs, graphs_in

Tree = Any  # a tensor, or tuples and dictionaries of tensors, each with one row an example
Loss = Callable[[Any, Any], Tensor]
PADDING = -100  # the target of an ignored position, as in PyTorch

# A power of two, so that scaling is exact. It keeps the squares of small gradients above the
# smallest float: without it, inputs of 1e18 with output gradients of 1e-24 would have a norm of 0
# by the product rule, and pass unclipped.
LOSS_SCALE = 2.0**20
_LOSS_SCALE = torch.tensor(LOSS_SCALE)  # a tensor is multiplied by a tensor in half the time


def cross_entropy(outputs: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
    """Cross-entropy of each example, (n,).

    outputs are logits (n, classes) or, as torch.nn.CrossEntropyLoss takes them, (n, classes,
    positions...); targets are class numbers (n,) or (n, positions...). If an example has positions
    (a sequence), its loss is the mean over those whose target is not `PADDING`, -100; without any,
    the loss and its gradient are 0. The mean divides by the example's own number of positions,
    never by that of the batch, so it depends on that example alone. `weights` (classes,) multiply
    the loss of each class; nothing is divided by them.

    >>> targets = torch.tensor([[0, 1, 4], [2, -100, -100], [-100, -100, -100]])
    >>> cross_entropy(torch.zeros(3, 5, 3), targets)
    tensor([1.6094, 1.6094, 0.0000])
    """
    values = functional.cross_entropy(
        outputs, targets, weights, reduction="none", ignore_index=PADDING
    )
    if targets.dim() == 1:
        return values
    return values.flatten(1).sum(1) / (targets != PADDING).flatten(1).sum(1).clamp(min=1)


# Losses made of torch.nn's, each with its criterion; and the forwards of those, as torch has them.
_criteria: WeakKeyDictionary[Any, nn.Module] = WeakKeyDictionary()
_FORWARDS = {
    kind: kind.forward for kind in vars(nn.modules.loss).values() if hasattr(kind, "forward")
}


def made_of(criterion: nn.Module, loss: Loss) -> Loss:
    """The loss, known as one that calls a criterion of torch.nn."""
    _criteria[loss] = criterion
    return loss


def is_plain(criterion: nn.Module) -> bool:
    """True if a criterion does what its class in torch.nn does: it has no hooks, nor has every
    module, and no forward of its own."""
    everywhere = nn.modules.module
    hooks = [criterion.__dict__[name] for name in criterion.__dict__ if "hooks" in name]
    hooks += [held for name, held in vars(everywhere).items() if name.startswith("_global_forward")]
    kind = type(criterion)
    return (
        not any(hooks)
        and "forward" not in criterion.__dict__
        and kind.forward is _FORWARDS.get(kind)
    )


def is_of_package(loss: Any) -> bool:
    """True for a loss of this package, which reads only outputs and targets."""
    loss = getattr(loss, "func", loss)
    if loss in _criteria:
        return is_plain(_criteria[loss])
    named = loss if hasattr(loss, "__qualname__") else type(loss)
    home = sys.modules.get(str(named.__module__))
    is_ours = named.__module__.startswith("discreet.")
    return is_ours and getattr(home, named.__qualname__, None) is named


@dataclass(frozen=True, slots=True)
class Objective:
    """A model's loss as a function of its parameters, for norms of one order. Made by
    `objective_of`.

    Attributes:
      modules: the model and its modules, itself first.
      parameters: all parameters, in order.
      slots: slots of the trainable ones, by identity.
      of_units: True if an example is a unit of several rows: inputs and targets are (n, rows, ...),
        the model sees the rows of one unit as its batch, and the loss of the unit is their mean.
      dtype: type of norms and sums: float64 if the parameters are, otherwise float32.
      autocast: the type that torch.autocast gives to the model and the loss, or None. It is off for
        everything else: a norm in bfloat16 could be 0.5 % too small, and the clipped gradient too
        long by as much.
      memory: `memory_for` the model and the loss, for passes over data.
    """

    model: nn.Module
    loss: Loss
    order: int
    modules: tuple[nn.Module, ...]
    parameters: tuple[Tensor, ...]
    slots: Mapping[int, Slot]
    dtype: torch.dtype
    autocast: torch.dtype | None
    of_units: bool = False
    memory: Outside | None = None

    @property
    def kept(self) -> tuple[nn.Module, ...]:
        """The modules whose attributes a pass may change: those of the model, and of a loss that is
        a module."""
        if isinstance(self.loss, nn.Module):
            return (*self.modules, *modules_of(self.loss))
        return self.modules

    def put_back(self) -> AbstractContextManager[None]:
        """A context with one pass: what it leaves is undone."""
        return put_back(self.kept, self.memory)

    def put_back_own(self) -> AbstractContextManager[None]:
        """The same for a backward pass, which only code of one's own can write in."""
        return nullcontext() if self.memory is None else self.put_back()

    @property
    def rounds(self) -> bool:
        """True if the model computes in bfloat16."""
        return self.autocast is not None or any(
            value.dtype == torch.bfloat16 for value in self.parameters
        )

    def casting(self, *, on: bool = True) -> AbstractContextManager[Any]:
        """A context in which torch.autocast is as the caller has it, or off."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(self.parameters[0].device.type, self.autocast, enabled=on)

    def trainable(self) -> list[Tensor]:
        """The parameters that have slots, in the slots' order."""
        return [value for value in self.parameters if id(value) in self.slots]

    def parts(self) -> Parts:
        """An empty sum of gradients."""
        shapes = [slot.shape for slot in self.slots.values()]
        return Parts(shapes, self.parameters[0], self.dtype)

    def zeros(self, count: int) -> Tensor:
        """Zeros, (count,), of the norms' type."""
        return self.parameters[0].new_zeros(count, dtype=self.dtype, requires_grad=False)

    def outputs(self, inputs: Tree) -> Any:
        """The outputs of the model for a batch. A tuple is passed as arguments, a dictionary as
        arguments by name."""
        inputs = given(inputs)
        with self.casting(), undone():
            if isinstance(inputs, Tensor):
                return self.model(inputs)
            if isinstance(inputs, dict):
                return self.model(**inputs)
            return self.model(*inputs)

    def losses(self, outputs: Any, targets: Tree) -> Tensor:
        """The loss of each example. Raises ValueError if its shape is not (n,)."""
        with self.casting():
            return one_each(self.loss(outputs, given(targets)), count_of(targets))

    def unit_loss(self, inputs: Tree, targets: Tree) -> Tensor:
        """The loss (1,) of one unit, whose rows are the batch: the mean over them."""
        return self.losses(self.outputs(inputs), targets).mean(0, keepdim=True)

    def has_known_gradient(self, targets: Tree) -> bool:
        """True if `logit_gradients` gives the gradients of the loss."""
        known = self.loss is cross_entropy and isinstance(targets, Tensor)
        return known and targets.dim() == 1 and targets.dtype == torch.int64


def one_each(losses: Any, count: int) -> Tensor:
    """The losses, checked to be (count,)."""
    if not isinstance(losses, Tensor) or losses.shape != (count,):
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(
            f"loss must give one value an example, ({count},), not {shape}: wrap a loss of "
            "torch.nn in per_example_loss, or take the mean or sum over each example's own "
            "positions. A loss that the model computes itself is a mean over the batch: compute "
            "it from the outputs"
        )
    return losses


def as_tree(values: Any) -> Tree:
    """Examples as tensors in tuples and dictionaries, or as a batch of graphs if they are one.
    Mappings and dataclasses become dictionaries, lists become tuples."""
    if isinstance(values, Tensor | Graphs):
        return values
    tree: Tree = values
    if is_dataclass(values) and not isinstance(values, type):
        tree = {each.name: as_tree(getattr(values, each.name)) for each in fields(values)}
    elif isinstance(values, Mapping):
        tree = {name: as_tree(value) for name, value in values.items()}
    elif isinstance(values, tuple | list):
        tree = tuple(map(as_tree, values))
    return graphs_in(tree) or tree


def check_tensors(*trees: Tree) -> None:
    """Raises ValueError unless everything in trees is None or a tensor, or graphs: of another value
    it is not known which part is an example's."""
    for value in itertools.chain.from_iterable(map(batches_in, trees)):
        if isinstance(value, Tensor) and (value.is_nested or value.layout != torch.strided):
            kind = "nested" if value.is_nested else "sparse"
            raise ValueError(f"inputs and targets must be dense tensors, and one is {kind}")
        if not isinstance(value, Tensor | Graphs):
            raise ValueError(
                "inputs and targets must be tensors with a row for each example, and one is "
                f"{type(value).__name__}: make it a tensor, or if all examples share it an "
                "attribute of the model"
            )


def given(tree: Tree) -> Tree:
    """Examples in the form that a model or a loss takes."""
    if isinstance(tree, Tensor):
        return tree
    return mapped(lambda value: value.tree if isinstance(value, Graphs) else value, tree)


def mapped(function: Callable[[Any], Any], tree: Tree) -> Tree:
    """A tree with `function` applied to each tensor and each batch of graphs; both have a row an
    example."""
    kinds = (Tensor, Graphs)
    if isinstance(tree, kinds):
        return function(tree)
    if type(tree) is tuple:
        return tuple([mapped(function, part) for part in tree])
    if type(tree) is dict:
        return {name: mapped(function, part) for name, part in tree.items()}
    return tree_map(
        lambda value: function(value) if isinstance(value, kinds) else value, tree, is_leaf=_is_leaf
    )


def with_floats(function: Callable[[Tensor], Tensor], tree: Tree) -> Tree:
    """A tree with `function` applied to each tensor of floats; not to those of graphs."""

    def changed(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return function(value)
        return value

    return mapped(changed, tree)


def detached(tree: Tree) -> Tree:
    """The same values for a forward that takes gradients by its inputs, and marks them for it."""
    return mapped(lambda value: value.detach() if isinstance(value, Tensor) else value, tree)


def batches_in(tree: Tree) -> list[Any]:
    """The tensors and batches of graphs of a tree; not what is None."""
    if isinstance(tree, Tensor):
        return [tree]
    if type(tree) in (tuple, dict):
        parts = tree.values() if isinstance(tree, dict) else tree
        return [value for part in parts for value in batches_in(part)]
    return [value for value in tree_leaves(tree, is_leaf=_is_leaf) if value is not None]


def _is_leaf(value: Any) -> bool:
    return isinstance(value, Graphs)


def count_of(*trees: Tree) -> int:
    """The number of examples. Raises ValueError unless all tensors have this many rows."""
    leaves = trees if all(isinstance(tree, Tensor) for tree in trees) else batches_in(trees)
    counts = {value.shape[0] if value.dim() else 0 for value in leaves if isinstance(value, Tensor)}
    counts |= {len(value) for value in leaves if isinstance(value, Graphs)}
    if len(counts) != 1:
        raise ValueError(
            f"inputs and targets must be equally many, not {' and '.join(map(str, sorted(counts)))}"
        )
    return counts.pop()


def rows_of(tree: Tree, index: Any) -> Tree:
    """Some of the examples."""
    return mapped(lambda value: value[index], tree)


def filled(tree: Tree, rows: int) -> Tree:
    """A batch padded with copies of its last row to `rows` rows. With fewer rows other kernels run,
    which round differently."""
    if all(len(part) >= rows for part in batches_in(tree)):
        return tree
    places = torch.arange(rows)
    return mapped(
        lambda part: part if len(part) >= rows else part[places.clamp(max=len(part) - 1)], tree
    )


def objective_of(model: nn.Module, loss: Loss, *, order: int = 2) -> Objective:
    """The objective of a model and a loss.

    Raises:
      ValueError: there are no parameters, their types are not float32, float64 or bfloat16, they
        are on several devices, or a lazy layer has none yet; or torch.autocast is on for a type
        other than bfloat16, or inference mode.
    """
    modules = modules_of(model)
    parameters = parameters_of(*modules)
    if any(map(is_lazy, parameters)):
        raise ValueError(
            "a lazy layer has no parameters before its first pass: call the model once on an "
            "example"
        )
    if torch.is_inference_mode_enabled():
        raise ValueError("PyTorch's inference mode, which computes no gradient, is on: leave it")
    kinds = {value.dtype for value in parameters}
    allowed = kinds == {torch.float64} or (kinds and kinds <= {torch.float32, torch.bfloat16})
    if not allowed or len({value.device for value in parameters}) != 1:
        raise ValueError(
            "the model must have parameters on one device: all float32, all float64, or bfloat16 "
            f"(with float32 or not){_named_type(model)}"
        )
    device = parameters[0].device.type
    if torch.is_autocast_enabled(device):
        autocast = torch.get_autocast_dtype(device)
    else:
        autocast = None
    if autocast not in (None, torch.bfloat16):
        raise ValueError(
            f"torch.autocast must be for torch.bfloat16, not {autocast}: small gradients would be "
            "lost"
        )
    trained = (value for value in parameters if value.requires_grad and value.numel())
    slots = {id(value): Slot(index, value.shape) for index, value in enumerate(trained)}
    if torch.float64 in kinds:
        dtype = torch.float64
    else:
        dtype = torch.float32
    return Objective(model, loss, order, modules, parameters, slots, dtype, autocast)


def _named_type(model: nn.Module) -> str:
    """The name and type of the first parameter of a type that is not served, in words."""
    for name, value in model.named_parameters():
        if value.is_complex():
            return f"; {name} is {value.dtype}: hold it as float32 by torch.view_as_real"
        if value.dtype not in (torch.float32, torch.float64, torch.bfloat16):
            return f"; {name} is {value.dtype}"
    return ""


def modules_of(model: nn.Module) -> tuple[nn.Module, ...]:
    """A model and all modules in it, each once, in the order of `model.modules()` but twice as
    fast."""
    found = dict[nn.Module, None]()
    waiting = [model]
    while waiting:
        module = waiting.pop()
        if module not in found:
            found[module] = None
            waiting += [part for part in reversed(module._modules.values()) if part is not None]
    return tuple(found)


def parameters_of(*modules: nn.Module) -> tuple[nn.Parameter, ...]:
    """The parameters that modules hold directly, each once, in order."""
    owned = (
        value for module in modules for value in module._parameters.values() if value is not None
    )
    return tuple({id(value): value for value in owned}.values())


def trainable(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are trained, clipped, noised and sent: those with a gradient, tied ones
    once, in the order of model.parameters(). Frozen ones (requires_grad is False) keep their
    initial values."""
    return [value for value in parameters_of(*modules_of(model)) if value.requires_grad]


def logit_gradients(logits: Tensor, targets: Tensor) -> Tensor:
    """The gradient of LOSS_SCALE times the cross-entropy at logits (n, classes)."""
    if logits.shape[0] != targets.shape[0]:
        raise ValueError(
            f"the model must give one row of logits an example, {targets.shape[0]}, not "
            f"{logits.shape[0]}"
        )
    wide = logits.float() if logits.itemsize < 4 else logits
    if int(targets.min()) != PADDING:
        return softmax_minus_one_hot(wide, targets).mul_(_LOSS_SCALE).to(logits.dtype)
    counted = targets != PADDING
    found = softmax_minus_one_hot(wide, targets.where(counted, 0)).mul_(_LOSS_SCALE)
    return found.masked_fill_(~counted.unsqueeze(1), 0).to(logits.dtype)


def softmax_minus_one_hot(logits: Tensor, targets: Tensor) -> Tensor:
    """The gradient of the cross-entropy at logits (..., classes), for class numbers (...)."""
    return logits.softmax(-1).scatter_(-1, targets.unsqueeze(-1), -1.0, reduce="add")
