"""Data sets and DataLoaders as a loop reads them: Poisson batches, drawn once, whole or in pieces,
which nothing mixes or changes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from discreet.dpsgd import poisson_batches
from discreet.dpsgd.dpsgd import DPSGD, BatchError
from discreet.ledger.durable_ledger import DurableLedger, LedgerError
from tests.dpsgd.loops import BATCH, COUNTED, PAIRS, SIZE, private, run, stacked
from tests.node.clients import linear, params_of

TENSORS = TensorDataset(COUNTED.inputs, COUNTED.targets)
SAMPLER = RandomSampler(range(SIZE))


class Pairs(Dataset[Any]):
    """The examples one by one: counts how often each is read, and raises once at one of them."""

    def __init__(self, raises_at: int | None = None) -> None:
        self.read, self.raises_at = Counter[int](), raises_at

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, place: int) -> tuple[Tensor, Tensor]:
        self.read[place] += 1
        if place == self.raises_at:
            self.raises_at = None
            raise OSError("the disk is slow")
        return PAIRS[place]


class Doubled(TensorDataset):
    """Rows of tensors whose items are made anew, as for augmentation."""

    def __getitem__(self, place: int) -> tuple[Tensor, ...]:
        inputs, target = super().__getitem__(place)
        return 2 * inputs, target


def test_the_items_of_a_class_of_ones_own_are_read_and_not_its_tensors() -> None:
    inputs, targets = next(iter(private(linear(), dataset=Doubled(*TENSORS.tensors))))
    rows, _ = next(iter(private(linear(), dataset=TENSORS)))
    assert torch.equal(inputs, 2 * rows)
    assert len(targets)


@pytest.mark.parametrize("most", [None, 3])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_dataloader_draws_as_its_data_set_alone(
    workers: int, most: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    prefetch = 2 if workers else None
    loader = DataLoader(
        Pairs(),
        BATCH,
        sampler=SAMPLER,
        num_workers=workers,
        prefetch_factor=prefetch,
        collate_fn=stacked,
    )
    plain, loaded = linear(), linear()
    run(private(plain))
    run(private(loaded, dataset=loader, batch_size=None, max_physical_batch=most))
    assert torch.allclose(params_of(loaded), params_of(plain), rtol=1e-5, atol=1e-6)
    (said,) = (line for line in caplog.messages if "DataLoader" in line)
    assert (
        said
        == "DPSGD replaces RandomSampler by Poisson batches of all 30 examples of the DataLoader"
    )


class Stream(IterableDataset[Any]):
    """It has a length, and its examples no numbers."""

    def __len__(self) -> int:
        return SIZE

    def __iter__(self) -> Iterator[Any]:
        return iter(PAIRS)


def test_data_without_indices_or_batches_and_subsets_are_refused() -> None:
    some = SubsetRandomSampler(range(20))
    refused: dict[str, Any] = {
        "must be map-style": DataLoader(Stream(), BATCH),
        "makes no batches": DataLoader(TENSORS, batch_size=None),
        "SubsetRandomSampler leaves examples out": DataLoader(TENSORS, BATCH, sampler=some),
    }
    for said, loader in refused.items():
        with pytest.raises(ValueError, match=said):
            private(linear(), dataset=loader)


def test_what_workers_have_read_ahead_is_neither_charged_nor_lost() -> None:
    loader = DataLoader(Pairs(), BATCH, num_workers=1, prefetch_factor=4)
    ahead, plain = linear(), linear()
    loop, other = private(ahead, dataset=loader), private(plain)
    for _ in range(len(loop)):  # each step in a loop that is left
        loop.step(*next(iter(loop)))
        other.step(*next(iter(other)))
        assert (loop.steps_taken, loop.epsilon()) == (other.steps_taken, other.epsilon())
    assert torch.allclose(params_of(ahead), params_of(plain), rtol=1e-5, atol=1e-6)


def test_a_batch_is_drawn_once_although_it_is_read_again_after_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn, draw = list[Tensor](), poisson_batches.step_batch
    monkeypatch.setattr(
        poisson_batches, "step_batch", lambda *a, **k: drawn.append(draw(*a, **k)) or drawn[-1]
    )
    data, model = Pairs(), linear()
    loop = private(model, dataset=data, seed=None, batch_size=SIZE, steps=1, max_physical_batch=8)
    data.raises_at = 19  # in the third piece of four
    with pytest.raises(OSError, match="slow"):
        run(loop)
    run(loop)
    assert len(drawn) == 1
    assert loop.steps_taken == 1


@pytest.mark.parametrize("place", [2, 19])  # in the first piece, and in the third one of four
def test_pieces_read_before_an_error_do_not_count_twice(place: int) -> None:
    whole, again = linear(), linear()
    settings: dict[str, Any] = {"noise_multiplier": 0.0, "batch_size": SIZE, "steps": 2}
    run(private(whole, **settings))
    loop = private(again, dataset=Pairs(raises_at=place), max_physical_batch=8, **settings)
    with pytest.raises(OSError, match="slow"):
        run(loop)
    run(loop)
    assert torch.allclose(params_of(again), params_of(whole), rtol=1e-5, atol=1e-6)


def test_at_most_max_physical_batch_examples_are_read_at_a_time() -> None:
    data = Pairs()
    loop = private(linear(), dataset=data, batch_size=SIZE, epochs=1, max_physical_batch=7)
    stepped, sizes = list[bool](), list[int]()
    for inputs, targets in loop:
        sizes.append(len(inputs))
        assert data.read.total() == sum(sizes)
        stepped.append(loop.step(inputs, targets))
    assert sizes == [7, 7, 7, 7, 2]
    assert stepped == [False, False, False, False, True]


def test_a_piece_is_let_go_of_before_the_next_one_is_read() -> None:
    made, alive = list[ref[Tensor]](), list[int]()

    def collate(pairs: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        batch = stacked(pairs)
        if len(pairs) > 1:  # one alone is the trial of padding
            alive.append(sum(each() is not None for each in made))
            made.append(ref(batch[0]))
        return batch

    loop = private(
        linear(),
        dataset=Pairs(),
        collate_fn=collate,
        batch_size=SIZE,
        steps=2,
        max_physical_batch=5,
    )
    alive.clear()
    for inputs, targets in loop:
        loop.step(inputs, targets)
        del inputs, targets
    assert alive == [0] * 12


def test_a_piece_cannot_be_left_out_and_a_loop_left_amid_a_batch_resumes_it() -> None:
    whole, left = linear(), linear()
    run(private(whole))
    loop = private(left, max_physical_batch=3)
    for inputs, targets in loop:
        loop.step(inputs, targets)
        break
    pieces = iter(loop)
    next(pieces)
    with pytest.raises(BatchError, match="was not stepped"):
        next(pieces)
    assert loop.epsilon() == 0
    run(loop)
    assert torch.allclose(params_of(left), params_of(whole), rtol=1e-5, atol=1e-6)


def test_a_last_piece_that_the_ledger_refuses_counts_once_if_it_is_tried_again(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = DurableLedger.create(tmp_path / "ledger.db")
    whole, again = linear(), linear()
    settings: dict[str, Any] = {"noise_multiplier": 0.0, "batch_size": SIZE, "steps": 1}
    run(private(whole, **settings))
    loop = private(again, ledger=ledger.path, max_physical_batch=20, **settings)
    batches = iter(loop)
    loop.step(*next(batches))
    last = next(batches)
    with monkeypatch.context() as patch:
        patch.setattr(
            DurableLedger,
            "charge",
            lambda *_, **more: (_ for _ in ()).throw(LedgerError("it is locked")),
        )
        for _ in range(2):
            with pytest.raises(LedgerError, match="locked"):
                loop.step(*last)
    assert loop.step(*last)
    assert torch.allclose(params_of(again), params_of(whole), rtol=1e-5, atol=1e-6)


def test_no_worker_outlives_the_loop() -> None:
    import torch.multiprocessing as processes

    others = processes.active_children()  # of simulations that other tests have left running
    loop = private(linear(), dataset=DataLoader(Pairs(), BATCH, num_workers=1), epochs=1)
    run(loop)
    workers = [each for each in processes.active_children() if each not in others]
    for process in workers:
        process.join(20)  # on a busy machine one that was told to end takes a moment
    assert [each for each in workers if each.is_alive()] == []


Rows = list[tuple[Tensor, Tensor]]


def contrast(outputs: Tensor, targets: Tensor) -> Tensor:
    rows = functional.normalize(outputs, dim=1)
    return functional.cross_entropy(
        rows @ rows.t(), torch.arange(len(rows)).flip(0), reduction="none"
    )


def assert_refused_at_no_cost(loop: DPSGD, said: str) -> None:
    before = params_of(loop._model)
    with pytest.raises(ValueError, match=said):
        run(loop)
    assert (loop.epsilon(), loop.steps_taken) == (0, 0)
    assert torch.equal(params_of(loop._model), before)


def test_a_loss_that_mixes_the_batch_is_refused_by_the_first_step_and_costs_nothing() -> None:
    assert_refused_at_no_cost(
        private(linear(), loss=contrast), "loss: the value of an example depends on other"
    )
    assert_refused_at_no_cost(
        private(linear(), loss=functional.cross_entropy), "one value an example"
    )


def less_the_mean(pairs: Rows) -> tuple[Tensor, Tensor]:
    inputs, targets = stacked(pairs)
    return inputs - inputs.mean(0), targets


def seldom_mixed_up(pairs: Rows) -> tuple[Tensor, Tensor]:
    inputs, targets = stacked(pairs)
    share, order = float(np.random.beta(1.0, 1.0)), torch.randperm(len(pairs))
    mixed = share * inputs + (1 - share) * inputs[order]
    return mixed if random.random() < 0.5 else inputs, targets


def by_the_number(pairs: Rows) -> tuple[Tensor, Tensor]:
    inputs, targets = stacked(pairs)
    return inputs / len(pairs), targets


def of_another(pairs: Rows) -> tuple[Tensor, Tensor]:
    inputs, targets = stacked(pairs)
    return inputs, targets.roll(1)


def of_all_beside_noise(pairs: Rows) -> tuple[Tensor, Tensor]:
    """Labels that are smoothed by those of the batch."""
    inputs, targets = stacked(pairs)
    shares = functional.one_hot(targets, 3).float()
    return inputs + 0.01 * torch.randn(inputs.shape), 0.1 * shares + 0.9 * shares.mean(0)


def of_another_beside_noise(pairs: Rows) -> tuple[Tensor, Tensor]:
    inputs, targets = stacked(pairs)
    return inputs + 0.01 * torch.randn(inputs.shape), targets.roll(1)


MIXING = [
    less_the_mean,
    seldom_mixed_up,
    by_the_number,
    of_another,
    of_all_beside_noise,
    of_another_beside_noise,
]


@pytest.mark.parametrize("collate", MIXING)
def test_a_collate_fn_that_mixes_the_batch_is_refused_before_anything_is_drawn(
    collate: Any,
) -> None:
    with pytest.raises(ValueError, match=r"collate_fn: a row .*several examples"):
        private(linear(), dataset=PAIRS, collate_fn=collate)


def test_a_collate_fn_with_its_own_generator_is_refused() -> None:
    own = np.random.default_rng(90217)

    def collate(pairs: Rows) -> tuple[Tensor, Tensor]:
        inputs, targets = stacked(pairs)
        return inputs + float(own.normal()), targets

    with pytest.raises(ValueError, match="or draws random numbers that the seeds of"):
        private(linear(), dataset=PAIRS, collate_fn=collate)


class Before:
    """Subtracts a running mean of the batches, from some call on."""

    def __init__(self, calls: int) -> None:
        self.left = calls
        self.mean = torch.zeros(5)

    def __call__(self, pairs: Rows) -> tuple[Tensor, Tensor]:
        inputs, targets = stacked(pairs)
        self.left -= 1
        less = inputs - self.mean if self.left < 0 else inputs
        self.mean = 0.9 * self.mean + 0.1 * inputs.mean(0)
        return less, targets


def test_a_collate_fn_that_keeps_something_of_earlier_batches_is_refused() -> None:
    with pytest.raises(ValueError, match=r"collate_fn: .* keeps something of those before"):
        private(linear(), dataset=PAIRS, collate_fn=Before(0))


def test_a_collate_fn_that_uses_earlier_batches_only_later_is_refused() -> None:
    loop = private(linear(), dataset=PAIRS, collate_fn=Before(100), steps=200)
    with pytest.raises(ValueError, match=r"collate_fn: .* keeps something of those before"):
        run(loop)
    assert loop.steps_taken < 200


def sorted_by_length(pairs: Rows) -> tuple[Tensor, Tensor]:
    return stacked(sorted(pairs, key=lambda pair: float(pair[0].norm())))


def noisy(pairs: Rows) -> tuple[Tensor, Tensor]:
    inputs, targets = stacked(pairs)
    return inputs + 0.1 * torch.randn(inputs.shape) * (random.random() + np.random.rand()), targets


def padded_before(pairs: Rows) -> tuple[Tensor, Tensor]:
    lengths = [1 + int(target) for _, target in pairs]
    cut = [
        functional.pad(one[:length], (max(lengths) - length, 0))
        for (one, _), length in zip(pairs, lengths, strict=True)
    ]
    return functional.pad(torch.stack(cut), (5 - max(lengths), 0)), stacked(pairs)[1]


@pytest.mark.parametrize("collate", [sorted_by_length, noisy, padded_before])
def test_sorting_padding_and_noise_for_each_example_are_accepted(
    collate: Any,
) -> None:
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())
    loop = private(linear(), dataset=PAIRS, collate_fn=collate)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), str(np.random.get_state())) == states[1:]
    assert run(loop).steps_taken == len(loop)


CHANGES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "in place": lambda inputs, targets: inputs.sub_(inputs.mean(0)),
    "by data": lambda inputs, targets: inputs.data.sub_(inputs.mean(0)),
    "by numpy": lambda inputs, targets: targets.numpy().fill(0),
    "by set": lambda inputs, targets: setattr(inputs, "data", inputs[:2].clone()),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_batch_that_was_written_to_without_a_trace_is_refused(
    change: Callable[[Tensor, Tensor], object],
) -> None:
    loop = private(linear())
    inputs, targets = next(iter(loop))
    change(inputs, targets)
    with pytest.raises(BatchError, match="batch that was drawn"):
        loop.step(inputs, targets)
    assert loop.epsilon() == 0


class Bounded(nn.Module):
    """Raises states in place to at least the size of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = linear()

    def forward(self, inputs: Tensor, states: Tensor) -> Tensor:
        states.clamp_(min=inputs.abs())
        return self.layer(inputs / (1 + states))  # type: ignore[no-any-return]


def test_what_a_forward_writes_into_a_buffer_of_collate_fn_reaches_no_step() -> None:
    buffer = torch.zeros(SIZE, COUNTED.inputs.shape[1])

    def with_states(pairs: Rows) -> Any:
        inputs, targets = stacked(pairs)
        return (inputs, buffer[: len(pairs)]), targets

    run(private(Bounded(), dataset=PAIRS, collate_fn=with_states))
    assert not buffer.any()


def test_values_that_are_not_finite_are_no_change_of_a_batch() -> None:
    inputs = COUNTED.inputs.clone()
    inputs[::3] = float("nan")
    loop = private(linear(), dataset=list(zip(inputs, COUNTED.targets, strict=True)), batch_size=30)
    loop.step(*next(iter(loop)))
    assert loop.steps_taken == 1


def test_a_data_set_that_grows_or_shrinks_is_refused_and_costs_nothing() -> None:
    for change in (lambda rows: rows.append(PAIRS[0]), lambda rows: rows.pop()):
        rows = list(PAIRS)
        loop = private(linear(), dataset=rows)
        loop.step(*next(iter(loop)))
        change(rows)
        with pytest.raises(ValueError, match=f"dataset: it had {SIZE} examples when"):
            run(loop)
        assert loop.steps_taken == 1


class Centres(nn.Module):
    """A loss with parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.at = nn.Parameter(torch.zeros(3, 3))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - self.at[targets]).square().mean(dim=1)


def test_a_loss_whose_parameters_no_step_would_change_is_refused() -> None:
    with pytest.raises(ValueError, match="loss: it has trainable parameters"):
        private(linear(), loss=Centres())
    run(private(linear(), loss=Centres().requires_grad_(False)))


def test_under_inference_mode_a_step_is_refused_and_costs_nothing() -> None:
    loop = private(linear())
    batch = next(iter(loop))
    with torch.inference_mode(), pytest.raises(ValueError, match="inference mode"):
        loop.step(*batch)
    assert loop.steps_taken == 0
    with torch.no_grad():
        loop.step(*batch)


def test_a_parameter_group_added_after_the_start_is_refused_and_costs_nothing() -> None:
    loop = private(linear())
    loop._optimizers.all[0].add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert_refused_at_no_cost(loop, "optimizer: it holds parameters that are not the model's")


def test_a_parameter_unfrozen_later_is_refused_unless_the_optimizer_holds_it() -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 3))
    model[0].requires_grad_(False)
    loop = private(model)
    loop.step(*next(iter(loop)))
    model[0].requires_grad_(True)
    with pytest.raises(ValueError, match=r"optimizer: .*all trainable parameters"):
        loop.step(*next(iter(loop)))
    loop._optimizers.all[0].add_param_group({"params": list(model[0].parameters())})
    loop.step(*next(iter(loop)))
