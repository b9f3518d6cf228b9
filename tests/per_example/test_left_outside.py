"""A forward or a loss that keeps something of its examples outside of its model is refused, also if
it uses that only much later."""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from functools import cache, lru_cache, partial
from queue import Queue
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from discreet.per_example import memory
from discreet.per_example.objective import cross_entropy
from discreet.per_example.per_example import clipped_gradient_sum

DRAWS = torch.Generator().manual_seed(60917)
INPUTS = torch.randn(12, 6, generator=DRAWS)
TARGETS = torch.randint(0, 3, (12,), generator=DRAWS)
LATE = 60  # calls, after which what is kept is used
Kept = tuple[Callable[[], list[float]], Callable[[list[float]], None]]


class Helper:
    def __init__(self) -> None:
        self.kept = [0.0, 0.0]
        self.of = {"inner": {"kept": [0.0, 0.0]}}


def in_a_helper() -> Kept:
    helper = Helper()
    return lambda: helper.kept, lambda new: setattr(helper, "kept", new)


def in_a_namespace() -> Kept:
    held = SimpleNamespace(kept=[0.0, 0.0])
    return lambda: held.kept, lambda new: setattr(held, "kept", new)


def two_levels_down() -> Kept:
    helper = Helper()
    return lambda: helper.of["inner"]["kept"], lambda new: helper.of["inner"].update(kept=new)


def in_an_array() -> Kept:
    held = np.zeros(2)

    def write(new: list[float]) -> None:
        held[:] = new

    return held.tolist, write


def in_a_tensor() -> Kept:
    held = torch.zeros(2)

    def write(new: list[float]) -> None:
        held.copy_(torch.tensor(new))

    return held.tolist, write


def in_a_variable() -> Kept:
    held = [0.0, 0.0]

    def write(new: list[float]) -> None:
        nonlocal held
        held = new

    return lambda: held, write


def in_a_queue() -> Kept:
    held = deque([0.0, 0.0])

    def write(new: list[float]) -> None:
        held.clear()
        held.extend(new)

    return lambda: list(held), write


def on_a_class() -> Kept:
    class Holder:
        kept: ClassVar[list[float]] = [0.0, 0.0]

    return lambda: Holder.kept, lambda new: setattr(Holder, "kept", new)


def on_a_function() -> Kept:
    def read() -> list[float]:
        return getattr(read, "kept", [0.0, 0.0])

    return read, lambda new: setattr(read, "kept", new)


def in_a_default() -> Kept:
    def held(kept: list[float] = [0.0, 0.0]) -> list[float]:  # noqa: B006
        return kept

    def write(new: list[float]) -> None:
        held()[:] = new

    return held, write


GLOBAL = [0.0, 0.0]
GLOBAL_ARRAY = np.zeros(2)


def in_a_global_name() -> Kept:
    def write(new: list[float]) -> None:
        global GLOBAL
        GLOBAL = new

    return lambda: GLOBAL, write


def in_a_global_array() -> Kept:
    def write(new: list[float]) -> None:
        GLOBAL_ARRAY[:] = new

    return lambda: [*GLOBAL_ARRAY], write


class Slots:
    __slots__ = ("kept",)


def in_slots() -> Kept:
    held = Slots()
    held.kept = [0.0, 0.0]
    return lambda: held.kept, lambda new: setattr(held, "kept", new)


def in_a_queue_of_threads() -> Kept:
    held = Queue[list[float]]()
    held.put([0.0, 0.0])

    def write(new: list[float]) -> None:
        held.get()
        held.put(new)

    return lambda: held.queue[0], write


def in_a_large_tensor() -> Kept:
    held = torch.zeros(2**20)

    def write(new: list[float]) -> None:
        held[:2] = torch.tensor(new)

    return lambda: held[:2].tolist(), write


# A module of the same project, whose global names a forward may write to.
STATE: Any = ModuleType("state_of_a_project")
STATE.kept = [0.0, 0.0]
STATE.Box = type("Box", (), {"__module__": "state_of_a_project"})
exec("def keep(new):\n    global kept\n    kept = new", vars(STATE))
sys.modules["state_of_a_project"] = STATE
PACKAGE: Any = ModuleType("package_of_a_project")
PACKAGE.state = STATE


def in_a_module() -> Kept:
    def write(new: list[float]) -> None:
        STATE.kept = new

    return lambda: STATE.kept, write


def by_a_function_of_a_module() -> Kept:
    return lambda: STATE.kept, lambda new: STATE.keep(new)


def in_a_module_of_a_package() -> Kept:
    def write(new: list[float]) -> None:
        PACKAGE.state.kept = new

    return lambda: PACKAGE.state.kept, write


def in_a_module_that_the_function_imports() -> Kept:
    def write(new: list[float]) -> None:
        import state_of_a_project as state

        state.kept = new

    return lambda: STATE.kept, write


def under_a_new_name_of_a_module() -> Kept:
    def write(new: list[float]) -> None:
        STATE.fresh = new

    return lambda: getattr(STATE, "fresh", [0.0, 0.0]), write


def under_a_new_name_of_a_library() -> Kept:
    def write(new: list[float]) -> None:
        torch.fresh = new  # type: ignore[attr-defined]

    return lambda: getattr(torch, "fresh", [0.0, 0.0]), write


def under_a_new_global_name() -> Kept:
    def write(new: list[float]) -> None:
        global fresh
        fresh = new  # type: ignore[name-defined]

    return lambda: globals().get("fresh", [0.0, 0.0]), write


def in_a_new_attribute_of_a_class() -> Kept:
    def write(new: list[float]) -> None:
        STATE.Box.fresh = new

    return lambda: getattr(STATE.Box, "fresh", [0.0, 0.0]), write


CONTEXT = ContextVar[list[float] | None]("CONTEXT", default=None)
WEAK = WeakKeyDictionary[Any, list[float]]()


def in_a_context_variable() -> Kept:
    def write(new: list[float]) -> None:
        CONTEXT.set(new)

    return lambda: CONTEXT.get() or [0.0, 0.0], write


def in_a_weak_dictionary() -> Kept:
    owner = Helper()

    def write(new: list[float]) -> None:
        WEAK[owner] = new

    return lambda: WEAK.get(owner, [0.0, 0.0]), write


def of_what_a_cache_holds(cached: Any) -> Kept:
    the_one = cached(lambda: Helper())
    the_one()
    return lambda: the_one().kept, lambda new: the_one().__dict__.update(kept=new)


def in_a_descriptor() -> Kept:
    class Described:
        def __init__(self) -> None:
            self.kept = [0.0, 0.0]

        def __get__(self, instance: object, owner: type) -> list[float]:
            return self.kept

    described = Described()
    holder: Any = type("Holder", (), {"__module__": __name__, "of": described})

    def write(new: list[float]) -> None:
        vars(holder)["of"].kept = new

    return lambda: holder.of, write


PLACES = [
    in_a_context_variable,
    in_a_weak_dictionary,
    partial(of_what_a_cache_holds, cache),
    partial(of_what_a_cache_holds, lru_cache(maxsize=2)),
    in_a_descriptor,
    in_a_module,
    by_a_function_of_a_module,
    in_a_module_of_a_package,
    in_a_module_that_the_function_imports,
    under_a_new_name_of_a_module,
    under_a_new_name_of_a_library,
    under_a_new_global_name,
    in_a_new_attribute_of_a_class,
    in_slots,
    in_a_queue_of_threads,
    in_a_large_tensor,
    in_a_helper,
    in_a_namespace,
    two_levels_down,
    in_an_array,
    in_a_tensor,
    in_a_variable,
    in_a_queue,
    on_a_class,
    on_a_function,
    in_a_default,
    in_a_global_name,
    in_a_global_array,
]


def used_late(values: Tensor, read: Any, write: Any) -> Tensor:
    """Values divided by a mean of earlier ones, after many calls."""
    mean, calls = read()
    write([0.9 * mean + 0.1 * float(values.detach().abs().mean()), calls + 1])
    return values / (1 + mean) if calls > LATE else values


class Late(nn.Module):
    def __init__(self, kept: Kept) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.functions = SimpleNamespace(read=kept[0], write=kept[1])

    def forward(self, inputs: Tensor) -> Tensor:
        return used_late(self.layer(inputs), self.functions.read, self.functions.write)


def clipped(model: nn.Module, loss: Any = cross_entropy) -> Tensor:
    return clipped_gradient_sum(model, INPUTS, targets=TARGETS, clip_norm=0.1, loss=loss)[0]


@pytest.mark.parametrize("place", PLACES)
def test_what_a_forward_leaves_in_any_place_is_refused_and_undone(place: Any) -> None:
    read, write = place()
    with pytest.raises(ValueError, match="leaves something of its examples in"):
        clipped(Late((read, write)))
    assert list(read()) == [0.0, 0.0]


@pytest.mark.parametrize("place", PLACES)
def test_what_a_loss_leaves_in_any_place_is_refused_and_undone(place: Any) -> None:
    read, write = place()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return used_late(functional.cross_entropy(outputs, targets, reduction="none"), read, write)

    with pytest.raises(ValueError, match="leaves something of its examples in"):
        clipped(nn.Linear(6, 3), loss)
    assert list(read()) == [0.0, 0.0]


def test_what_a_loss_leaves_of_targets_alone_is_refused() -> None:
    class Frequencies:
        def __init__(self) -> None:
            self.counts = torch.zeros(3)

        def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
            self.counts = self.counts + functional.one_hot(targets, 3).sum(0)
            return functional.cross_entropy(outputs, targets, reduction="none")

    with pytest.raises(ValueError, match="leaves something of its examples in the loss"):
        clipped(nn.Linear(6, 3), Frequencies())


def test_what_a_hook_keeps_is_refused() -> None:
    model, kept = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)), {}

    def keep(module: nn.Module, inputs: Any, outputs: Tensor) -> None:
        kept["largest"] = float(outputs.detach().abs().max())

    model[0].register_forward_hook(keep)
    with pytest.raises(ValueError, match="leaves something of its examples in kept"):
        clipped(model)


class KeepsGradients(torch.autograd.Function):
    kept = 0.0

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        KeepsGradients.kept = float(gradient.abs().mean())
        return gradient


class Backward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        values: Tensor = KeepsGradients.apply(self.layer(inputs))
        return values


def test_what_a_backward_pass_leaves_is_refused() -> None:
    with pytest.raises(ValueError, match=r"in KeepsGradients\.kept"):
        clipped(Backward())


class OnParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        self.layer.weight.scale = float(inputs.abs().mean())  # type: ignore[assignment]
        values: Tensor = self.layer(inputs)
        return values


def test_what_a_forward_leaves_on_a_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match="in an attribute of a parameter"):
        clipped(OnParameter())


class WarmUp:
    """It begins to keep a mean when it is told an epoch, or after some calls."""

    def __init__(self, mean: Callable[[Tensor], Any] = float) -> None:
        self.epoch, self.mean = 0, mean
        self.kept = SimpleNamespace(calls=0, mean=None)

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        losses = functional.cross_entropy(outputs, targets, reduction="none")
        self.kept.calls += 1
        if self.epoch > 0 or self.kept.calls > 100:
            self.kept.mean = self.mean(losses.detach().mean())
        return losses


@pytest.mark.parametrize("mean", [Tensor.clone, float])  # side by side, and one by one
def test_what_a_loss_counts_is_undone_and_said_once(
    mean: Callable[[Tensor], Any], caplog: pytest.LogCaptureFixture
) -> None:
    memory._told.clear()
    loss, model = WarmUp(mean), nn.Linear(6, 3)
    for loss.epoch in (0, 0, 1, 1):
        clipped(model, loss)
    assert loss.kept.calls == 0
    assert loss.kept.mean is None
    said = [each for each in caplog.messages if "undone after each pass" in each]
    assert said == ["the model's forward or the loss changes the loss.kept: undone after each pass"]


def test_a_buffer_of_a_loss_is_a_place_too() -> None:
    class Centres(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centre", torch.zeros(3))

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            self.get_buffer("centre").add_(outputs.detach().mean(0))
            return functional.cross_entropy(outputs, targets, reduction="none")

    with pytest.raises(ValueError, match=r"the loss\._buffers\['centre'\]"):
        clipped(nn.Linear(6, 3), Centres())


def test_a_time_that_a_loss_adds_up_is_not_refused() -> None:
    spent = {"seconds": 0.0}

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        started = time.perf_counter()
        losses = functional.cross_entropy(outputs, targets, reduction="none")
        spent["seconds"] += time.perf_counter() - started
        return losses

    model = nn.Linear(6, 3)
    for _ in range(5):
        clipped(model, loss)
    assert spent["seconds"] == 0.0


class Counting(nn.Module):
    """It counts its calls, remembers shapes, and makes a table at its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.state = Helper()
        self.tables = SimpleNamespace(made=None)

    def forward(self, inputs: Tensor) -> Tensor:
        self.state.kept = [self.state.kept[0] + 1, float(inputs.shape[-1])]
        if self.tables.made is None:
            self.tables.made = torch.linspace(1, 2, 3)
        return self.layer(inputs) * self.tables.made


def test_counts_shapes_and_tables_are_nothing_of_the_examples() -> None:
    model = Counting()
    plain = nn.Linear(6, 3)
    plain.load_state_dict(model.layer.state_dict())
    scaled = clipped_gradient_sum(
        plain,
        INPUTS,
        targets=TARGETS,
        clip_norm=0.1,
        loss=lambda outputs, targets: functional.cross_entropy(
            outputs * torch.linspace(1, 2, 3), targets, reduction="none"
        ),
    )[0]
    torch.testing.assert_close(clipped(model), scaled)
    assert model.state.kept[0] == 0  # put back, as the attributes of the model itself
