"""Habits of other loops: a second step of the optimizer, a loss that is none, and what accelerate's
`prepare` returns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer, lr_scheduler
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, TensorDataset

from discreet.dpsgd.dpsgd import DPSGD
from tests.dpsgd.loops import BATCH, COUNTED, private, run, sgd
from tests.node.clients import linear, params_of

TENSORS = TensorDataset(COUNTED.inputs, COUNTED.targets)


def stepped_once() -> tuple[nn.Module, Optimizer, DPSGD]:
    model = linear()
    optimizer = sgd(model.parameters())
    loop = private(model, lambda _: optimizer)
    loop.step(*next(iter(loop)))
    return model, optimizer, loop


def test_a_second_step_as_in_opacus_is_refused_and_moves_nothing() -> None:
    model, optimizer, loop = stepped_once()
    before = params_of(model)
    with pytest.raises(RuntimeError, match=r"optimizer\.step: private\.step"):
        optimizer.step()
    assert torch.equal(params_of(model), before)
    loop.step(*next(iter(loop)))
    assert loop.steps_taken == 2


def test_a_step_on_other_data_is_taken_once_the_gradients_are_cleared() -> None:
    model, optimizer, loop = stepped_once()
    before = params_of(model)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(COUNTED.inputs), COUNTED.targets).backward()
    optimizer.step()
    assert not torch.equal(params_of(model), before)
    loop.step(*next(iter(loop)))


def test_other_data_are_not_added_to_the_noised_mean() -> None:
    model, optimizer, _ = stepped_once()
    nn.functional.cross_entropy(model(COUNTED.inputs), COUNTED.targets).backward()
    with pytest.raises(RuntimeError, match=r"call optimizer\.zero_grad\(\)"):
        optimizer.step()


def test_a_new_loop_over_the_same_optimizer_steps() -> None:
    model, optimizer, _ = stepped_once()
    optimizer.state.clear()
    for group in optimizer.param_groups:
        del group["private_steps"]  # as a user would who takes the steps for another loop's
    again = private(model, lambda _: optimizer)
    again.step(*next(iter(again)))
    with pytest.raises(RuntimeError, match=r"private\.step has run"):
        optimizer.step()


SCHEDULERS: list[Callable[[Optimizer], Any]] = [
    lr_scheduler.ReduceLROnPlateau,
    lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 5),
    lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 5),
    lambda optimizer: lr_scheduler.StepLR(optimizer, 5),
]


@pytest.mark.filterwarnings("ignore:The epoch parameter:UserWarning")
@pytest.mark.parametrize("made", SCHEDULERS)
def test_a_scheduler_takes_no_truth_for_a_loss(made: Callable[[Optimizer], Any]) -> None:
    model = linear()
    optimizer = sgd(model.parameters())
    scheduler = made(optimizer)
    loop = private(model, lambda _: optimizer)
    taken = loop.step(*next(iter(loop)))
    assert taken
    with pytest.raises(TypeError, match=r"private\.step returns no loss"):
        scheduler.step(taken)


@pytest.mark.parametrize("use", [float, lambda loss: 0.0 + loss, lambda loss: loss / 3])
def test_a_log_takes_no_truth_for_a_loss(use: Callable[[Any], object]) -> None:
    loop = private(linear())
    taken: Any = loop.step(*next(iter(loop)))
    with pytest.raises(TypeError, match=r"private\.step returns no loss"):
        use(taken)


def test_the_answer_of_a_step_is_compared_and_printed_as_a_truth() -> None:
    loop = private(linear(), max_physical_batch=1, batch_size=29)
    batches = iter(loop)
    first = loop.step(*next(batches))
    assert not first
    assert (first == False, f"{first}", len({first, False})) == (True, "False", 1)  # noqa: E712


class Prepared:
    """A loader as `DataLoaderShard` of accelerate is one: it holds a loader, and says its class."""

    def __init__(self, inner: DataLoader[Any]) -> None:
        self.base_dataloader = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base_dataloader, name)

    @property
    def __class__(self) -> Any:
        return self.base_dataloader.__class__


class AcceleratedOptimizer(SGD):
    """An optimizer as accelerate wraps it, without a constructor of torch's own, whose steps are
    left out while it accumulates."""

    def __init__(self, inner: Optimizer) -> None:
        self.optimizer = inner

    @property  # type: ignore[override]
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    def step(self, closure: Any = None) -> None:
        raise AssertionError("this step may be left out")


def trained(dataset: Any, made: Callable[[Any], Optimizer] = sgd) -> Tensor:
    model = linear()
    run(private(model, made, dataset=dataset, batch_size=None))
    return params_of(model)


def test_what_is_shaped_as_accelerates_loader_and_optimizer_trains_as_they_stand() -> None:
    batches = BatchSampler(SequentialSampler(TENSORS), BATCH, drop_last=False)
    loader = Prepared(DataLoader(TENSORS, batch_sampler=batches))
    plain = trained(DataLoader(TENSORS, BATCH))
    assert torch.equal(trained(loader), plain)
    assert torch.equal(trained(loader, lambda values: AcceleratedOptimizer(sgd(values))), plain)


def test_what_prepare_of_accelerate_returns_trains_as_it_stands() -> None:
    accelerator = pytest.importorskip("accelerate").Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(TENSORS, BATCH, shuffle=True))
    plain = trained(DataLoader(TENSORS, BATCH))
    assert torch.equal(trained(loader), plain)
    assert torch.equal(trained(loader, lambda values: accelerator.prepare(sgd(values))), plain)
