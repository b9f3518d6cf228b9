"""Models whose sums were once those of other gradients than plain autograd gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn import functional

from discreet.per_example import per_example
from discreet.per_example.agreement import tried
from discreet.per_example.per_example import clipped_gradient_sum, clipped_sum_by_owner
from discreet.per_example.trial import Trial
from tests.per_example.test_per_example_choice import seeded
from tests.per_example.test_per_example_oracle import assert_matches
from tests.per_example.test_watch import TARGETS, Forward, built_is_an_error, rows

__all__ = ["built_is_an_error"]


class Held(torch.autograd.Function):
    """Does nothing, and holds its gradient within 0.01."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: object, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: object, grads: Tensor) -> Tensor:  # type: ignore[override]
        return grads.clamp(-0.01, 0.01)


class Normed(Held):
    """Does nothing, and gives its gradient the norm 1."""

    @staticmethod
    def backward(ctx: object, grads: Tensor) -> Tensor:  # type: ignore[override]
        return grads / grads.norm().clamp(min=1e-12)


def _held_by_a_hook(model: Forward, x: Tensor) -> Tensor:
    if x.requires_grad:
        x.register_hook(lambda grads: grads.clamp(-0.01, 0.01))
    return x


@pytest.mark.parametrize(
    "between",
    [lambda model, x: Held.apply(x), lambda model, x: Normed.apply(x), _held_by_a_hook],
)
def test_a_backward_that_depends_on_the_gradients_size_is_that_of_plain_autograd(
    between: Callable[[Forward, Tensor], Tensor],
) -> None:
    assert_matches(seeded(lambda: Forward(between)), rows(), TARGETS, clip=0.2)


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3))


@pytest.mark.parametrize("build", [_perceptron, lambda: Forward(lambda model, x: x.tanh())])
def test_a_hook_that_holds_a_large_gradient_of_a_parameter_is_called(
    build: Callable[[], nn.Module],
) -> None:
    model = seeded(build)
    assert_matches(model, 9 * rows(), TARGETS, clip=0.2)
    for parameter in model.parameters():
        parameter.register_hook(lambda grads: grads.clamp(-0.3, 0.3))
    assert_matches(model, 9 * rows(), TARGETS, clip=0.2)


def test_a_backward_hook_of_a_layer_sees_one_example() -> None:
    model = seeded(lambda: Forward(lambda model, x: x.tanh()))
    model.second.register_full_backward_hook(
        lambda layer, given, made: (given[0] / given[0].norm().clamp(min=1.0),)
    )
    assert_matches(model, 9 * rows(), TARGETS, clip=0.2)


SCRIPTED = "scripted"


def _with_scripted() -> Forward:
    model = Forward(lambda model, x: x + model.get_submodule(SCRIPTED)(x))
    model.add_module(SCRIPTED, torch.jit.script(nn.Linear(4, 4)))
    return model


UNSEEN: dict[str, Callable[[], Forward]] = {
    "a scripted layer": _with_scripted,
    "a parameter that vmap maps": lambda: Forward(
        lambda model, x: x + vmap(lambda row: x @ row)(model.wide).sum(0).unsqueeze(1)
    ),
    "a parameter that a layer takes as input": lambda: Forward(
        lambda model, x: x + model.first(model.scale)
    ),
}


@pytest.mark.filterwarnings(
    "ignore:.torch.jit:DeprecationWarning", "ignore:.torch.jit:FutureWarning"
)
@pytest.mark.parametrize("name", UNSEEN)
def test_a_branch_that_no_made_up_example_takes_has_its_gradients(name: str) -> None:
    model = seeded(UNSEEN[name])
    inner = model.between
    model.between = lambda model, x: inner(model, x) if bool((x.abs() > 5).any()) else x
    assert_matches(model, 40 * rows(), TARGETS, clip=0.2)


def _a_little_more(model: Forward, x: Tensor) -> Tensor:
    if bool(x.abs().sum() > 0.9):
        return 1.0006 * x
    return x


def _large_only(model: Forward, x: Tensor) -> Tensor:
    if bool(x.abs().sum() > 0.9):
        return x + (x.abs() - 3).relu()
    return x


@pytest.mark.parametrize("between", [_a_little_more, _large_only])
def test_an_answer_that_changes_a_gradient_a_little_or_elsewhere_is_not_settled(
    between: Callable[[Forward, Tensor], Tensor],
) -> None:
    model = seeded(lambda: Forward(between)).double()
    inputs = torch.cat([rows().double(), 9 * rows().double()])
    before = [value.detach().clone() for value in model.parameters()]
    assert_matches(model, inputs, TARGETS.repeat(2), clip=0.2)
    assert not per_example._trials[model].questions.settled
    assert all(map(torch.equal, model.parameters(), before))  # asked with others, which are copies


def test_a_graph_that_a_model_made_before_has_its_gradients() -> None:
    model = seeded(lambda: Forward(lambda model, x: x @ model.turned))
    object.__setattr__(model, "turned", model.first.weight.t())
    assert_matches(model, rows(), TARGETS, clip=0.2)
    assert_matches(model, rows(), TARGETS, clip=0.2)


@pytest.mark.parametrize("more", [["a", "b", "c", "d", "e"], [1, 2, 3, 4, 5], 0.5])
def test_a_value_that_is_no_tensor_and_would_be_given_to_all_examples_is_refused(more: Any) -> None:
    class Plain(nn.Linear):
        def forward(self, x: Tensor, more: Any = None) -> Tensor:
            return super().forward(x)

    with pytest.raises(ValueError, match="a row for each example"):
        clipped_gradient_sum(Plain(4, 3), (rows(), more), targets=TARGETS, clip_norm=0.2)


def test_all_sequences_of_an_example_count_in_a_ctc_loss() -> None:
    def loss(outputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
        count = len(outputs)
        series = outputs.log_softmax(-1).flatten(0, 1).transpose(0, 1)
        given = [targets[name].flatten(0, 1) for name in ("marks", "steps", "sizes")]
        found = functional.ctc_loss(series, *given, reduction="none")
        return found.view(count, -1).mean(1)

    draws = torch.Generator().manual_seed(4)
    inputs = torch.randn(5, 2, 8, 4, generator=draws)
    targets = {
        "marks": torch.randint(1, 3, (5, 2, 3), generator=draws),
        "steps": torch.full((5, 2), 8),
        "sizes": torch.randint(1, 4, (5, 2), generator=draws),
    }
    model = seeded(lambda: nn.Linear(4, 3))
    found, _ = clipped_gradient_sum(model, inputs, targets=targets, clip_norm=9.0, loss=loss)
    wanted = torch.autograd.grad(loss(model(inputs), targets).sum(), list(model.parameters()))
    torch.testing.assert_close(found, torch.cat([value.flatten() for value in wanted]))


UNITS: dict[str, Callable[[Forward, Tensor], Tensor]] = {
    "squeezed": lambda model, x: x.unsqueeze(0).squeeze(),
    "zeros that are filled": lambda model, x: _filled(x),
    "a parameter written into zeros": lambda model, x: x + _written(model.scale),
}


def _filled(x: Tensor) -> Tensor:
    found = torch.zeros(x.shape[0], 4)
    found[:, 1:] += x[:, :3]
    return found


def _written(scale: Tensor) -> Tensor:
    found = torch.zeros(2, 4)
    found[1, 1:3] = scale[:2]
    return found.sum(0)


@pytest.mark.usefixtures("built_is_an_error")
@pytest.mark.parametrize("name", UNITS)
def test_the_rows_of_an_owner_are_a_batch_as_the_model_expects(name: str) -> None:
    model = seeded(lambda: Forward(UNITS[name]))
    owners = torch.tensor([0, 0, 1, 1, 1])
    _, norms = clipped_sum_by_owner(model, (rows(), TARGETS), owners, clip_norm=0.2)
    for owner, norm in enumerate(norms):
        some = owners == owner
        loss = functional.cross_entropy(model(rows()[some]), TARGETS[some])
        found = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
        torch.testing.assert_close(norm, torch.cat([value.flatten() for value in found]).norm())


def test_a_model_may_have_a_sparse_buffer() -> None:
    model = seeded(lambda: Forward(lambda model, x: (model.links @ x.t()).t()))
    model.register_buffer("links", torch.eye(4).roll(1, 0).to_sparse())
    assert_matches(model, rows(), TARGETS, clip=0.2)


def test_a_row_that_a_negative_number_ignores_has_no_gradient() -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(9, 3))

        def forward(self, ids: Tensor) -> Tensor:
            return functional.embedding_bag(ids, self.table, padding_idx=-1)

    ids = torch.tensor([[0, 8, 2], [8, 8, 1], [5, 6, 7], [8, 3, 3], [8, 8, 8]])
    assert_matches(seeded(Bags), ids, TARGETS, clip=0.2)


@pytest.mark.usefixtures("built_is_an_error")
def test_values_that_have_a_gradient_may_be_asked_for_one() -> None:
    class Words(nn.Module):
        """A hook asks for gradients of the embedded words, as Hugging Face's checkpointing does."""

        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(5, 3, padding_idx=0)
            self.table.register_forward_hook(lambda _, __, words: words.requires_grad_(True))

        def forward(self, ids: Tensor) -> Tensor:
            return functional.layer_norm(self.table(ids), (3,)).mean(1)

    assert_matches(seeded(Words), torch.arange(10).view(5, 2) % 5, TARGETS, clip=0.2)


class TiedWords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return functional.linear(self.table(ids).tanh(), self.table.weight)


def test_a_table_of_words_and_outputs_has_its_l1_norm_and_no_larger_one() -> None:
    ids = torch.tensor([[0, 1], [2, 2], [4, 3], [1, 4], [3, 0]])
    assert_matches(seeded(TiedWords), ids, ids.flip(1), clip=0.5, order=1)


def _scaled(model: Forward, x: Tensor) -> Tensor:
    if bool(x.mean() < -0.06):
        return x + model.scale.detach() * (model.last + model.strength) * x.tanh()
    return x


def _stronger(model: Forward) -> None:
    model.strength = 1.0


def _filled_buffer(model: Forward) -> None:
    model.last.fill_(1.0)  # type: ignore[operator]


@pytest.mark.parametrize("change", [_stronger, _filled_buffer])
def test_an_answer_is_settled_while_what_it_depends_on_stays(
    change: Callable[[Forward], None],
) -> None:
    model = seeded(lambda: Forward(_scaled))
    model.strength = 0.0
    assert_matches(model, rows(), TARGETS, clip=0.2)
    change(model)
    assert_matches(model, rows(), TARGETS, clip=0.2)


def test_a_model_whose_numbers_changed_a_few_times_is_asked_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[None] = []

    def counted(trial: Trial) -> Any:
        asked.append(None)
        return tried(trial)

    monkeypatch.setattr(per_example, "tried", counted)
    model = seeded(lambda: Forward(_scaled))
    model.strength = 0.0
    for number, trials in enumerate((1, 2, 3, 4, 4, 4)):
        model.other = number  # as a count of epochs, or a setting that saving a model writes
        assert_matches(model, rows(), TARGETS, clip=0.2)
        assert len(asked) == trials


def test_an_answer_is_not_settled_because_parameters_are_zeros_at_first() -> None:
    def between(model: Forward, x: Tensor) -> Tensor:
        if bool(x.mean() < -0.06):
            return x + model.scale * (model.wide.sum(0) * x).tanh()
        return x

    model = seeded(lambda: Forward(between))
    with torch.no_grad():
        model.scale.zero_()
        model.wide.zero_()
    assert_matches(model, rows(), TARGETS, clip=0.2)
    with torch.no_grad():
        model.scale.fill_(1.0)
        model.wide.fill_(1.0)
    assert_matches(model, rows(), TARGETS, clip=0.2)
