"""Clients that are trained together: batches, gradients and noise of all of them at once, for the loops of
`discreet.training.local_training`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from discreet.privacy.mechanisms import Gaussian
from discreet.simulation.batches import BatchNumbers, Table, poisson_batch, read_mean, read_sum, shuffled_batches
from discreet.simulation.client_examples import SharedExamples
from discreet.simulation.draws import Draws
from discreet.simulation.layer_sequence import LayerSequence
from discreet.training.local_training import LocalSettings


@dataclass(frozen=True, eq=False)
class Chunk:
    """`SgdClients` and `DpSgdClients` by the passes of its layers.

    Attributes:
        model: the architecture.
        data: the data set that all clients share.
        table: which examples the clients hold, those with most of them first.
        settings: of each; they differ in the noise of DP-SGD at most.
        draws: their random numbers, row by row.
    """

    model: LayerSequence
    data: SharedExamples
    table: Table
    settings: Sequence[LocalSettings]
    draws: Draws

    def __post_init__(self) -> None:
        if len(self.settings) != len(self.table.sizes):
            raise ValueError("settings must be one a client")

    def shuffled_batches(self, epoch: int) -> Iterator[tuple[int, BatchNumbers]]:
        orders = self.draws.permutations(self.table.sizes, epoch=epoch)
        for batch in shuffled_batches(self.table, orders, batch_size=self.settings[0].batch_size):
            yield len(batch.counts), batch

    def add_mean_gradients(
        self, params: list[Tensor], batch: BatchNumbers, into: list[Tensor], *, keep: float, rate: float
    ) -> None:
        self.model.accumulate(params, read_mean(self.data, batch), into, keep=keep, rate=rate)

    def poisson_batch(self, probabilities: Sequence[float], *, step: int) -> BatchNumbers:
        active = len(probabilities)
        clients, positions = self.draws.batches(self.table.sizes[:active], probabilities, step=step)
        return poisson_batch(self.table, clients, positions, active=active)

    def clipped_sums(self, params: list[Tensor], batch: BatchNumbers, l2_norm_clip: float) -> Tensor:
        if not batch.counts.any():
            return params[0].new_zeros(len(batch.counts), self.model.layout.size)
        return self.model.clipped_sums(params, read_sum(self.data, batch), l2_norm_clip)

    def add_noise(self, sums: Tensor, l2_norm_clip: float, *, step: int) -> Tensor:
        return self.draws.add_noise(sums, self._mechanisms, l2_norm_clip, step=step)

    def views(self, rows: Tensor) -> list[Tensor]:
        return self.model.layout.views(rows)

    @cached_property
    def _mechanisms(self) -> list[Gaussian]:
        return [settings.example.mechanism for settings in self.settings if settings.example]
