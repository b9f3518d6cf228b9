"""What a forward leaves at its first pass is put back: hooks, attributes and global entries. One that
is made of several examples is refused, and so is a deviation over the batch."""

from __future__ import annotations

import functools
from queue import SimpleQueue
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from discreet.per_example.criteria import per_example_loss
from discreet.per_example.objective import cross_entropy
from discreet.per_example.per_example import clipped_gradient_sum

DRAWS = torch.Generator().manual_seed(9203)
INPUTS = torch.randn(16, 6, generator=DRAWS)
TARGETS = torch.randint(0, 3, (16,), generator=DRAWS)
NUMBERS = torch.randn(16, 3, generator=DRAWS)
STORE: dict[Any, Tensor] = {}
TABLES: dict[int, Tensor] = {}
C = 0.001


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.kept: Any = None

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(functional.relu(self.first(self.changed(inputs))))

    def changed(self, inputs: Tensor) -> Tensor:
        return inputs


class Centred(Layers):
    def changed(self, inputs: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = inputs.detach().mean(0)
        return inputs - self.kept


class CentredByName(Layers):
    def changed(self, inputs: Tensor) -> Tensor:
        if not hasattr(self, "centre"):
            self.centre = inputs.detach().mean(0)
        return inputs - self.centre


class CentredOutside(Layers):
    def changed(self, inputs: Tensor) -> Tensor:
        if "centre" not in STORE:
            STORE["centre"] = inputs.detach().mean(0)
        return inputs - STORE["centre"]


class Scaled(Layers):
    def changed(self, inputs: Tensor) -> Tensor:
        return inputs / (inputs.std(0) + 1e-6)


class ScaledAtFirst(Layers):
    def changed(self, inputs: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = inputs.detach().std(0)
        return inputs / self.kept


def seeded(kind: type[nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(4451)
        return kind()


def clipped(model: nn.Module, inputs: Tensor = INPUTS, **how: Any) -> Tensor:
    given: dict[str, Any] = {"targets": TARGETS[: len(inputs)], "clip_norm": C, **how}
    return clipped_gradient_sum(model, inputs, **given)[0]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (Centred, "mean"),
        (CentredByName, "mean"),
        (Scaled, "std"),
        (ScaledAtFirst, "std"),
    ],
)
def test_a_forward_that_learns_its_numbers_from_a_batch_is_refused_with_its_line(
    kind: type[nn.Module], name: str
) -> None:
    with pytest.raises(ValueError, match=rf"{name} works across the examples at .*\.py:\d+"):
        clipped(seeded(kind))


def test_a_forward_that_keeps_numbers_of_a_batch_in_a_global_name_is_refused() -> None:
    with pytest.raises(ValueError, match="leaves something of its examples in STORE"):
        clipped(seeded(CentredOutside))
    assert STORE == {}


def test_what_a_forward_writes_into_a_global_dictionary_does_not_outlast_its_pass() -> None:
    class Rare(Layers):
        """Keeps something of an example that no made-up one is like."""

        def changed(self, inputs: Tensor) -> Tensor:
            if (inputs > 300).any():
                STORE["largest"] = inputs.detach().max()
            return inputs

    inputs = INPUTS.clone()
    inputs[3] = 900.0
    clipped(seeded(Rare), inputs)
    assert STORE == {}


def test_a_table_that_a_forward_keeps_by_a_size_is_no_mixing() -> None:
    class Tabled(Layers):
        def changed(self, inputs: Tensor) -> Tensor:
            if inputs.shape[1] not in TABLES:
                TABLES[inputs.shape[1]] = torch.linspace(0, 1, inputs.shape[1])
            return inputs + TABLES[inputs.shape[1]]

    assert clipped(seeded(Tabled)).norm() > 0


class Capturing(nn.Module):
    """Installs hooks at its first call, as transformers does for hidden states, and notes that."""

    lengths: ClassVar[SimpleQueue[int]] = SimpleQueue()

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.last, self.installed = nn.Linear(6, 3), False

    def forward(self, inputs: Tensor) -> Tensor:
        found: list[Tensor] = []
        if not self.installed:
            for part in self.parts:
                part.register_forward_hook(lambda layer, given, out: layer.found.append(out))
            self.installed = True
        for part in self.parts:
            part.found = found
        for part in self.parts:
            inputs = part(inputs).tanh()
        Capturing.lengths.put(len(found))
        return self.last(found[-2])


def test_hooks_of_a_first_call_are_put_back_and_do_not_pile_up() -> None:
    model = seeded(Capturing)
    found = [clipped(model, clip_norm=1e6) for _ in range(2)]
    assert {Capturing.lengths.get() for _ in range(Capturing.lengths.qsize())} == {3}
    assert not any(part._forward_hooks for part in model.modules())
    assert model.installed is False
    losses = cross_entropy(model(INPUTS), TARGETS)
    plain = torch.autograd.grad(losses.sum(), list(model.parameters()), materialize_grads=True)
    wanted = torch.cat([value.flatten() for value in plain])
    for total in found:
        torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-5)


def test_gradients_through_half_precision_are_not_lost() -> None:
    """Their scale of 2^20 is infinite in float16, and each counted as zero."""

    class Halved(Layers):
        def forward(self, inputs: Tensor) -> Tensor:
            return self.last(functional.relu(self.first(inputs)).half().float())

    model = seeded(Halved)
    losses = cross_entropy(model(INPUTS), TARGETS)
    plain = torch.autograd.grad(losses.sum(), list(model.parameters()))
    wanted = torch.cat([value.flatten() for value in plain])
    torch.testing.assert_close(clipped(model, clip_norm=1e6), wanted, rtol=1e-2, atol=1e-2)


def hooked() -> nn.Module:
    criterion = nn.MSELoss(reduction="none")
    criterion.register_forward_hook(lambda _, given, values: values * values.mean())
    return criterion


def hooked_before() -> nn.Module:
    criterion = nn.MSELoss(reduction="none")
    criterion.register_forward_pre_hook(lambda _, given: (given[0] - given[0].mean(0), given[1]))
    return criterion


def with_a_forward() -> nn.Module:
    criterion: Any = nn.MSELoss(reduction="none")
    criterion.forward = lambda out, wanted: ((out - out.mean(0)) - wanted) ** 2
    return criterion


def with_rows() -> nn.Module:
    return nn.BCEWithLogitsLoss(weight=torch.rand(16, 1), reduction="none")


@pytest.mark.parametrize("make", [hooked, hooked_before, with_a_forward, with_rows])
def test_a_criterion_that_does_not_do_what_its_class_does_is_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"loss: .*(hook or a forward of its own|not each row)"):
        per_example_loss(make())


def test_a_criterion_whose_class_was_changed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.MSELoss, "forward", lambda self, out, wanted: (out - out.mean(0)) ** 2)
    with pytest.raises(ValueError, match="a forward of its own"):
        per_example_loss(nn.MSELoss())


def hooked_later() -> Any:
    criterion = nn.MSELoss(reduction="none")
    loss = per_example_loss(criterion)
    criterion.register_forward_pre_hook(lambda _, given: (given[0] - given[0].mean(0), given[1]))
    return loss


def named_as_ours() -> Any:
    @functools.wraps(cross_entropy)
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return functional.mse_loss(outputs - outputs.mean(0), targets, reduction="none").mean(1)

    return loss


@pytest.mark.parametrize("make", [hooked_later, named_as_ours])
def test_a_loss_is_known_by_what_it_is_and_else_tried(make: Any) -> None:
    with pytest.raises(ValueError, match="depends on other examples"):
        clipped(seeded(Layers), targets=NUMBERS, loss=make())
