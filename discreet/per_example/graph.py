"""Models whose forward is their own code: the computation as a list of layers and operations, found once per model.

A copy of the model, in which every layer with a rule stands for itself, is called with a symbol for the inputs
(torch.fx), and what it does with that symbol is noted: layers, and operations between them. No example is seen then, so
that no example decides what is noted. A program is this list, run with rules for the layers. Each operation is checked
at each run (`operations.py`): row i of what it gives follows from row i of what it gets. So what is clipped for an
example follows from that example alone, whatever the forward says. A forward that branches on data, writes into its
modules, makes tensors, or does something that is not known, gives no program.

That the program does what the model does rests on more than the trace: it is made anew if a module was replaced, or a
mode, an attribute or a forward changed; and its gradients are compared with the model's own on made-up examples
(`per_example.py`). What forward reads elsewhere (global variables, files) counts as it stood then.
"""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg
from torch.fx.proxy import GraphAppendingTracer, TraceError

from discreet.per_example.operations import CHECKS, Check, Count, Fixed, Unserved, Weight, leaves, plain, with_copies
from discreet.per_example.terms import Rows, Rule, Tape, unchanged

Modules = Mapping[str, nn.Module]
_BASE = frozenset(nn.Module().__dict__)  # what every module has
_ARITHMETIC = (operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv, operator.pow)
_ATTRIBUTES = ("shape", "ndim", "dtype", "device", "values", "indices")
_NOTED = (Node, bool, int, float, str, type(None), type(...), torch.dtype, torch.device, torch.memory_format)
# What a forward may raise that was given a symbol where it expects a tensor.
CONFUSED = (TraceError, TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError)


@dataclass(frozen=True, slots=True)
class Step:
    """One node of the graph: its place, what it calls, and the places of values that nobody reads after it."""

    node: Node
    check: Check | None
    last: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """The steps of a forward pass."""

    steps: tuple[Step, ...]

    def layers(self) -> list[str]:
        """Names of the layers, one for each call."""
        return [str(step.node.target) for step in self.steps if step.node.op == "call_module"]

    def weights(self) -> list[str]:
        """Names of the parameters and buffers that operations read."""
        return [str(step.node.target) for step in self.steps if step.node.op == "get_attr"]


# By model: what it was when it was traced, and its program.
_programs: WeakKeyDictionary[nn.Module, tuple[object, Program | None]] = WeakKeyDictionary()


def traced(model: nn.Module, known: Callable[[nn.Module], bool]) -> Program | None:
    """The program of a model; None if its forward can't be followed, or if two traces of it differ.

    Args:
      known: whether a layer has a rule.
    """
    modules = dict(model.named_modules())
    if not all(unchanged(module) for module in modules.values()):
        return None
    try:
        graph, again = (_trace(model, modules, known) for _ in range(2))
    except CONFUSED:
        return None
    steps = _steps(graph)
    return Program(steps) if steps and str(graph) == str(again) else None


def program_of(
    model: nn.Module, known: Callable[[nn.Module], bool], agrees: Callable[[Program], bool]
) -> Program | None:
    """The program of a model as it now is, traced if it is new or has changed; None if there is none.

    Args:
      agrees: whether a new program does what the model does; no example may decide it.
    """
    state = [(unchanged(module), known(module) or own_attributes(module)) for module in model.modules()]
    held = _programs.get(model)
    if held and held[0] == state:
        return held[1]
    program = traced(model, known)
    trusted = program if program is not None and agrees(program) else None
    _programs[model] = (state, trusted)
    return trusted


def made_up(model: nn.Module, inputs: Tensor) -> Tensor:
    """Three examples of the inputs' type and shape, the same each time: between 0 and 1, or numbers of embeddings."""
    draws, shape = torch.Generator().manual_seed(40093), (3, *inputs.shape[1:])
    if inputs.is_floating_point():
        return torch.rand(shape, generator=draws, dtype=inputs.dtype).to(inputs.device)
    tables = [part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding | nn.EmbeddingBag)]
    return torch.randint(min(tables, default=2), shape, generator=draws).to(inputs)


def _trace(model: nn.Module, modules: Modules, known: Callable[[nn.Module], bool]) -> Graph:
    """The graph of a symbol's way through a copy of the model; TraceError if the copy changes its own attributes."""
    graph = Graph()
    tracer = GraphAppendingTracer(graph)
    symbol = tracer.create_proxy("placeholder", "inputs", (), {})
    named = [*model.named_parameters(), *model.named_buffers()]
    memo: dict[int, Any] = {id(value): tracer.create_proxy("get_attr", name, (), {}) for name, value in named}
    for name, module in modules.items():
        if known(module):
            memo[id(module)] = partial(_called, tracer, name)
    copied = copy.deepcopy(model, memo)
    before = _attributes(copied)
    outputs = copied(symbol)
    if _attributes(copied) != before:
        raise TraceError("forward changes its module")
    graph.output(outputs.node)
    return graph


def _called(tracer: GraphAppendingTracer, name: str, inputs: Any) -> Any:
    return tracer.create_proxy("call_module", name, (inputs,), {})


def _attributes(module: Any) -> list[object]:
    """All that a module and those in it hold beside parameters, buffers and layers with rules."""
    if not isinstance(module, nn.Module):
        return []
    return [own_attributes(module), *(_attributes(inner) for inner in module._modules.values())]


def own_attributes(module: nn.Module) -> object:
    """A value that changes if an attribute, a mode or the forward of a module does."""
    own = [(name, _still(value)) for name, value in module.__dict__.items() if name not in _BASE]
    named = (*module._parameters.items(), *module._buffers.items())
    tensors = [(name, isinstance(value, Tensor) or id(value)) for name, value in named]  # None, and symbols in a copy
    children = [(name, id(inner)) for name, inner in module._modules.items()]
    return type(module), type(module).forward, module.training, own, tensors, children


def _still(value: Any) -> object:
    """The contents of plain values, and the identity of others."""
    if isinstance(value, tuple | list | set | frozenset):
        return type(value), [_still(part) for part in value]
    if isinstance(value, dict):
        return [(name, _still(part)) for name, part in value.items()]
    return (type(value), value) if isinstance(value, bool | int | float | complex | str | bytes) else id(value)


def _steps(graph: Graph) -> tuple[Step, ...]:
    """The nodes in order, without those that note a parameter that is not read; none if one can't be served."""
    nodes = [node for node in graph.nodes if node.op != "get_attr" or node.users]
    last = {used: node for node in nodes for used in node.all_input_nodes}
    found = []
    for node in nodes:
        check = None if _asks_shape(node) else CHECKS.get(node.target)
        foreign = node.op in ("call_function", "call_method") and check is None and not _asks_shape(node)
        if foreign or not all(isinstance(value, _NOTED) for value in leaves((node.args, node.kwargs))):
            return ()
        found.append(Step(node, check, tuple(used for used in node.all_input_nodes if last[used] is node)))
    return tuple(found)


def _asks_shape(node: Node) -> bool:
    return node.target in ("size", "dim") or (node.target is getattr and node.args[1] in _ATTRIBUTES)


def is_shared(layers: Sequence[nn.Module], others: Sequence[Tensor]) -> bool:
    """True if a trainable parameter is used by two calls of layers, or by one and beside."""
    parts = [part for layer in layers for part in (layer.modules() if layer._modules else (layer,))]
    used = [value for part in parts for value in part._parameters.values() if value is not None]
    counts = Counter(id(value) for value in (*used, *others) if value.requires_grad)
    return any(count > 1 for count in counts.values())


@dataclass(frozen=True, slots=True)
class Run:
    """One forward pass of a program over the examples of a tape."""

    tape: Tape
    modules: Modules
    rules: Mapping[type[nn.Module], Rule]

    def outputs(self, program: Program, inputs: Tensor) -> Tensor:
        """The model's outputs, (n, ...), with the layers' uses on the tape.

        Raises:
          Unserved: an operation, as it is called here, may mix examples; a parameter is read by something that is not a
            layer, or by two layers; a tensor is changed in place that a layer or the caller still needs.
        """
        if is_shared([self.modules[name] for name in program.layers()], list(map(self._named, program.weights()))):
            raise Unserved
        try:
            return self._outputs(program, inputs)
        except CONFUSED as error:
            raise Unserved from error

    def _outputs(self, program: Program, inputs: Tensor) -> Tensor:
        values: dict[Node, Any] = {}
        read = [(inputs, inputs._version)]
        for step in program.steps:
            args: Any = map_arg(step.node.args, values.__getitem__)
            named: Any = map_arg(step.node.kwargs, values.__getitem__)
            if step.node.op == "output":
                if any(value._version != version for value, version in read):
                    raise Unserved
                return self._rows(args[0])
            before = len(self.tape.uses)
            values[step.node] = inputs if step.node.op == "placeholder" else self._value(step, args, named)
            if step.node.op == "call_module" and len(self.tape.uses) > before:
                read.append((args[0], args[0]._version))
            for used in step.last:
                del values[used]
        raise AssertionError("a graph ends with its output")

    def _value(self, step: Step, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        target = step.node.target
        if step.node.op == "get_attr":
            return self._held(self._named(str(target)))
        if step.node.op == "call_module":
            layer = self.modules[str(target)]
            return self._checked(self.rules[type(layer)](self.tape, layer, self._rows(args[0])))
        if step.check is None:
            return _answer(step.node, args)
        return self._called(step.check, target, args, named)

    def _called(self, check: Check, target: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        given = list(leaves((args, named)))
        if not any(isinstance(value, Tensor | Fixed | Weight) for value in given):
            return _number(target, args)
        if any(isinstance(value, Weight) for value in given):
            args = with_copies(check, args)
        check(args, named)
        call = getattr(Tensor, target) if isinstance(target, str) else target
        found = call(*(plain(value) for value in args), **{name: plain(value) for name, value in named.items()})
        if isinstance(given[0], Weight) and target is operator.getitem:
            return Weight(self._checked(found))
        return (
            self._checked(found) if any(isinstance(value, Tensor) for value in leaves((args, named))) else Fixed(found)
        )

    def _named(self, name: str) -> Tensor:
        owner, _, attribute = name.rpartition(".")
        value = getattr(self.modules[owner], attribute)
        if not isinstance(value, Tensor):
            raise Unserved
        return value

    def _held(self, value: Tensor) -> Fixed | Weight:
        """A buffer or a frozen parameter as it is; a trainable one as a copy for each example, noted on the tape."""
        if not value.requires_grad:
            return Fixed(value)
        slot = self.tape.slot(value)
        if slot is None:
            raise Unserved
        copies = value.detach().expand(self.tape.count, *value.shape).requires_grad_()
        self.tape.add(copies, lambda grads: [Rows(slot, grads)])
        return Weight(copies)

    def _checked(self, found: Any) -> Any:
        """The outputs of an operation, if they are tensors of the examples, each with n rows."""
        for value in leaves(found):
            self._rows(value)
        return found

    def _rows(self, value: Any) -> Tensor:
        if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != self.tape.count:
            raise Unserved
        return value


def _answer(node: Node, args: tuple[Any, ...]) -> Any:
    """A shape, a part of it, or another property: the number of examples is marked as such."""
    value = args[0]
    if isinstance(value, tuple) and args[1:] in (("values",), ("indices",)):  # what max(dim) gives
        return getattr(value, args[1])
    tensor = plain(value)
    if not isinstance(tensor, Tensor) or args[1:] in (("values",), ("indices",)):
        raise Unserved
    if node.target == "size" or args[1:] == ("shape",):
        shape = (*tensor.shape,) if isinstance(value, Fixed) else (Count(len(tensor)), *tensor.shape[1:])
        return shape[args[1]] if node.target == "size" and len(args) > 1 else shape
    return tensor.dim() if node.target == "dim" else getattr(tensor, str(args[1]))


def _number(target: Any, args: tuple[Any, ...]) -> Any:
    """Arithmetic with numbers; what follows from the number of examples stays marked."""
    if target is operator.getitem and isinstance(args[0], tuple) and isinstance(args[1], int | slice):
        return args[0][args[1]]
    if target not in _ARITHMETIC:
        raise Unserved
    found = target(*(plain(value) for value in args))
    return Count(found) if any(isinstance(value, Count) for value in args) else found
