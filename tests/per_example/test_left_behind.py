"""What reaches an example's gradient beside its own row: losses, attributes of modules, hooks on
all modules."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook

from discreet import DPSGD
from discreet.dpsgd.loop_plan import LoopPrivacy
from discreet.per_example.objective import Loss, cross_entropy
from discreet.per_example.per_example import clipped_gradient_sum
from tests.per_example.test_per_example_choice import seeded

CLIP = 0.5


def rows(count: int = 24, width: int = 6) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(40709))


def classes(count: int = 24) -> Tensor:
    return torch.randint(0, 3, (count,), generator=torch.Generator().manual_seed(3907))


def moved(model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss = cross_entropy) -> float:
    """The most, in clip norms, that the sum moves if one of the first examples is left out."""
    total, _ = clipped_gradient_sum(model, inputs, targets=targets, clip_norm=CLIP, loss=loss)
    found = []
    for place in range(3):
        rest = [row for row in range(len(inputs)) if row != place]
        less, _ = clipped_gradient_sum(
            model, inputs[rest], targets=targets[rest], clip_norm=CLIP, loss=loss
        )
        found.append(float((total - less).norm()) / CLIP)
    return max(found)


def one_by_one(model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss) -> Tensor:
    """The sum of clipped gradients by plain autograd."""
    parameters, total = list(model.parameters()), torch.zeros(())
    for place in range(len(inputs)):
        one = slice(place, place + 1)
        value = loss(model(inputs[one]), targets[one]).sum()
        grads = torch.autograd.grad(value, parameters, allow_unused=True, materialize_grads=True)
        flat = torch.cat([grad.flatten() for grad in grads])
        total = total + flat * min(1.0, CLIP / float(flat.norm()))
    return total


class Gives(nn.Module):
    """A layer whose outputs are in a tensor, a tuple or a dictionary."""

    def __init__(self, give: Callable[[Tensor], Any], out: int = 1) -> None:
        super().__init__()
        self.layer, self.give = nn.Linear(6, out), give

    def forward(self, inputs: Tensor) -> Any:
        return self.give(self.layer(inputs))


FORMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "a tensor": (lambda x: x, lambda outputs: outputs),
    "a tuple": (lambda x: (x, x.tanh()), lambda outputs: outputs[0]),
    "a dictionary": (lambda x: {"logits": x}, lambda outputs: outputs["logits"]),
}
BROADCAST = ["mse_loss", "poisson_nll_loss", "kl_div", "hinge_embedding_loss", "huber_loss"]


@pytest.mark.filterwarnings("ignore:Using a target size:UserWarning")
@pytest.mark.parametrize("name", BROADCAST)
@pytest.mark.parametrize("form", FORMS)
def test_a_loss_that_broadcasts_one_row_over_the_others_moves_no_sum(name: str, form: str) -> None:
    give, take = FORMS[form]
    function = getattr(functional, name)
    targets = rows()[:, 0].abs().round()
    targets[0] = 1e4

    def loss(outputs: Any, wanted: Tensor) -> Tensor:
        value: Tensor = function(take(outputs), wanted, reduction="none").mean(1)
        return value

    refused_or_bounded(seeded(lambda: Gives(give)), targets, loss)


def refused_or_bounded(model: nn.Module, targets: Tensor, loss: Loss) -> None:
    try:
        found = moved(model, rows(), targets, loss)
    except ValueError as error:
        assert "example" in str(error)  # noqa: PT017
    else:
        assert found <= 1 + 1e-4


LENGTHS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a division by the number of examples": lambda x, y: cross_entropy(x, y) / len(y),
    "a power of it": lambda x, y: cross_entropy(x, y) * 3.0 ** (len(y) - 20),
    "a step that no trial reaches": lambda x, y: (
        cross_entropy(x, y) * (1e4 if len(y) >= 24 else 1e-4)
    ),
}


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("form", FORMS)
def test_a_loss_that_reads_the_number_of_examples_moves_no_sum(name: str, form: str) -> None:
    give, take = FORMS[form]
    model = seeded(lambda: Gives(give, 3))
    refused_or_bounded(
        model, classes(), lambda outputs, targets: LENGTHS[name](take(outputs), targets)
    )


class Leaves(nn.Module):
    """Two layers whose forward leaves things on the module, as mixtures of experts and regularisers
    do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 16), nn.Linear(16, 3)
        self.hidden: Any = None
        self.aux: Any = 0

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs).relu()
        self.hidden, self.aux = hidden, hidden.mean(0).pow(2).sum()
        return self.second(hidden)  # type: ignore[no-any-return]


READING: dict[str, Callable[[Leaves], Tensor]] = {
    "a mean over the batch": lambda model: model.aux,
    "the same without its gradient": lambda model: model.aux.detach(),
    "hidden values of all examples": lambda model: model.hidden.square().mean(),
    "hidden values without a gradient": lambda model: model.hidden.detach().mean(),
}


@pytest.mark.parametrize("name", READING)
def test_a_loss_that_reads_what_the_forward_left_on_the_module_moves_no_sum(name: str) -> None:
    model = seeded(Leaves)
    inputs = rows()
    inputs[0] *= 30

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets) * (1 + READING[name](model))

    try:
        assert moved(model, inputs, classes(), loss) <= 1 + 1e-4
    except ValueError as error:
        assert "other examples of the batch" in str(error)  # noqa: PT017


PENALTIES: dict[str, Callable[[Leaves], Tensor]] = {
    "of the parameters": lambda model: sum(value.abs().sum() for value in model.parameters()),  # type: ignore[return-value,misc]
    "of one weight": lambda model: model.second.weight.square().sum(),
    "of what it gives for public rows": lambda model: model(rows(4)).square().mean(),
}


@pytest.mark.parametrize("name", PENALTIES)
def test_a_penalty_in_the_loss_is_part_of_each_gradient(name: str) -> None:
    model = seeded(Leaves)

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets) + 0.1 * PENALTIES[name](model)

    total, _ = clipped_gradient_sum(model, rows(), targets=classes(), clip_norm=CLIP, loss=loss)
    wanted = one_by_one(model, rows(), classes(), loss)
    torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-5)


def _normalised(outputs: Tensor, advantages: Tensor) -> Tensor:
    """As PPO normalises advantages, over the batch."""
    scaled = (advantages - advantages.mean()) / advantages.std()
    return outputs.squeeze(1) * scaled


def test_a_step_without_any_finite_gradient_is_an_error_and_costs_nothing() -> None:
    model = seeded(lambda: Gives(lambda x: {"logits": x}))
    data = torch.utils.data.TensorDataset(rows(), rows()[:, 0])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = DPSGD(
        model,
        optimizer,
        data,
        batch_size=16,
        steps=3,
        delta=1e-3,
        loss=lambda outputs, targets: outputs["logits"].squeeze(1) * (targets * torch.nan),
        privacy=LoopPrivacy(noise_multiplier=1.0, seed=90019),
    )
    before = [value.clone() for value in model.parameters()]
    with pytest.raises(ValueError, match=r"none of the \d+ gradients of this step is finite"):
        private.step(*next(iter(private)))
    assert private.epsilon() == 0
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.filterwarnings("ignore:std:UserWarning")
def test_advantages_normalised_over_the_batch_never_train_on_noise_alone() -> None:
    model = seeded(lambda: Gives(lambda x: x))
    data = torch.utils.data.TensorDataset(rows(), rows()[:, 0])
    private = DPSGD(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        data,
        batch_size=16,
        steps=3,
        delta=1e-3,
        loss=_normalised,
        privacy=LoopPrivacy(noise_multiplier=1.0, seed=41521),
    )
    with pytest.raises(
        ValueError, match=r"other examples of the batch|gradients of this step is finite"
    ):
        private.step(*next(iter(private)))


def _largest(model: Any, x: Tensor) -> Tensor:
    model.top = max(model.top, float(x.abs().max()))
    return x / model.top


def _previous(model: Any, x: Tensor) -> Tensor:
    kept = x.detach().sum(1, keepdim=True) if model.kept is None else model.kept.mean()
    model.kept = x.detach()
    return x - kept


def _queue(model: Any, x: Tensor) -> Tensor:
    model.queue.append(x.detach().sum())
    return x


def _table(model: Any, x: Tensor) -> Tensor:
    model.table["last"] = x.detach()
    return x


def _written(model: Any, x: Tensor) -> Tensor:
    model.held.data.copy_(x.detach()[0])
    return x + model.held


class Keeps(nn.Module):
    """A layer behind something that keeps what it has seen in a plain attribute."""

    def __init__(self, how: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(6, 3), how
        self.top, self.kept, self.held = 0.0, None, torch.zeros(6)
        self.queue, self.table = list[Tensor](), dict[str, Tensor]()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(self.how(self, inputs))  # type: ignore[no-any-return]


KEPT = {
    "attribute top": _largest,
    "attribute kept": _previous,
    r"examples in Keeps\.queue": _queue,
    r"examples in Keeps\.table": _table,
    "data works across the examples": _written,
}


@pytest.mark.parametrize("said", KEPT)
def test_a_model_that_keeps_what_it_has_seen_is_refused_by_the_attribute(said: str) -> None:
    model = seeded(lambda: Keeps(KEPT[said]))
    with pytest.raises(ValueError, match=said):
        clipped_gradient_sum(model, rows(), targets=classes(), clip_norm=CLIP)


SHARED = SimpleNamespace(kept=None)


class KeepsInAnObject(Keeps):
    def __init__(self, how: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(how)
        self.settings = SimpleNamespace(kept=None)


class KeepsInAnEmptyObject(Keeps):
    def __init__(self, how: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__(how)
        self.settings = SimpleNamespace()


class KeepsInAGlobalName(Keeps):
    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(self.how(SHARED, inputs))  # type: ignore[no-any-return]


HOLDERS: dict[type[Keeps], Callable[[Any], Any]] = {
    Keeps: lambda model: model,
    KeepsInAnObject: lambda model: model.settings,
    KeepsInAnEmptyObject: lambda model: model.settings,
    KeepsInAGlobalName: lambda model: SHARED,
}


def _at_an_outlier(model: Any, x: Tensor) -> Tensor:
    holder = getattr(model, "settings", model)
    if bool((x.detach().abs() > 90).any()):
        holder.kept = x.detach().mean()
    kept = getattr(holder, "kept", None)
    return x if kept is None else x - kept


@pytest.mark.parametrize("kind", HOLDERS)
def test_what_an_outlier_leaves_on_a_module_reaches_no_later_step(kind: type[Keeps]) -> None:
    sums = []
    for outlier in (1.0, 1e4):
        model, inputs = seeded(lambda: kind(_at_an_outlier)), rows()
        inputs[0] *= outlier
        clipped_gradient_sum(model, inputs, targets=classes(), clip_norm=CLIP)
        assert getattr(HOLDERS[kind](model), "kept", None) is None
        sums.append(clipped_gradient_sum(model, rows(), targets=classes(), clip_norm=CLIP)[0])
    assert torch.equal(*sums)


def test_a_list_that_grows_at_an_outlier_is_as_before_after_its_step() -> None:
    def grows(model: Any, x: Tensor) -> Tensor:
        if bool((x.detach().abs() > 90).any()):
            model.queue.append(x.detach())
        return x

    model, inputs = seeded(lambda: Keeps(grows)), rows()
    clipped_gradient_sum(model, inputs, targets=classes(), clip_norm=CLIP)
    clipped_gradient_sum(model, 1e4 * inputs, targets=classes(), clip_norm=CLIP)
    assert model.queue == []


def test_a_hook_on_all_modules_is_part_of_the_forward() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
    inputs = rows()
    inputs[0] *= 1e3
    plain, _ = clipped_gradient_sum(model, inputs, targets=classes(), clip_norm=CLIP)
    handle = register_module_forward_hook(lambda layer, given, outputs: outputs * 0.5)
    try:
        total, _ = clipped_gradient_sum(model, inputs, targets=classes(), clip_norm=CLIP)
        wanted = one_by_one(model, inputs, classes(), cross_entropy)
    finally:
        handle.remove()
    torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(total, plain)


def test_a_hook_on_all_modules_that_mixes_examples_is_refused() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)))
    handle = register_module_forward_hook(lambda layer, given, outputs: outputs - outputs.mean(0))
    try:
        with pytest.raises(ValueError, match="mixes examples"):
            clipped_gradient_sum(model, rows(), targets=classes(), clip_norm=CLIP)
    finally:
        handle.remove()
