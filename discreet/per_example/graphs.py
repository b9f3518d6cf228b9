"""Batches of graphs as graph neural networks take them: one graph whose disconnected parts are the
examples. Nodes and edges have a row each, and `batch` has the number of each node's graph.

Graphs have different sizes, so one goes through the model after the other (`any_model.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import register_pytree_node, tree_flatten, tree_leaves, tree_unflatten

_RULE = (
    "in a tuple rows of nodes come before edge_index, and rows of edges after it; by name those "
    "of edges and graphs begin with edge and graph"
)


def owners_taken(owners: Tensor, places: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """For some of the `count` examples, in the order of `places`: their rows, the new number of
    each row's example, and how far that example's first row has moved. owners (rows,): the example
    of each row."""
    sizes = torch.bincount(owners, minlength=count)
    starts = sizes.cumsum(0) - sizes
    taken = sizes[places]
    new = torch.arange(len(places), device=owners.device).repeat_interleave(taken)
    begins = taken.cumsum(0) - taken
    within = torch.arange(len(new), device=owners.device) - begins[new]
    rows = owners.argsort(stable=True)[starts[places][new] + within]
    return rows, new, begins - starts[places]


@dataclass(frozen=True, slots=True, eq=False)
class Graphs:
    """A batch of graphs. Its rows are graphs: `len` counts them, and an index selects some.

    Attributes:
      tree: the model's input: a tuple, or a dictionary of tensors by name.
      names: the kind of each tensor of the tree: a row for each node, edge or graph, or
        "edge_index" or "batch".
    """

    tree: Any
    names: tuple[str, ...]

    def leaf(self, name: str) -> Tensor:
        found: Tensor = tree_leaves(self.tree)[self.names.index(name)]
        return found

    @property
    def owners(self) -> dict[str, Tensor]:
        """The graph of each node, edge and graph."""
        batch = self.leaf("batch")
        edges = self.leaf("edge_index")
        return {
            "node": batch,
            "edge": batch[edges[0]],
            "graph": torch.arange(len(self), device=batch.device),
        }

    def __len__(self) -> int:
        batch = self.leaf("batch")
        if len(batch):
            return int(batch[-1]) + 1
        return 0

    def __getitem__(self, index: Any) -> Graphs:
        count = len(self)
        places = torch.arange(count, device=self.leaf("batch").device)[index]
        taken = {kind: owners_taken(owners, places, count) for kind, owners in self.owners.items()}
        rows, new, _ = taken["edge"]
        moved = self.leaf("edge_index")[:, rows] + taken["node"][2][new]
        return self._with(moved, taken["node"][1], lambda name, value: value[taken[name][0]])

    def _with(self, edges: Tensor, batch: Tensor, rows: Callable[[str, Tensor], Tensor]) -> Graphs:
        """Graphs with other edges and nodes. `rows` gives the new rows of each other tensor, by its
        kind."""
        made = {"edge_index": edges, "batch": batch}
        values, spec = tree_flatten(self.tree)
        parts = [
            made[n] if n in made else rows(n, v) for n, v in zip(self.names, values, strict=True)
        ]
        return Graphs(tree_unflatten(parts, spec), self.names)

    def made_up(self, count: int, rows: Any, draws: torch.Generator) -> Graphs:
        """Small graphs of the same kind; `rows` makes a number of rows of a tensor."""
        nodes = torch.arange(count) % 3 + 2
        owners = torch.arange(count).repeat_interleave(nodes)
        edge_owners = torch.arange(count).repeat_interleave(3)
        within = torch.rand(2, 3 * count, generator=draws) * nodes[edge_owners]
        edges = within.long() + (nodes.cumsum(0) - nodes)[edge_owners]
        sizes = {"node": len(owners), "edge": 3 * count, "graph": count}
        device = self.leaf("batch").device
        return self._with(
            edges.to(device), owners.to(device), lambda name, value: rows(value, sizes[name])
        )


register_pytree_node(
    Graphs,
    lambda one: ([one.tree], one.names),
    lambda parts, names: Graphs(next(iter(parts)), names),
)


def graphs_in(tree: Any) -> Graphs | None:
    """A tuple or dictionary of tensors as a batch of graphs, or None if it is none. It is one if
    `edge_index`, (2, edges), has numbers of nodes, and `batch`, (nodes,), the number of each node's
    graph, ascending from 0; every graph has a node.

    Raises:
      ValueError: `batch` is not ascending, an edge joins two graphs, or the number of a tensor's
        rows does not fit its place or name.
    """
    values: list[tuple[Any, Any]] = []
    if isinstance(tree, dict):
        values = list(tree.items())
    elif isinstance(tree, tuple):
        values = list(enumerate(tree))
    if not all(isinstance(value, Tensor) and value.dim() for _, value in values):
        return None
    whole = [(key, value) for key, value in values if value.dtype == torch.int64]
    if isinstance(tree, dict):
        edges, batches = (
            [key for key, _ in whole if key == name] for name in ("edge_index", "batch")
        )
    else:
        is_uneven = len({len(value) for _, value in values}) > 1
        edges = [key for key, value in whole if is_uneven and value.dim() == 2 and len(value) == 2]
        batches = [key for key, value in whole if edges and _numbers(value)]
    if len(edges) != 1 or not batches:
        return None
    names = (_kind_of(key, edges[0], batches[-1]) for key, _ in values)
    found = Graphs(tree, tuple(names))
    _check_graphs(found, values)
    return found


def _kind_of(key: Any, edges: Any, batch: Any) -> str:
    """The kind of a tensor's rows, by its place in a tuple or its name in a dictionary."""
    if key == edges:
        return "edge_index"
    if key == batch:
        return "batch"
    if isinstance(key, int):
        if key < edges:
            return "node"
        return "edge"
    return next((kind for kind in ("edge", "graph") if key.startswith(kind)), "node")


def _check_graphs(found: Graphs, values: Sequence[tuple[Any, Tensor]]) -> None:
    """Raises ValueError if graphs are not in order, an edge joins two of them, or the number of a
    tensor's rows does not fit its kind."""
    batch = found.leaf("batch")
    ends = found.leaf("edge_index")
    owners = found.owners
    if len(batch) and not _numbers(batch):
        raise ValueError(
            "inputs: batch must number the nodes' graphs in order and without a gap: 0, 0, 1, 1, 2"
        )
    if not bool((batch[ends[0]] == batch[ends[1]]).all()):
        raise ValueError(
            "inputs: an edge joins two graphs of the batch, so that no graph goes through the "
            "model alone"
        )
    for (key, value), kind in zip(values, found.names, strict=True):
        if kind in owners and len(value) != len(owners[kind]):
            raise ValueError(
                f"inputs: {key} must have a row for each {kind}, not {len(value)} rows: {_RULE}"
            )


def _numbers(value: Tensor) -> bool:
    """True for 0, 0, 1, 1, 1, 2, ...: the graphs of nodes in order."""
    if value.dim() != 1 or not len(value) or int(value[0]):
        return False
    steps = value.diff()
    return bool(((steps == 0) | (steps == 1)).all())
