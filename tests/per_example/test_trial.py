"""Before data: a forward that keeps something of what it is given is refused, and so is a loss that
mixes examples."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from discreet.layers.branches import Questions
from discreet.per_example import agreement
from discreet.per_example.criteria import per_example_loss
from discreet.per_example.objective import Loss, Objective
from discreet.per_example.per_example import clipped_gradient_sum, l1_clipped_gradient_sum
from tests.per_example.notes import Notes
from tests.per_example.test_per_example_choice import batch, seeded
from tests.per_example.test_per_example_oracle import assert_matches
from tests.per_example.test_watch import Forward


def examples(count: int = 5) -> tuple[Tensor, Tensor]:
    inputs, targets = batch(count)
    return inputs[:, :4], targets


def _replaced(model: Forward, x: Tensor) -> Tensor:
    model.last = 0.9 * model.get_buffer("last") + 0.1 * x.detach().mean(0)
    return x + model.get_buffer("last")


def _written(model: Forward, x: Tensor) -> Tensor:
    model.get_buffer("last").copy_(x.detach().amax(0))
    return x


def _by_data(model: Forward, x: Tensor) -> Tensor:
    model.get_buffer("last").data += x.detach().amax(0)
    return x


def _clamped(model: Forward, x: Tensor) -> Tensor:
    model.wide.data.clamp_(max=0.5)
    return x


def _normed(model: Forward, x: Tensor) -> Tensor:
    return x + functional.embedding(x[:, 0].relu().long().clamp(max=2), model.wide, max_norm=0.5)


def _registered(model: Forward, x: Tensor) -> Tensor:
    model.register_buffer("newest", x.detach())
    return x


MOVING: dict[str, tuple[Callable[[Forward, Tensor], Tensor], str]] = {
    "a buffer that is replaced": (_replaced, "last"),
    "a buffer that is written": (_written, "last"),
    "a buffer that is written behind autograd": (_by_data, "last"),
    "a buffer that is new each time": (_registered, "newest"),
    "a parameter that is clamped": (_clamped, "wide"),
    "a table with max_norm": (_normed, "wide"),
}


@pytest.mark.parametrize("name", MOVING)
@pytest.mark.parametrize(
    "sums", [partial(clipped_gradient_sum, clip_norm=1.0), l1_clipped_gradient_sum]
)
def test_a_forward_that_changes_a_parameter_or_a_buffer_is_refused_by_its_name(
    sums: Callable[..., object], name: str
) -> None:
    between, moved = MOVING[name]
    inputs, targets = examples()
    clip = {"clip_norm": 1.0} if sums is l1_clipped_gradient_sum else {}
    with pytest.raises(ValueError, match=f"forward changes {moved}:"):
        sums(seeded(lambda: Forward(between)), inputs, targets=targets, **clip)


def _for_some(model: Forward, x: Tensor) -> Tensor:
    if bool((x.detach() > 90).any()):
        model.wide.data.mul_(0.5)
    return x


def _replaced_for_some(model: Forward, x: Tensor) -> Tensor:
    if bool((x.detach() > 90).any()):
        model.last = x.detach().mean(0)
    return x - model.last.mean()


@pytest.mark.parametrize(("between", "moved"), [(_for_some, "wide"), (_replaced_for_some, "last")])
def test_a_change_that_only_some_example_makes_is_refused_at_its_step(
    between: Callable[[Forward, Tensor], Tensor], moved: str
) -> None:
    model, (inputs, targets) = seeded(lambda: Forward(between)), examples()
    assert_matches(model, inputs, targets, clip=0.2)
    with pytest.raises(ValueError, match=f"forward changes {moved}:"):
        clipped_gradient_sum(model, 1e4 * inputs, targets=targets, clip_norm=0.2)


def _counts(model: Forward, x: Tensor) -> Tensor:
    model.seen += 1
    return x * model.seen


def _averages(model: Forward, x: Tensor) -> Tensor:
    model.average = 0.99 * getattr(model, "average", 0.0) + 0.01 * x.detach().mean(0)
    return x - model.average


OTHERWISE = {
    "attribute seen:": _counts,
    "attribute average:": _averages,
    "different outputs for the same inputs": lambda model, x: x * random.random(),
}


@pytest.mark.parametrize("words", OTHERWISE)
def test_a_model_that_gives_other_outputs_the_second_time_is_refused(words: str) -> None:
    between, (inputs, targets) = OTHERWISE[words], examples()
    with pytest.raises(ValueError, match=words):
        clipped_gradient_sum(
            seeded(lambda: Forward(between)), inputs, targets=targets, clip_norm=1.0
        )


def _shown(model: Forward, x: Tensor) -> Tensor:
    model.shown = x.detach()
    return x.relu()


def _made_once(model: Forward, x: Tensor) -> Tensor:
    if not hasattr(model, "angles"):
        model.register_buffer("angles", torch.linspace(0, 1, x.shape[1]))
    return x + model.get_buffer("angles")


@pytest.mark.parametrize(
    "between", [lambda model, x: functional.dropout(x, 0.5), _made_once, _shown]
)
def test_dropout_a_table_made_by_the_first_pass_and_kept_outputs_are_accepted(
    between: Callable[[Forward, Tensor], Tensor],
) -> None:
    inputs, targets = examples()
    for _ in range(2):
        total, _ = clipped_gradient_sum(
            seeded(lambda: Forward(between)), inputs, targets=targets, clip_norm=1.0
        )
    assert total.any()


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("options", [{"max_norm": 0.5}, {"scale_grad_by_freq": True}])
@pytest.mark.parametrize("own", [False, True], ids=["in a sequence", "in a forward of one's own"])
def test_a_table_with_max_norm_is_served_nowhere_and_stays_as_it_is(
    kind: type[nn.Module], options: dict[str, object], own: bool
) -> None:
    table = seeded(lambda: kind(6, 4, **options))
    layers = nn.Sequential(table, nn.Flatten(), nn.Linear(8 if kind is nn.Embedding else 4, 3))
    model, before = Around(layers) if own else layers, table.get_parameter("weight").clone()
    ids, targets = torch.tensor([[1, 2], [3, 3], [1, 5]]), torch.tensor([0, 1, 2])
    with pytest.raises(ValueError, match="max_norm or scale_grad_by_freq"):
        clipped_gradient_sum(model, ids, targets=targets, clip_norm=1.0)
    assert torch.equal(table.get_parameter("weight"), before)


class Around(nn.Module):
    """A forward of one's own around layers, which follows from the data."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.inner(inputs)
        return logits * (2 if bool(logits.sum() > 1e9) else 1)


def each(outputs: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(outputs, targets, reduction="none")


def pairwise(outputs: Tensor, targets: Tensor) -> Tensor:
    return (1 - outputs[:, :1] + outputs[:, 0]).relu().mean(1)


def contrast(outputs: Tensor, targets: Tensor) -> Tensor:
    rows = functional.normalize(outputs, dim=1)
    return functional.cross_entropy(
        rows @ rows.flip(0).t(), torch.arange(len(rows)), reduction="none"
    )


def straight(outputs: Tensor, targets: Tensor) -> Tensor:
    """The value of each example's own loss, with another gradient."""
    mixed = each(outputs, targets).mean().square() + 0 * outputs[:, 0]
    return each(outputs, targets).detach() + mixed - mixed.detach()


MIXING: dict[str, Loss] = {
    "pairs": pairwise,
    "contrast": contrast,
    "a hidden gradient": straight,
    "centred": lambda outputs, targets: each(outputs, targets) - each(outputs, targets).mean(),
    "the number of examples": lambda outputs, targets: each(outputs, targets) / len(targets),
    "how often a class is there": lambda o, t: (
        each(o, t) * len(t) / torch.bincount(t, minlength=3)[t]
    ),
    "hard pairs alone": lambda o, t: each(o, t) + (o[:, 0] - o[:, :1] - 5).relu().sum(1),
}


@pytest.mark.parametrize("name", MIXING)
@pytest.mark.parametrize(
    "build", [lambda: nn.Linear(5, 3), lambda: Around(nn.Linear(5, 3))], ids=["rules", "forward"]
)
def test_a_loss_that_mixes_examples_is_refused(name: str, build: Callable[[], nn.Module]) -> None:
    inputs, targets = batch()
    for _ in range(2):
        with pytest.raises(ValueError, match=r"loss: .*depends on other examples"):
            clipped_gradient_sum(
                seeded(build), inputs, targets=targets, clip_norm=1.0, loss=MIXING[name]
            )


class Focal:
    """A loss as an object without room for a weak reference."""

    __slots__ = ("power",)

    def __init__(self, power: float) -> None:
        self.power = power

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (1 - torch.exp(-each(outputs, targets))) ** self.power * each(outputs, targets)


WEIGHTS = torch.tensor([0.1, 3.0, 7.0])
HONEST: dict[str, Loss] = {
    "focal": Focal(2.0),
    "weighted": lambda outputs, targets: WEIGHTS[targets] * each(outputs, targets),
    "of torch": per_example_loss(nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.1)),
    "by row": lambda o, t: torch.stack(
        [each(a[None], b[None])[0] for a, b in zip(o, t, strict=True)]
    ),
    "of one output": lambda outputs, targets: (
        (outputs[:, :1].squeeze() - targets).square().reshape(-1)
    ),
    "of probabilities": lambda outputs, targets: (
        -outputs.softmax(1)[torch.arange(len(targets)), targets].log()
    ),
}


def adds_up(model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss) -> None:
    """The sum of a batch is that of its examples, each alone."""
    rows = [slice(0, len(inputs)), *(slice(row, row + 1) for row in range(len(inputs)))]
    clip = partial(clipped_gradient_sum, model, clip_norm=0.2, loss=loss)
    whole, *alone = (clip(inputs[row], targets=targets[row])[0] for row in rows)
    torch.testing.assert_close(whole, torch.stack(alone).sum(0), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", HONEST)
def test_a_loss_that_treats_every_example_alone_is_served(name: str) -> None:
    adds_up(seeded(lambda: nn.Linear(5, 3)), *batch(), HONEST[name])


def test_models_and_losses_are_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, notes, calls = seeded(lambda: nn.Linear(5, 3)), Notes(), list[int]()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        notes.note(None)
        return each(outputs, targets)

    inputs, targets = batch()
    for _ in range(3):
        clipped_gradient_sum(model, inputs, targets=targets, clip_norm=1.0, loss=loss)
        calls.append(len(notes.taken()))
    assert calls[0] < 40
    assert calls[1:] == [1, 1]


def test_made_up_examples_of_a_trial_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, right = list[Tensor](), agreement._tried_on

    def noted(objective: Objective, made: Tensor, questions: Questions, *more: Any) -> str:
        tried.append(made)
        return right(objective, made, questions, *more)

    monkeypatch.setattr(agreement, "_tried_on", noted)
    inputs, targets = examples()
    clipped_gradient_sum(
        nn.Sequential(nn.Linear(4, 3), nn.Dropout()), inputs, targets=targets, clip_norm=1.0
    )
    assert tried
    assert all(len(made.unique(dim=0)) == len(made) for made in tried)
