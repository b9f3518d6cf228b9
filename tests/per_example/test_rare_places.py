"""Rare places in which a forward or a loss may keep something of its examples: nothing stays."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from decimal import Decimal
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional
from torch.utils.data import TensorDataset

from discreet.per_example.objective import cross_entropy
from discreet.per_example.per_example import clipped_gradient_sum
from tests.per_example.test_left_outside import INPUTS, TARGETS, Helper, Kept, Late, used_late

Place = Callable[[], Kept]
PLACES = dict[str, Place]()
ALIVE = list[Helper]()  # which no function that is tested names


def place(made: Place) -> Place:
    PLACES[made.__name__] = made
    return made


def made_anew(make: Callable[[list[float]], Any], read: Callable[[Any], list[float]]) -> Place:
    """An attribute of an object that is given another value each time."""

    def found() -> Kept:
        held = SimpleNamespace(kept=make([0.0, 0.0]))
        return lambda: read(held.kept), lambda new: setattr(held, "kept", make(new))

    return found


def in_an_object(lead_to: Callable[[Helper], Callable[[], Any]]) -> Place:
    """An object to which only something else leads."""

    def found() -> Kept:
        helper = Helper()
        get = lead_to(helper)
        ALIVE.append(helper)
        return lambda: get().kept, lambda new: get().__dict__.update(kept=new)

    return found


PLACES |= {
    "a_deep_dictionary": made_anew(lambda new: {"a": {"b": {"c": {"d": new}}}}, lambda it: it["a"]["b"]["c"]["d"]),
    "a_tuple_of_tensors": made_anew(lambda new: ({"a": {"b": torch.tensor(new)}},), lambda it: it[0]["a"]["b"].tolist()),
    "a_frozen_set": made_anew(lambda new: frozenset(enumerate(new)), lambda it: [dict(it)[0], dict(it)[1]]),
    "decimals": made_anew(lambda new: tuple(map(Decimal, new)), lambda it: [*map(float, it)]),
    "a_distribution": made_anew(lambda new: Normal(torch.tensor(new), torch.ones(2)), lambda it: it.loc.tolist()),
    "arguments_of_a_partial": made_anew(lambda new: functools.partial(max, *new), lambda it: list(it.args)),
    "a_sparse_tensor": made_anew(lambda new: torch.tensor([*new, 1.0]).to_sparse(), lambda it: it.to_dense()[:2].tolist()),
}  # fmt: skip


def _in_a_set(helper: Helper) -> Callable[[], Any]:
    held = {helper}
    return lambda: next(iter(held))


def _in_a_key(helper: Helper) -> Callable[[], Any]:
    held = {helper: 1}
    return lambda: next(iter(held))


def _behind_a_proxy(helper: Helper) -> Callable[[], Any]:
    held = MappingProxyType({"it": helper})
    return lambda: held["it"]


def _in_an_array_of_objects(helper: Helper) -> Callable[[], Any]:
    held = np.array([helper, None], dtype=object)
    return lambda: held[0]


def _in_another_module(helper: Helper) -> Callable[[], Any]:
    held: Any = SimpleNamespace(module=ModuleType("of_a_project"))
    held.module.it = helper
    return lambda: held.module.it


PLACES |= {
    made.__name__.strip("_"): in_an_object(made)
    for made in (
        weakref.ref,
        _in_a_set,
        _in_a_key,
        _behind_a_proxy,
        _in_an_array_of_objects,
        _in_another_module,
    )
}


@place
def by_a_bound_method() -> Kept:
    held = [[0.0, 0.0]]
    ends = SimpleNamespace(last=held.__getitem__, keep=held.append)
    return lambda: ends.last(-1), lambda new: ends.keep(new)


@place
def by_a_view_of_memory() -> Kept:
    held = memoryview(bytearray(16)).cast("d")

    def write(new: list[float]) -> None:
        held[0], held[1] = new

    return held.tolist, write


@place
def by_a_name_that_is_computed() -> Kept:
    globals()["_".join(("computed", "name"))] = [0.0, 0.0]
    name = "_".join(("computed", "name"))
    return lambda: globals()[name], lambda new: globals().update({name: new})


@place
def on_a_class_of_classes() -> Kept:
    class Meta(type):
        kept = (0.0, 0.0)

    held = Meta("Made", (), {"__module__": __name__})()

    def write(new: list[float]) -> None:
        type(type(held)).kept = new  # type: ignore[attr-defined]

    return lambda: list(type(type(held)).kept), write  # type: ignore[attr-defined]


@place
def in_a_data_set() -> Kept:
    held = SimpleNamespace(rows=TensorDataset(torch.zeros(1, 2)))
    return lambda: held.rows.tensors[0][0].tolist(), lambda new: setattr(
        held.rows, "tensors", (torch.tensor([new]),)
    )


@place
def of_a_thread() -> Kept:
    held = threading.local()
    held.kept = [0.0, 0.0]
    return lambda: held.kept, lambda new: setattr(held, "kept", new)


@place
def in_a_masked_array() -> Kept:
    held = np.ma.masked_array([0.0, 0.0])

    def write(new: list[float]) -> None:
        held[:] = new

    return held.tolist, write


@place
def by_functions_under_the_name_of_a_library() -> Kept:
    kept = [0.0, 0.0]

    @functools.wraps(functional.gelu)
    def read() -> list[float]:
        return kept

    @functools.wraps(functional.gelu)
    def write(new: list[float]) -> None:
        kept[:] = new

    return read, write


def total_of(model: nn.Module, loss: Any = cross_entropy, inputs: Tensor = INPUTS) -> Tensor:
    return clipped_gradient_sum(model, inputs, targets=TARGETS, clip_norm=0.1, loss=loss)[0]


@pytest.mark.parametrize("name", PLACES)
def test_what_a_forward_leaves_in_a_rare_place_is_undone(name: str) -> None:
    read, write = PLACES[name]()
    model = Late((read, write))
    try:
        total_of(model)
    except ValueError as error:
        assert "leaves something of its examples in" in str(error)  # noqa: PT017 - or is undone
    assert list(read()) == [0.0, 0.0]


def test_a_loss_under_the_name_of_a_library_keeps_nothing() -> None:
    kept = [0.0, 0.0]

    @functools.wraps(functional.cross_entropy)
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = functional.cross_entropy(outputs, targets, reduction="none")
        return used_late(losses, lambda: kept, lambda new: kept.__setitem__(slice(None), new))

    with pytest.raises(ValueError, match="leaves something of its examples in"):
        total_of(nn.Linear(6, 3), loss)
    assert kept == [0.0, 0.0]


class Once(torch.autograd.Function):
    """The identity, whose gradient turns around after a large one."""

    sign = 1.0

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.is_large = bool((rows.detach().abs() > 40).any())
        return rows.clone()

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> Tensor:  # type: ignore[override]
        given = grads * Once.sign
        if ctx.is_large:
            Once.sign = -1.0
        return given


class Backward(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return Once.apply(super().forward(inputs))  # type: ignore[no-any-return, no-untyped-call]


class GradientInPlace(nn.Linear):
    """Turns its outputs around if the gradient of an earlier step was written to."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        grad = self.bias.grad
        if grad is not None and bool((inputs.detach().abs() > 40).any()):
            grad.fill_(7.0)
        return outputs if grad is None or bool((grad != 7).any()) else -outputs


class OneMoreHook(nn.Linear):
    """Adds a hook to a parameter that has one."""

    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.bias.register_hook(torch.clone)

    def forward(self, inputs: Tensor) -> Tensor:
        if (inputs.detach().abs() > 40).any():
            self.bias.register_hook(torch.neg)
        return super().forward(inputs)


@pytest.mark.parametrize("kind", [Backward, GradientInPlace, OneMoreHook])
def test_what_a_large_example_leaves_moves_no_later_step(kind: type[nn.Linear]) -> None:
    found = []
    for first in (INPUTS[:1], torch.full((1, 6), 1e3)):
        Once.sign = 1.0
        with torch.random.fork_rng():
            torch.default_generator.manual_seed(3)
            model = kind(6, 3)
        total_of(model)
        model.bias.grad = torch.zeros(3)
        moved = total_of(model, inputs=torch.cat([first, INPUTS[1:]]))
        found.append((moved, total_of(model)))
    (one, after), (other, later) = found
    assert float((one - other).norm()) <= 0.2001
    assert torch.equal(after, later)
