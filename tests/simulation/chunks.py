"""Clients for the tests of cohorts: their data, their chunk, and what each of them would do by
itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from discreet.data.examples import Examples
from discreet.data.partition import ClientExamples, Numbers
from discreet.models.models import build_model, flatten_parameters
from discreet.per_example.objective import cross_entropy
from discreet.planning.plan import Plan
from discreet.privacy.randomness import RandomSource, seeded_source
from discreet.simulation.chunk import (
    Chunk,
    Draws,
    SeededDraws,
    SharedExamples,
    shared_examples,
    table_of,
)
from discreet.simulation.cohort import Engine
from discreet.simulation.layer_sequence import LayerSequence, sequence_of
from discreet.simulation.mapped_model import MappedModel, mapped_model
from discreet.training.local_training import LocalSettings, local_update

CLASSES = 5


@dataclass(frozen=True, eq=False)
class Clients:
    """Clients of one model on one data set. `sizes` do not ascend."""

    model: str
    shape: tuple[int, ...]
    sizes: tuple[int, ...]
    seed: int = 90053

    @property
    def data(self) -> Examples:
        generator = torch.Generator().manual_seed(self.seed)
        count = sum(self.sizes) + 3
        inputs = torch.rand(count, *self.shape, generator=generator)
        if self.model == "lstm":
            inputs = torch.randint(0, CLASSES, (count, *self.shape), generator=generator)
        return Examples(inputs, torch.randint(0, CLASSES, (count,), generator=generator))

    @property
    def shared(self) -> SharedExamples:
        return shared_examples(self.data, torch.device("cpu"))

    @property
    def held(self) -> list[Numbers]:
        generator = torch.Generator().manual_seed(self.seed + 1)
        order = torch.randperm(sum(self.sizes) + 3, generator=generator)[: sum(self.sizes)]
        return [part.numpy() for part in torch.split(order, list(self.sizes))]

    @property
    def start(self) -> Tensor:
        return flatten_parameters(build_model(self.model, self.shape, CLASSES, seed=self.seed))

    @property
    def layers(self) -> LayerSequence | MappedModel:
        return self.layers_for(by_example=False)

    def layers_for(self, *, by_example: bool) -> LayerSequence | MappedModel:
        model = build_model(self.model, self.shape, CLASSES, seed=self.seed)
        by_hand = sequence_of(model, self.shape)
        return by_hand or mapped_model(model, cross_entropy, by_example=by_example)

    def sources(self) -> list[RandomSource]:
        return [
            seeded_source(self.seed).child("client", 3, number) for number in range(len(self.sizes))
        ]

    def chunk(self, how: Sequence[LocalSettings], draws: Draws) -> Chunk:
        layers = self.layers_for(by_example=how[0].example is not None)
        return Chunk(layers, self.shared, table_of(self.held), how, draws)

    def engine(self, plan: Plan, held: ClientExamples, chunk: int, workers: int) -> Engine:
        return Engine(
            plan.settings.seed, plan.mechanism, self.shared, held, self.layers, chunk, workers
        )

    def together(self, how: LocalSettings) -> Tensor:
        return self.chunk([how] * len(self.sizes), SeededDraws(self.sources())).updates(self.start)

    def alone(self, how: LocalSettings) -> Tensor:
        model, data = build_model(self.model, self.shape, CLASSES, seed=self.seed), self.data
        pairs = zip(self.held, self.sources(), strict=True)
        return torch.stack(
            [
                local_update(
                    model,
                    self.start,
                    data.subset(torch.from_numpy(numbers)),
                    settings=how,
                    source=source,
                )
                for numbers, source in pairs
            ]
        )


def apart(one: Tensor, other: Tensor) -> float:
    """The largest distance of two clients' updates, as a share of the update."""
    return float(((one - other).norm(dim=1) / other.norm(dim=1).clamp(min=1e-9)).max())
