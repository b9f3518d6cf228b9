"""Clients that are trained together. Their examples are rows of a data set that is held once for
all, read in padded batches without copies. Draws, gradients and noise are made for all at once, for
`discreet.training.local_training`.

A product of many matrices rounds by their shape and place in memory, so the last bits of a client
follow from the others of its chunk.

With a seed every client draws from the same streams as alone. Without one, a single secure stream
serves all of them in bulk: a draw for each would halve the speed of logistic regression.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from discreet.data.examples import Examples
from discreet.data.partition import ClientExamples, Numbers, held_out_rows
from discreet.per_example.apart import Snapshot
from discreet.per_example.own_code import memory_for
from discreet.per_example.trial import exact_products
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.private import Private
from discreet.privacy.randomness import RandomSource
from discreet.privacy.sampling import poisson_sample
from discreet.privacy.secure_grid import MOST_GRADIENTS
from discreet.privacy.step_draws import step_batch, step_noise
from discreet.settings.data import EvaluationConfig
from discreet.simulation.layer_sequence import Batch, LayerSequence, Params
from discreet.simulation.mapped_model import MappedModel
from discreet.training.local_training import LocalSettings, dp_sgd, epoch_order, local_update, sgd
from discreet.training.shared_step import SharedClip, shared_step

WHITE = 255
PIECE = 512


@dataclass(frozen=True, eq=False, repr=False)
class SharedExamples(Private):
    """Examples. `inputs` (n, ...) that are whole 255ths, as in images, are stored as bytes: reading
    a fourth of the memory makes a round of logistic regression take a fifth less time."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def __reduce__(self) -> tuple[Callable[..., SharedExamples], tuple[Any, ...]]:
        """Pickles arrays, which processes of one machine can map. Only for examples on the CPU."""
        return _mapped_examples, (self.inputs.numpy(), self.targets.numpy())

    @cached_property
    def device(self) -> torch.device:
        return self.inputs.device

    def read(self, rows: Tensor) -> Tensor:
        """The inputs of `rows`, (m,) int64: (m, *input_shape), with exactly the original values."""
        found = self.inputs.index_select(0, rows)
        if found.dtype == torch.uint8:
            return found.to(torch.float32).div_(WHITE)
        return found


@dataclass(frozen=True, eq=False, repr=False)
class HeldExamples(Private):
    """The examples of one client, by their numbers (n,). They are read on demand, as features of
    texts can be larger than memory."""

    data: SharedExamples
    numbers: Tensor
    owners: None = None  # units of several rows are trained sequentially

    def __len__(self) -> int:
        return len(self.numbers)

    def subset(self, indices: Tensor | slice) -> Examples:
        """As `Examples.subset`."""
        rows = self.numbers[indices]
        return Examples(self.data.read(rows), self.data.targets[rows])


def _mapped_examples(inputs: NDArray[Any], targets: NDArray[Any]) -> SharedExamples:
    return SharedExamples(read_only(inputs), read_only(targets))


def read_only(values: NDArray[Any]) -> Tensor:
    """A read-only mapped array as a tensor, without a copy. It must not be written to."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)
        return torch.from_numpy(values)


def shared_examples(examples: Examples, device: torch.device) -> SharedExamples:
    """The examples on a device, as bytes if that preserves the values exactly."""
    if examples.inputs.is_floating_point():
        inputs = _as_bytes(examples.inputs)
    else:
        inputs = None
    return SharedExamples(
        (examples.inputs if inputs is None else inputs).to(device), examples.targets.to(device)
    )


def _as_bytes(inputs: Tensor) -> Tensor | None:
    """The inputs as bytes; None if a value is not exactly a whole 255th in [0, 1]."""
    whole = torch.empty(inputs.shape, dtype=torch.uint8)
    for start in range(0, len(inputs), PIECE):
        piece = inputs[start : start + PIECE]
        whole[start : start + PIECE] = (piece * WHITE).round_().clamp_(0, WHITE)
        if not torch.equal(whole[start : start + PIECE].to(torch.float32).div_(WHITE), piece):
            return None
    return whole


@dataclass(frozen=True)
class TrainedExamples:
    """The examples on which clients train if they hold out a share."""

    every: ClientExamples
    share: float

    def __len__(self) -> int:
        return len(self.every)

    def sizes(self, clients: Numbers) -> Numbers:
        pairs = zip(clients.tolist(), self.every.sizes(clients).tolist(), strict=True)
        return np.array([n - len(self._held_out(n, one)) for one, n in pairs], dtype=np.int64)

    def examples(self, client: int) -> Numbers:
        numbers = self.every.examples(client)
        return np.delete(numbers, self._held_out(len(numbers), client))

    def held_out(self, client: int) -> Numbers:
        """The numbers of the examples that a client holds out, (m,)."""
        numbers = self.every.examples(client)
        return numbers[self._held_out(len(numbers), client)]

    def _held_out(self, num_examples: int, client: int) -> Numbers:
        rows = held_out_rows(num_examples, self.every.name(client), share=self.share)
        return rows.numpy()


def check_bounded(num_units: int, batch_size: int) -> None:
    """Raises ValueError if a client has so many units that the float64 sum of their gradients is
    not bounded. The sums of `shared_step` are exact instead."""
    most = MOST_GRADIENTS * batch_size
    if num_units > most:
        raise ValueError(
            f"a client has more examples than {MOST_GRADIENTS} * training.batch_size = {most}, "
            "beyond which a float64 sum of gradients is not bounded: engine=sequential has no bound"
        )


def trained_on(
    dealt: ClientExamples, evaluation: EvaluationConfig
) -> ClientExamples | TrainedExamples:
    """The examples on which clients train, given the settings of evaluation."""
    if evaluation.private:
        return TrainedExamples(dealt, evaluation.share)
    return dealt


@dataclass(frozen=True, eq=False)
class Table:
    """Some examples of each of several clients: all that those of a chunk hold, or a batch of each.

    Attributes:
        numbers: (clients, largest size), rows of the data set. Beyond a client's size its first
            example is repeated, so that padding never reads another client's examples; 0 for a
            client without examples.
        sizes: (clients,), descending for a chunk.
    """

    numbers: Numbers
    sizes: Numbers


def table_of(examples: list[Numbers]) -> Table:
    """The table of clients with these examples, whose sizes must be descending."""
    sizes = np.fromiter(map(len, examples), dtype=np.int64, count=len(examples))
    together = np.concatenate([np.zeros(0, dtype=np.int64), *examples])
    width = int(sizes.max(initial=0))
    numbers = np.zeros((len(examples), width), dtype=np.int64)
    filled = sizes > 0
    starts = np.cumsum(sizes) - sizes
    numbers[filled] = together[starts[filled], None]
    numbers[np.arange(width) < sizes[:, None]] = together
    return Table(numbers, sizes)


@dataclass(frozen=True, eq=False)
class SeededDraws:
    """One source for each client (row), which draws the same numbers as alone. Clients that draw
    come first."""

    sources: Sequence[RandomSource]

    def permutations(self, sizes: Numbers, *, epoch: int) -> Numbers:
        """A random order of each client's examples, (k, largest size), 0 beyond a client's size."""
        orders = np.zeros((len(sizes), max(sizes, default=0)), dtype=np.int64)
        for row, size in enumerate(sizes.tolist()):
            orders[row, :size] = epoch_order(self.sources[row], epoch, size).numpy()
        return orders

    def batches(
        self, sizes: Numbers, probabilities: Sequence[float], *, step: int
    ) -> tuple[Numbers, Numbers]:
        """Poisson batches: the client and the position of each example in a batch, both (m,),
        ascending by client."""
        each = zip(self.sources, sizes.tolist(), probabilities, strict=False)
        found = [
            step_batch(source, step, size, probability=chance).numpy()
            for source, size, chance in each
        ]
        return np.repeat(
            np.arange(len(found)), [len(positions) for positions in found]
        ), np.concatenate(found)

    def add_noise(
        self, totals: Tensor, mechanisms: Sequence[Gaussian], sensitivity: float, *, step: int
    ) -> Tensor:
        """Each row of `totals` (k, d) plus its own noise for `sensitivity`."""
        noised = torch.empty_like(totals)
        for row, mechanism in enumerate(mechanisms[: len(totals)]):
            noised[row] = mechanism.add_noise(
                totals[row], sensitivity, step_noise(self.sources[row], step)
            )
        return noised

    def of(self, row: int) -> RandomSource:
        return self.sources[row]


@dataclass(frozen=True, eq=False)
class SecureDraws:
    """`SeededDraws` from one secure source. Draws for clients of equal size, or of equal noise, are
    made at once."""

    source: RandomSource

    def __post_init__(self) -> None:
        if not self.source.is_secure:
            raise ValueError(
                "source must be secure: with a seed every client draws from streams of its own"
            )

    def permutations(self, sizes: Numbers, *, epoch: int) -> Numbers:
        """Each order is uniform: see `RandomSource.permutation`."""
        shape = len(sizes), max(sizes, default=0)
        beyond = np.arange(shape[1]) >= sizes[:, None]
        while True:
            words = np.empty(math.prod(shape), dtype=np.uint64)
            self.source.fill(words)
            words = words.reshape(shape)
            words[beyond] = np.iinfo(words.dtype).max  # sorted after all others
            orders: Numbers = np.argsort(words, axis=1)
            ranked = np.take_along_axis(words, orders, axis=1)
            # With two equal words, once in 10^15 draws, all are drawn again, so that every order is
            # equally likely.
            if not ((ranked[:, 1:] == ranked[:, :-1]) & ~beyond[:, :-1]).any():
                orders[beyond] = 0
                return orders

    def batches(
        self, sizes: Numbers, probabilities: Sequence[float], *, step: int
    ) -> tuple[Numbers, Numbers]:
        clients = []
        positions = []
        for start, stop in pairwise(
            [0, *(np.flatnonzero(np.diff(sizes)) + 1).tolist(), len(sizes)]
        ):
            size = int(sizes[start])
            chosen = poisson_sample(
                (stop - start) * size, probability=probabilities[start], source=self.source
            ).numpy()
            clients.append(start + chosen // max(size, 1))
            positions.append(chosen % max(size, 1))
        return np.concatenate(clients), np.concatenate(positions)

    def add_noise(
        self, totals: Tensor, mechanisms: Sequence[Gaussian], sensitivity: float, *, step: int
    ) -> Tensor:
        if all(mechanism == mechanisms[0] for mechanism in mechanisms[: len(totals)]):
            return mechanisms[0].add_noise(totals, sensitivity, self.source)
        pairs = zip(totals, mechanisms, strict=False)
        return torch.stack(
            [mechanism.add_noise(row, sensitivity, self.source) for row, mechanism in pairs]
        )

    def of(self, row: int) -> RandomSource:
        return self.source


Draws = SeededDraws | SecureDraws


@dataclass(frozen=True, eq=False, repr=False)
class Chunk(Private):
    """`SgdClients` and `DpSgdClients` by the passes of a model's layers. Rows are clients, those
    with the most examples first. Their `settings` may differ only in the noise of DP-SGD."""

    model: LayerSequence | MappedModel
    data: SharedExamples
    table: Table
    settings: Sequence[LocalSettings]
    draws: Draws

    def examples(self, row: int) -> HeldExamples:
        """The examples of one client."""
        numbers = torch.from_numpy(self.table.numbers[row, : self.table.sizes[row]])
        return HeldExamples(self.data, numbers.to(self.data.device))

    def read(self, batch: Table, *, mean: bool) -> Batch:
        """The examples of a batch, with the weights of their gradients."""
        shape = batch.numbers.shape
        rows = torch.from_numpy(np.ascontiguousarray(batch.numbers)).to(self.data.device).flatten()
        inputs = self.data.read(rows)
        targets = self.data.targets.index_select(0, rows)
        inputs, targets = (values.view(*shape, *values.shape[1:]) for values in (inputs, targets))
        return Batch(inputs, targets, self.weights(batch, mean=mean))

    def weights(self, batch: Table, *, mean: bool) -> Tensor:
        """The weights (k, width): 0 for padding, and 1 for examples, or with `mean` 1 / count, so
        that a client's sum is a mean."""
        width = batch.numbers.shape[1]
        if mean:
            weight = 1 / np.maximum(batch.sizes, 1).astype(np.float32)
        else:
            weight = np.ones(len(batch.sizes), np.float32)
        weights = torch.from_numpy(weight).unsqueeze(1).expand(batch.numbers.shape)
        if (batch.sizes < width).any():
            weights = weights * torch.from_numpy(np.arange(width) < batch.sizes[:, None])
        return weights.to(self.data.device)

    def shuffled_batches(self, epoch: int) -> Iterator[tuple[int, Table]]:
        """Batches of every client's examples in its own random order; the last batch may be
        short."""
        sizes = self.table.sizes
        batch_size = self.settings[0].batch_size
        orders = self.draws.permutations(sizes, epoch=epoch)
        numbers = np.take_along_axis(self.table.numbers, orders, axis=1)
        for start in range(0, numbers.shape[1], batch_size):
            # The first clients have more examples.
            active = int(np.searchsorted(-sizes, -start, side="left"))
            counts = np.minimum(sizes[:active] - start, batch_size)
            yield active, Table(numbers[:active, start : start + batch_size], counts)

    def add_mean_gradients(
        self, params: Params, batch: Table, into: Params, *, keep: float, rate: float
    ) -> None:
        self.model.accumulate(params, self.read(batch, mean=True), into, keep=keep, rate=rate)

    def poisson_batch(self, probabilities: Sequence[float], *, step: int) -> Table:
        """A batch of the first clients, a probability for each; it may be of width 0."""
        table = self.table
        active = len(probabilities)
        clients, positions = self.draws.batches(table.sizes[:active], probabilities, step=step)
        counts = np.bincount(clients, minlength=active).astype(np.int64, copy=False)
        numbers = np.repeat(table.numbers[:active, :1], int(counts.max(initial=0)), axis=1)
        first = np.cumsum(counts) - counts
        numbers[clients, np.arange(len(clients)) - first[clients]] = table.numbers[
            clients, positions
        ]
        return Table(numbers, counts)

    def clipped_sums(self, params: Params, batch: Table, clip_norm: float) -> Tensor:
        if not batch.sizes.any():
            return params[0].new_zeros(len(batch.sizes), self.model.layout.size)
        return self.model.clipped_sums(params, self.read(batch, mean=False), clip_norm)

    def add_noise(self, sums: Tensor, clip_norm: float, *, step: int) -> Tensor:
        return self.draws.add_noise(sums, self._mechanisms, clip_norm, step=step)

    def views(self, rows: Tensor) -> Params:
        return self.model.layout.views(rows)

    @cached_property
    def _mechanisms(self) -> list[Gaussian]:
        return [settings.example.mechanism for settings in self.settings if settings.example]

    def updates(self, start: Tensor) -> Tensor:
        """`local_update` for many clients: the change of the parameters of each, (k, num_params),
        float32, not clipped. `start` (num_params,) is on the device of the data."""
        start = start.to(torch.float32)
        sizes = self.table.sizes.tolist()
        if isinstance(self.model, MappedModel) and not self.model.together:
            alone = partial(local_update, self.model.model, start)
            each = enumerate(self.settings)
            return torch.stack(
                [alone(self.examples(n), settings=how, source=self.draws.of(n)) for n, how in each]
            )
        if not isinstance(self.model, MappedModel):
            return self._updates(start)
        before = Snapshot(self.model.model, memory_for(self.model.model.modules()))
        drawing = self.model.drawing(map(self.draws.of, range(len(sizes))))
        try:
            found = replace(self, model=drawing)._updates(start)
        finally:
            is_changed = before.restore()
        if is_changed:
            raise ValueError(
                "the model's forward keeps something of a pass, which would reach other clients"
            )
        return found

    def _updates(self, start: Tensor) -> Tensor:
        """`updates` of clients that are trained together."""
        settings = self.settings[0]
        sizes = self.table.sizes.tolist()
        params = self.model.layout.copies(start, len(sizes))
        if settings.example:
            with exact_products(start.device):
                dp_sgd(self, params, sizes, settings)
        else:
            sgd(self, params, sizes, settings)
        return self.model.layout.change(params, start)

    @torch.no_grad()
    def steps(self, start: Tensor, clip_norm: float) -> Tensor:
        """`shared_step` for many clients: each one's step over all its examples, (k, num_params),
        float64."""
        settings = self.settings[0]
        count = len(self.table.sizes)
        layout = self.model.layout
        if isinstance(self.model, MappedModel):
            step = partial(shared_step, self.model.model, start, settings=settings)
            rows = range(count)
            held = ((self.examples(row).subset(slice(None)), self.draws.of(row)) for row in rows)
            return torch.stack(
                [step(examples, clip=SharedClip(clip_norm, source)) for examples, source in held]
            )
        params = [values.double() for values in layout.copies(start.to(torch.float32), count)]
        if not self.table.sizes.any():
            return torch.zeros(count, layout.size, dtype=torch.float64)
        check_bounded(int(self.table.sizes.max()), settings.batch_size)
        batch = self.read(self.table, mean=False)
        if batch.inputs.is_floating_point():
            inputs = batch.inputs.double()
        else:
            inputs = batch.inputs
        batch = replace(batch, inputs=inputs, weights=batch.weights.double())
        return self.model.clipped_sums(params, batch, clip_norm).mul_(
            -settings.learning_rate / settings.batch_size
        )
