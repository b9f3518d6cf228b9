"""Graphs in a batch, the way models of graphs take them: one graph, of which the examples are the parts that no edge
joins. Nodes and edges have a row each, and `batch` has the number of the graph of each node.

An operation within one kind of rows is watched as if each row were an example. Between kinds rows move by the numbers
of rows (`x[edge_index[0]]`, `index_add`), which must stay within an example; that is checked on the numbers themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_leaves, tree_unflatten

from discreet.per_example.calls import READS, Call, words
from discreet.per_example.layouts import CONSTANT, FIRST, Layout, Mixed, Unserved, placed
from discreet.per_example.terms import Lookup, Outer, Pair, Rows, Term

_SCATTERING = ("index_add", "scatter_add", "scatter_reduce", "index_reduce", "scatter")
# What gives the same numbers, or some of them, in other dimensions.
_ARRANGING = words(
    "getitem unbind select view view_as reshape unsqueeze squeeze expand expand_as repeat flip contiguous clone long "
    "to transpose t stack cat detach flatten"
)
STRAY = Mixed("the number of a node or of a graph is used as a number")
_RULE = (
    "in a tuple rows of nodes come before edge_index, and rows of edges after it; by name those of edges and graphs "
    "begin with edge and graph"
)


def owners_taken(owners: Tensor, places: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The rows of some of the `count` examples, in the order of `places`, the new number of the example of each, and
    how far its first row has moved. owners (rows,): the example of each row."""
    sizes = torch.bincount(owners, minlength=count)
    starts, taken = sizes.cumsum(0) - sizes, sizes[places]
    new = torch.arange(len(places), device=owners.device).repeat_interleave(taken)
    begins = taken.cumsum(0) - taken
    within = torch.arange(len(new), device=owners.device) - begins[new]
    rows = owners.argsort(stable=True)[starts[places][new] + within]
    return rows, new, begins - starts[places]


@dataclass(frozen=True, slots=True, eq=False)
class Graphs:
    """A batch of graphs. It has the graphs for its rows: `len` counts them, and an index picks some.

    Attributes:
      tree: what the model takes: a tuple, or a dictionary of tensors by name.
      names: of each tensor of the tree, whether it has a row a node, edge or graph, or is "edge_index" or "batch".
    """

    tree: Any
    names: tuple[str, ...]

    def leaf(self, name: str) -> Tensor:
        found: Tensor = tree_leaves(self.tree)[self.names.index(name)]
        return found

    @property
    def owners(self) -> dict[str, Tensor]:
        """The graph of each node, edge and graph."""
        batch, edges = self.leaf("batch"), self.leaf("edge_index")
        return {"node": batch, "edge": batch[edges[0]], "graph": torch.arange(len(self), device=batch.device)}

    def __len__(self) -> int:
        batch = self.leaf("batch")
        return int(batch[-1]) + 1 if len(batch) else 0

    def __getitem__(self, index: Any) -> Graphs:
        count = len(self)
        places = torch.arange(count, device=self.leaf("batch").device)[index]
        taken = {kind: owners_taken(owners, places, count) for kind, owners in self.owners.items()}
        rows, new, _ = taken["edge"]
        moved = self.leaf("edge_index")[:, rows] + taken["node"][2][new]
        return self._with(moved, taken["node"][1], lambda name, value: value[taken[name][0]])

    def _with(self, edges: Tensor, batch: Tensor, rows: Callable[[str, Tensor], Tensor]) -> Graphs:
        """Graphs with other edges and nodes, and other `rows` of the tensors that have them, by their names."""
        made = {"edge_index": edges, "batch": batch}
        values, spec = tree_flatten(self.tree)
        parts = [made[n] if n in made else rows(n, v) for n, v in zip(self.names, values, strict=True)]
        return Graphs(tree_unflatten(parts, spec), self.names)

    def made_up(self, count: int, rows: Any, draws: torch.Generator) -> Graphs:
        """Small graphs of the same kind; `rows` makes so many rows of a tensor."""
        nodes = torch.arange(count) % 3 + 2
        owners = torch.arange(count).repeat_interleave(nodes)
        edge_owners = torch.arange(count).repeat_interleave(3)
        within = torch.rand(2, 3 * count, generator=draws) * nodes[edge_owners]
        edges = within.long() + (nodes.cumsum(0) - nodes)[edge_owners]
        sizes = {"node": len(owners), "edge": 3 * count, "graph": count}
        device = self.leaf("batch").device
        return self._with(edges.to(device), owners.to(device), lambda name, value: rows(value, sizes[name]))


register_pytree_node(Graphs, lambda one: ([one.tree], one.names), lambda parts, names: Graphs(next(iter(parts)), names))


def graphs_in(tree: Any) -> Graphs | None:
    """The batch of graphs that a tuple or dictionary of tensors is, or None: it is one if `edge_index`, (2, edges), has
    numbers of nodes, and `batch`, (nodes,), their graphs in order, from 0; every graph has a node.

    Raises:
      ValueError: an edge joins two graphs, or a tensor has other rows than its place or name says.
    """
    values = list(tree.items()) if isinstance(tree, dict) else list(enumerate(tree)) if isinstance(tree, tuple) else []
    if not all(isinstance(value, Tensor) and value.dim() for _, value in values):
        return None
    whole = [(key, value) for key, value in values if value.dtype == torch.int64]
    if isinstance(tree, dict):
        edges, batches = ([key for key, _ in whole if key == name] for name in ("edge_index", "batch"))
    else:
        is_uneven = len({len(value) for _, value in values}) > 1
        edges = [key for key, value in whole if is_uneven and value.dim() == 2 and len(value) == 2]
        batches = [key for key, value in whole if edges and _numbers(value)]
    if len(edges) != 1 or not batches:
        return None

    def name(key: Any) -> str:
        if key in (edges[0], batches[-1]):
            return "edge_index" if key == edges[0] else "batch"
        if isinstance(key, int):
            return "node" if key < edges[0] else "edge"
        return next((kind for kind in ("edge", "graph") if key.startswith(kind)), "node")

    found = Graphs(tree, tuple(name(key) for key, _ in values))
    batch, ends, owners = found.leaf("batch"), found.leaf("edge_index"), found.owners
    if not bool((batch[ends[0]] == batch[ends[1]]).all()):
        raise ValueError("inputs: an edge joins two graphs of the batch, so that no graph goes through the model alone")
    for (key, value), kind in zip(values, found.names, strict=True):
        if kind in owners and len(value) != len(owners[kind]):
            raise ValueError(f"inputs: {key} must have a row for each {kind}, not {len(value)} rows: {_RULE}")
    return found


def _numbers(value: Tensor) -> bool:
    """True for 0, 0, 1, 1, 1, 2, ...: the graphs of nodes in order."""
    if value.dim() != 1 or not len(value) or int(value[0]):
        return False
    steps = value.diff()
    return bool(((steps == 0) | (steps == 1)).all())


@dataclass(frozen=True, slots=True)
class Ragged:
    """The knowledge of a tensor with rows of another kind: it is `kind`'s."""

    kind: Any


@dataclass(frozen=True, slots=True)
class Numbers:
    """Numbers of rows of `target`: one, or several, for each row of `kind`, which lie as `layout` says."""

    kind: Any
    layout: Layout
    target: Any


class Owners:
    """The example of each row, (rows,), of `count` examples."""

    def __init__(self, of: Tensor, count: int) -> None:
        self.of, self.count = of, count
        order, new, _ = owners_taken(of, torch.arange(count, device=of.device), count)
        within = torch.arange(len(of), device=of.device) - torch.searchsorted(new, new)
        self.most = int(within.max()) + 1 if len(of) else 0
        self.spots = torch.empty_like(of)
        self.spots[order] = new * self.most + within

    def padded(self, values: Tensor) -> Tensor:
        """(rows, ...) as (examples, most rows, ...), with zeros."""
        found = values.new_zeros(self.count * self.most, *values.shape[1:])
        return found.index_copy_(0, self.spots, values).view(self.count, self.most, *values.shape[1:])

    def summed(self, values: Tensor) -> Tensor:
        """(rows, ...) as (examples, ...)."""
        return values.new_zeros(self.count, *values.shape[1:]).index_add_(0, self.of, values)

    def merged(self, terms: list[Term]) -> list[Term]:
        """Terms of gradients of rows as terms of those of examples."""
        found: list[Term] = []
        for term in terms:
            match term:
                case Rows(slot, values):
                    found.append(Rows(slot, self.summed(values)))
                case Pair(weight, bias, inputs, grads):
                    found += [Outer(weight, self.padded(inputs), self.padded(grads))] if weight else []
                    found += [Rows(bias, self.summed(grads))] if bias else []
                case Outer(slot, inputs, grads):
                    found.append(Outer(slot, *(self.padded(each).flatten(1, 2) for each in (inputs, grads))))
                case Lookup(slot, ids, grads):
                    found.append(Lookup(slot, *(self.padded(each).flatten(1, 2) for each in (ids, grads))))
                case _:
                    raise Unserved(f"{type(term).__name__} for rows of nodes or edges")
        return found


def note_graphs(watch: Any, graphs: Graphs) -> None:
    """Notes which tensors of graphs have rows of nodes, of edges and of graphs, and which have their numbers."""
    kinds = {name: watch if name == "graph" else watch.kind_of_rows(of) for name, of in graphs.owners.items()}
    watch.give(graphs.leaf("edge_index"), Numbers(kinds["edge"], Layout(1), kinds["node"]))
    watch.give(graphs.leaf("batch"), Numbers(kinds["node"], FIRST, watch))
    for name, value in zip(graphs.names, tree_leaves(graphs.tree), strict=True):
        if name in kinds:
            kinds[name].give(value, FIRST)


def moved(call: Call, function: Any) -> Any:
    """A call in which numbers of rows take part, or rows of several kinds: its result, with what is known of it."""
    numbers = [tag for tag in call.tags if isinstance(tag, Numbers)]
    if not numbers:
        return _mixed(call, Mixed(f"{call.name} pairs rows of nodes, edges and graphs"))
    if len(numbers) == len(call.tags) and (call.name in _ARRANGING or _is_last(call)):
        return _arranged(call, numbers, function)
    if len(numbers) == 1 and call.name in ("getitem", "index_select"):
        return _gathered(call, numbers[0])
    if len(numbers) == 1 and call.name in _SCATTERING:
        return _scattered(call, numbers[0])
    if call.name == "bincount" and len(call.tags) == 1:
        result = call.run()
        return numbers[0].target.give(result, FIRST) if len(result) == numbers[0].target.count else _mixed(call, STRAY)
    return _mixed(call, STRAY)


def _mixed(call: Call, tag: Mixed) -> Any:
    if call.name in READS:
        raise Unserved(placed(tag).reason)
    return call.watch.results(call.run(), tag)


def _is_last(call: Call) -> bool:
    return call.name in ("max", "amax") and len(call.args) == 1 and not call.named


def _arranged(call: Call, numbers: list[Numbers], function: Any) -> Any:
    """The same numbers in other dimensions; or the largest number of a graph, which is the last."""
    kinds = {(each.kind, each.target) for each in numbers}
    last = _is_last(call) or (call.name == "getitem" and call.args[1] == -1 and call.tensors[0].dim() == 1)
    (_, target), *others = kinds
    if last and target.owners is None:
        target.lengths[target.count] = target
        return call.watch.give(call.run(), CONSTANT)
    if others and call.name == "cat" and len({each.target for each in numbers}) == 1:
        return _joined(call, numbers)
    if others:
        return _mixed(call, STRAY)
    for value, each in zip(call.tensors, numbers, strict=True):
        each.kind.give(value, each.layout)
    kind = numbers[0].kind
    result = kind.row_by_row(Call(kind, call.func, call.name, call.args, call.named), function)
    for value, each in zip(call.tensors, numbers, strict=True):
        call.watch.give(value, each)
    for value in (result,) if isinstance(result, Tensor) else result:
        tag = kind.tag(value)
        call.watch.give(value, Numbers(kind, tag, target) if isinstance(tag, Layout) else tag)
    return result


def _joined(call: Call, numbers: list[Numbers]) -> Any:
    """Edges and nodes, for loops at each node, are rows of a new kind."""
    (dim,) = call.dims(call.tensors[0].dim(), 1, default=0)
    if any(each.layout != Layout(dim) for each in numbers):
        return _mixed(call, STRAY)
    kind = call.watch.joined([each.kind for each in numbers])
    return call.watch.give(call.run(), Numbers(kind, Layout(dim), numbers[0].target))


def _stay(numbers: Numbers, index: Tensor) -> bool:
    """True if numbers are of rows of the example that their own row belongs to."""
    owners = numbers.kind.example_of_rows()
    shape = [-1 if dim == numbers.layout.dim else 1 for dim in range(index.dim())]
    return bool((numbers.target.example_of_rows()[index] == owners.view(shape)).all())


def _gathered(call: Call, numbers: Numbers) -> Any:
    """Rows picked by numbers: `values[index]`, `index_select(values, 0, index)`."""
    values, index = call.args[0], call.tensors[-1]
    is_plain = call.args[1] is index if call.name == "getitem" else call.dims(values.dim(), 1) == [0]
    if not is_plain or numbers.layout != FIRST or numbers.target.tag(values) != FIRST:
        return _mixed(call, Mixed(f"{call.name} by numbers of other rows"))
    if not _stay(numbers, index):
        return _mixed(call, Mixed(f"{call.name} takes rows of another example", surely=True))
    return numbers.kind.give(call.run(), FIRST)


def _scattered(call: Call, numbers: Numbers) -> Any:
    """Rows added, or reduced, where numbers say."""
    into, index, source = call.args[0], *(call.argument(at, name) for at, name in ((2, "index"), (3, "source")))
    source = call.argument(3, "src") if source is None else source
    fits = numbers.target.tag(into) == FIRST and isinstance(source, Tensor) and call.dims(into.dim(), 1) == [0]
    fits = fits and numbers.layout == FIRST and numbers.kind.tag(source) == FIRST
    if not fits or call.watch.tag(index) is not numbers:
        return _mixed(call, Mixed(f"{call.name} of other rows than the numbers are of"))
    if not _stay(numbers, index):
        return _mixed(call, Mixed(f"{call.name} adds rows of another example", surely=True))
    return numbers.target.give(call.run(), FIRST)


def kind_of(call: Call) -> Any:
    """The one kind of rows that a call is about, or None."""
    kinds = {tag.kind for tag in call.tags if isinstance(tag, Ragged)}
    others = any(isinstance(tag, Layout | Numbers | Mixed) for tag in call.tags)
    return kinds.pop() if len(kinds) == 1 and not others else None
