"""Graphs in a batch: the gradient of each graph is clipped, and no graph reaches another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from discreet.dpsgd.dpsgd import DPSGD
from discreet.dpsgd.loop_plan import LoopPrivacy
from discreet.layers.refusals import MixesExamples
from discreet.per_example import any_model
from discreet.per_example.any_model import plain_gradient
from discreet.per_example.graphs import graphs_in
from discreet.per_example.objective import count_of
from discreet.per_example.per_example import clipped_gradient_sum

COUNT = 12


@dataclass
class Molecules:
    """Kinds of atoms (nodes,), the ends of bonds (2, bonds), their lengths (bonds, 1), and the
    graph of each atom."""

    atoms: Tensor
    edge_index: Tensor
    edge_lengths: Tensor
    batch: Tensor


def graph(seed: int) -> Molecules:
    draws = torch.Generator().manual_seed(seed)
    nodes = 1 + seed % 5
    edges = torch.randint(0, nodes, (2, 2 * nodes + 1), generator=draws)
    lengths = torch.rand(edges.shape[1], 1, generator=draws)
    atoms = torch.randint(0, 6, (nodes,), generator=draws)
    return Molecules(atoms, edges, lengths, torch.zeros(nodes, dtype=torch.long))


def joined(graphs: list[Molecules]) -> Molecules:
    sizes = torch.tensor([len(each.atoms) for each in graphs])
    starts = (sizes.cumsum(0) - sizes).tolist()
    return Molecules(
        torch.cat([each.atoms for each in graphs]),
        torch.cat([each.edge_index + start for each, start in zip(graphs, starts, strict=True)], 1),
        torch.cat([each.edge_lengths for each in graphs]),
        torch.arange(len(graphs)).repeat_interleave(sizes),
    )


class Network(nn.Module):
    """A graph convolution with loops (Kipf and Welling 2017), attention over edges, and a
    pooling."""

    def __init__(self, spoiled: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.table, self.weight = nn.Embedding(6, 8), nn.Parameter(torch.randn(8, 8) / 3)
        self.bias, self.norm, self.score = (
            nn.Parameter(torch.zeros(8)),
            nn.LayerNorm(8),
            nn.Linear(17, 1),
        )
        self.out, self.spoiled = nn.Linear(16, 3), spoiled

    def forward(
        self, atoms: Tensor, edge_index: Tensor, edge_lengths: Tensor, batch: Tensor
    ) -> Tensor:
        nodes, graphs = atoms.size(0), int(batch.max()) + 1
        x = self.table(atoms)
        loops = torch.arange(nodes)
        sources, ends = torch.cat([edge_index, torch.stack([loops, loops])], 1)
        shares = torch.zeros(nodes).index_add_(0, ends, torch.ones(sources.shape[0])).rsqrt()
        messages = x[sources] * (shares[sources] * shares[ends]).unsqueeze(1)
        x = torch.zeros_like(x).index_add(0, ends, messages) @ self.weight + self.bias
        x = self.norm(x.relu())
        if self.spoiled is not None:
            x = self.spoiled(x, edge_index, batch)
        pairs = torch.cat([x[edge_index[0]], x.index_select(0, edge_index[1]), edge_lengths], 1)
        scores = self.score(pairs).squeeze(1).exp()
        total = x.new_zeros(nodes).scatter_add(0, edge_index[1], scores)
        shared = x[edge_index[0]] * (scores / total[edge_index[1]]).unsqueeze(1)
        x = x.new_zeros(x.shape).scatter_add(0, edge_index[1].view(-1, 1).expand(-1, 8), shared)
        most = x.new_zeros(graphs, 8).scatter_reduce(0, batch.unsqueeze(1).expand(-1, 8), x, "amax")
        mean = x.new_zeros(graphs, 8).index_add_(0, batch, x) / torch.bincount(
            batch, minlength=graphs
        ).unsqueeze(1)
        return self.out(torch.cat([most, mean], 1))


def seeded(spoiled: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None) -> Network:
    with torch.random.fork_rng():
        torch.manual_seed(71429)
        return Network(spoiled)


GRAPHS = [graph(seed) for seed in range(COUNT)]
TARGETS = torch.arange(COUNT) % 3


def gradients_alone(model: nn.Module) -> list[Tensor]:
    def one(place: int) -> Tensor:
        inputs = GRAPHS[place]
        loss = functional.cross_entropy(model(*vars(inputs).values()), TARGETS[place : place + 1])
        return torch.cat(
            [each.flatten() for each in torch.autograd.grad(loss, list(model.parameters()))]
        )

    return [one(place) for place in range(COUNT)]


@pytest.mark.parametrize("as_tuple", [False, True])
def test_each_graph_is_clipped_by_itself(*, as_tuple: bool) -> None:
    model, whole = seeded(), joined(GRAPHS)
    inputs = tuple(vars(whole).values()) if as_tuple else whole
    alone = torch.stack(gradients_alone(model))
    clip = float(alone.norm(dim=1).median())
    total, norms = clipped_gradient_sum(model, inputs, targets=TARGETS, clip_norm=clip)
    assert torch.allclose(norms, alone.norm(dim=1), rtol=1e-4)
    assert torch.allclose(
        total, (alone * (clip / alone.norm(dim=1, keepdim=True)).clamp(max=1)).sum(0), atol=1e-5
    )


def test_a_gradient_comes_from_a_pass_over_one_graph_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = seeded()
    clipped_gradient_sum(model, joined(GRAPHS), targets=TARGETS, clip_norm=1.0)  # the trial
    seen = list[int]()  # by the loop: what a hook of the model notes is put back

    def noted(objective: Any, inputs: Any, *rest: Any) -> list[Tensor]:
        seen.append(count_of(inputs))
        return plain_gradient(objective, inputs, *rest)

    monkeypatch.setattr(any_model, "plain_gradient", noted)
    clipped_gradient_sum(
        model, tuple(vars(joined(GRAPHS)).values()), targets=TARGETS, clip_norm=1.0
    )
    assert seen == [1] * COUNT


def test_a_batch_of_two_nodes_in_a_tuple_is_refused_with_the_advice_to_use_names() -> None:
    two_nodes = (torch.rand(2, 4), torch.tensor([[0, 1], [1, 0]]), torch.tensor([0, 0]))
    model = seeded()
    with pytest.raises(ValueError, match="give graphs by name"):
        DPSGD(
            model,
            torch.optim.SGD(model.parameters(), 0.1),
            [(two_nodes, 0)] * 9,
            batch_size=2,
            epochs=1,
            delta=1e-3,
            target_epsilon=8,
            collate_fn=lambda items: (items[0][0], torch.zeros(len(items), dtype=torch.int64)),
        )


def test_steps_of_dpsgd_take_graphs() -> None:
    def collate(examples: list[tuple[Molecules, int]]) -> tuple[Molecules, Tensor]:
        return joined([each for each, _ in examples]), torch.tensor(
            [label for _, label in examples]
        )

    model, sizes = seeded(), set[int]()
    data = list(zip(GRAPHS, TARGETS.tolist(), strict=True))
    optimizer, privacy = torch.optim.SGD(model.parameters(), 0.1), LoopPrivacy(seed=90217)
    private = DPSGD(
        model,
        optimizer,
        data,
        batch_size=2,
        epochs=3,
        delta=1e-3,
        target_epsilon=8,
        collate_fn=collate,
        privacy=privacy,
    )
    for inputs, targets in private:
        assert (
            len(model(**inputs)) == len(targets)
            if len(targets)
            else set(inputs) == set(vars(GRAPHS[0]))
        )
        sizes.add(len(targets))
        private.step(inputs, targets)
    assert all(bool(each.isfinite().all()) for each in model.parameters())
    assert 0 in sizes  # an empty batch of graphs takes its step too


SPOILED: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "mean of all nodes": lambda x, edges, batch: x - x.mean(0),
    "the next node": lambda x, edges, batch: x + x.roll(1, 0),
    "rows of other graphs": lambda x, edges, batch: x + x.flip(0),
    "numbers of nodes": lambda x, edges, batch: (
        x + x.new_zeros(len(x)).index_add(0, edges[1], edges[0].float())[:, None]
    ),
    "numbers of graphs": lambda x, edges, batch: x * batch.unsqueeze(1),
    "numbers moved": lambda x, edges, batch: x + x[(batch + 1) % len(x)],
    "graphs for nodes": lambda x, edges, batch: x + x[batch],
    "the largest number": lambda x, edges, batch: x * edges.max(),
    "how many nodes": lambda x, edges, batch: x / x.size(0),
    "how many edges": lambda x, edges, batch: x * edges.shape[1],
    "how many graphs": lambda x, edges, batch: x * (int(batch[-1]) + 1),
    "a mask": lambda x, edges, batch: (
        x * x.new_zeros(len(x)).index_add(0, edges[1], (edges[0] > 3).float())[:, None]
    ),
    "batch norm": lambda x, edges, batch: functional.batch_norm(x, None, None, training=True),
}


@pytest.mark.parametrize("name", sorted(SPOILED))
def test_what_mixes_graphs_is_refused_with_its_line(name: str) -> None:
    with pytest.raises(MixesExamples, match=r"test_graphs\.py:"):
        clipped_gradient_sum(seeded(SPOILED[name]), joined(GRAPHS), targets=TARGETS, clip_norm=0.1)


def test_an_edge_between_two_graphs_is_refused() -> None:
    whole = joined(GRAPHS)
    whole.edge_index[1, 0] = len(whole.atoms) - 1
    with pytest.raises(ValueError, match="joins two graphs"):
        clipped_gradient_sum(seeded(), whole, targets=TARGETS, clip_norm=1.0)


@pytest.mark.parametrize("batch", [[1, 1, 0, 0], [0, 0, 2, 2], [1, 1, 2, 2]])
def test_graphs_that_are_not_numbered_in_order_are_refused(batch: list[int]) -> None:
    inputs = {
        "atoms": torch.zeros(4, 3),
        "edge_index": torch.tensor([[0, 2], [1, 3]]),
        "batch": torch.tensor(batch),
    }
    with pytest.raises(ValueError, match="in order and without a gap"):
        graphs_in(inputs)
