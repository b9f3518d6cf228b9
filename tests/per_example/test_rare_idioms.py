"""Idioms that once ran one example after the other, or were refused, and run side by side."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional
from torch.nn.utils.rnn import pack_sequence

from discreet.layers.branches import AnswersDiffer, Questions
from discreet.layers.custom_functions import seen
from discreet.layers.draws import no_draws
from discreet.layers.refusals import Unserved
from discreet.per_example.objective import cross_entropy, objective_of
from discreet.per_example.passes import passes
from discreet.per_example.per_example import clipped_gradient_sum
from tests.per_example.test_per_example_choice import seeded
from tests.per_example.test_per_example_oracle import assert_matches
from tests.per_example.test_watch import TARGETS, Forward, built_is_an_error, rows

__all__ = ["built_is_an_error"]


class Reversed(torch.autograd.Function):
    """Does nothing, and turns its gradient around."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, grads: Tensor) -> Tensor:  # type: ignore[override]
        return -grads


class Product(torch.autograd.Function):
    """The linear layer of PyTorch's own tutorial, with two results."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: Tensor, w: Tensor
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, w)
        return x @ w.t(), x.sum(1)

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, w = ctx.saved_tensors  # type: ignore[attr-defined]
        return grads[0] @ w + grads[1].unsqueeze(1), grads[0].t() @ x


def _product(model: Forward, x: Tensor) -> Tensor:
    found, sums = Product.apply(x, model.first.weight)  # type: ignore[no-untyped-call]
    return found + sums.unsqueeze(1)


def _lengths(x: Tensor) -> Tensor:
    return 1 + (x > 0).sum(1)


def _trimmed(model: Forward, x: Tensor) -> Tensor:
    lengths = _lengths(x)
    some = x[:, : lengths.max()]
    return model.scale * (
        some * (torch.arange(lengths.max()) < lengths[:, None])[:, : some.shape[1]]
    ).sum(1, keepdim=True)


def _packed(model: Forward, x: Tensor) -> Tensor:
    packed = pack_sequence(
        [row[:length] for row, length in zip(x, _lengths(x).clamp(max=4), strict=True)],
        enforce_sorted=False,
    )
    return x + model.scale * torch.nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[
        0
    ].sum(1, keepdim=True)


def _energy(model: Forward, x: Tensor) -> Tensor:
    return vmap(grad(lambda row: model.first(row).sin().sum().squeeze()))(x)


IDIOMS: dict[str, Callable[[Forward, Tensor], Tensor]] = {
    "a reversed gradient": lambda model, x: Reversed.apply(x),  # type: ignore[no-untyped-call]
    "a layer with a derivative of its own": _product,
    "a batch trimmed to its longest": _trimmed,
    "sequences cut to their lengths": _packed,
    "the gradient of an energy by its inputs": _energy,
    "an ensemble of weights under vmap": lambda model, x: vmap(lambda row: x * row)(model.wide).sum(
        0
    ),
    "a parameter as a layer's input": lambda model, x: x + model.first(model.scale),
    "a parameter that is read": lambda model, x: x / max(*model.scale.tolist(), 0.1) + model.scale,
    "the shape of its data": lambda model, x: x.view(x.data.size(0), 4) * x.data,
    "channels last": lambda model, x: (
        x + x.view(-1, 1, 2, 2).contiguous(memory_format=torch.channels_last).flatten(1)
    ),
    "a table without gradient": lambda model, x: x + model.table.requires_grad_(False)[0],
    "a mask for each of several windows": lambda model, x: functional.scaled_dot_product_attention(
        x.view(-1, 1, 2, 1),
        x.view(-1, 1, 2, 1),
        x.view(-1, 1, 2, 1),
        attn_mask=model.table.view(2, 1, 6)[..., :4].reshape(2, 1, 2, 2).repeat(len(x), 1, 1, 1),
    ).view(-1, 4),
    "a bias of one number": lambda model, x: functional.linear(
        x, model.first.weight, model.scale[:1]
    ),
    "where whole numbers are not zero": lambda model, x: (
        x
        + torch.stack([x[0, torch.where(torch.ones(1, 4).long())[1]] for _ in range(len(x))])[:, :4]
        * 0
    ),
}


@pytest.mark.usefixtures("built_is_an_error")
@pytest.mark.parametrize("name", IDIOMS)
def test_a_rare_idiom_runs_side_by_side(name: str) -> None:
    assert_matches(seeded(lambda: Forward(IDIOMS[name])), rows(), TARGETS, clip=0.2)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.usefixtures("built_is_an_error")
def test_an_encoder_with_padding_runs_side_by_side_in_eval_mode() -> None:
    layer = seeded(lambda: nn.TransformerEncoderLayer(4, 2, 4, batch_first=True))
    encoder = nn.TransformerEncoder(layer, 1)

    def between(model: Forward, x: Tensor) -> Tensor:
        series = x.view(-1, 2, 2).repeat(1, 1, 2)
        hides = torch.stack([x[:, 0] > 9, x[:, 1] > 0], 1)
        return encoder(series, src_key_padding_mask=hides)[:, 0]  # type: ignore[no-any-return]

    model = seeded(lambda: Forward(between))
    model.add_module("encoder", encoder)
    assert_matches(model.eval(), rows(), TARGETS, clip=0.2)


@pytest.mark.usefixtures("built_is_an_error")
@pytest.mark.parametrize(
    ("plain", "other", "is_compiled"),
    [
        (
            lambda model, x: x + functional.embedding((x[:, 0] > 0).long(), model.wide),
            lambda model, x: (
                x + functional.embedding((x[:, 0] > 0).long(), model.wide, sparse=True)
            ),
            False,
        ),
        (lambda model, x: x.sin(), lambda model, x: x.sin(), True),
    ],
    ids=["a table with sparse gradients", "a compiled function"],
)
def test_another_way_to_say_the_same_runs_side_by_side_too(
    plain: Callable[[Forward, Tensor], Tensor],
    other: Callable[[Forward, Tensor], Tensor],
    is_compiled: bool,
) -> None:
    if is_compiled:  # here, as the compiler takes two seconds to load
        other = torch.compile(other, backend="eager")
    models = [seeded(partial(Forward, between)) for between in (plain, other)]
    sums = [clipped_gradient_sum(model, rows(), targets=TARGETS, clip_norm=0.2) for model in models]
    torch.testing.assert_close(*sums)


def test_copies_of_one_example_that_round_differently_end_the_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def answers(*_: object) -> None:
        raise AnswersDiffer(torch.arange(4), "item")

    monkeypatch.setattr("discreet.per_example.passes.one_pass", answers)
    objective = objective_of(seeded(lambda: nn.Linear(4, 3)), cross_entropy)
    with pytest.raises(Unserved, match="round differently at item"):
        list(passes(objective, rows()[:1], TARGETS[:1], Questions(), no_draws(1)))


@pytest.mark.parametrize(
    ("dtype", "said"),
    [(torch.complex64, "scale is torch.complex64: hold"), (torch.half, "scale is torch.float16")],
)
def test_a_parameter_of_another_type_is_named(dtype: torch.dtype, said: str) -> None:
    model = seeded(lambda: Forward(lambda model, x: x))
    model.scale = nn.Parameter(model.scale.to(dtype))
    with pytest.raises(ValueError, match=said):
        clipped_gradient_sum(model, rows(), targets=TARGETS, clip_norm=0.2)


class Empty(nn.Module):
    """A layer without features, and an argument that is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.none, self.layer = nn.Linear(4, 0), nn.Linear(4, 3)
        self.made = nn.Linear(0, 3)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        assert mask is None
        return self.layer(x) + self.made(self.none(x))


@pytest.mark.usefixtures("built_is_an_error")
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_an_argument_may_be_none_and_a_layer_may_have_no_features() -> None:
    model = seeded(Empty)
    sums = [
        clipped_gradient_sum(model, given, targets=TARGETS, clip_norm=0.2)
        for given in (rows(), (rows(), None))
    ]
    torch.testing.assert_close(*sums, rtol=0, atol=0)
    assert_matches(model, rows(), TARGETS, clip=0.2)


class Outputs:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


@pytest.mark.usefixtures("built_is_an_error")
def test_outputs_may_be_an_object_of_the_models_own() -> None:
    class Wrapped(nn.Linear):
        def forward(self, x: Tensor) -> Outputs:  # type: ignore[override]
            return Outputs(super().forward(x))

    def loss(outputs: Outputs, targets: Tensor) -> Tensor:
        return functional.cross_entropy(outputs.logits, targets, reduction="none")

    model = seeded(lambda: Wrapped(4, 3))
    plain = seeded(lambda: nn.Linear(4, 3))
    found = clipped_gradient_sum(model, rows(), targets=TARGETS, clip_norm=0.2, loss=loss)
    wanted = clipped_gradient_sum(plain, rows(), targets=TARGETS, clip_norm=0.2)
    torch.testing.assert_close(found, wanted)


DRAWN: dict[str, Callable[[Forward, Tensor], Tensor]] = {
    "features in a random order": lambda model, x: x[:, torch.randperm(4)],
    "a drawn feature": lambda model, x: x.gather(1, torch.multinomial(x.softmax(1), 4)),
    "a drawn class": lambda model, x: (
        x * torch.distributions.Categorical(logits=x).sample().unsqueeze(1)
    ),
    "a drawn count": lambda model, x: x + torch.poisson(x.detach().exp()),
    "a drawn scale": lambda model, x: (
        x * torch.distributions.Gamma(x.detach().exp(), torch.ones(4)).sample()
    ),
}


@pytest.mark.usefixtures("built_is_an_error")
def test_a_mean_over_made_up_lengths_of_0_keeps_no_model_from_running_side_by_side() -> None:
    class Pooled(nn.Linear):
        def forward(self, series: Tensor, lengths: Tensor) -> Tensor:  # type: ignore[override]
            hides = torch.arange(6) >= lengths.unsqueeze(1)
            found = super().forward(series).masked_fill(hides.unsqueeze(2), -math.inf)
            sums = found.masked_fill(hides.unsqueeze(2), 0).sum(1)
            return found.amax(1) + sums / lengths.unsqueeze(1)

    series = torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(8))
    given = (series, torch.tensor([1, 6, 3, 2, 5]))
    assert_matches(seeded(lambda: Pooled(4, 3)), given, TARGETS, clip=0.2)  # type: ignore[arg-type]


@pytest.mark.usefixtures("built_is_an_error")
@pytest.mark.parametrize("name", DRAWN)
def test_what_a_model_draws_for_each_example_mixes_none(name: str) -> None:
    total, norms = clipped_gradient_sum(
        seeded(lambda: Forward(DRAWN[name])), rows(), targets=TARGETS, clip_norm=0.01
    )
    assert float(total.norm()) <= 0.05
    assert bool((norms > 0).all())


def test_a_partner_in_a_random_order_still_mixes() -> None:
    model = seeded(lambda: Forward(lambda model, x: x + x[torch.randperm(len(x))]))
    with pytest.raises(ValueError, match="mixes examples: getitem"):
        clipped_gradient_sum(model, rows(), targets=TARGETS, clip_norm=0.2)


def test_a_forward_that_writes_into_its_inputs_is_told_so() -> None:
    def writes(module: nn.Module, given: tuple[Tensor]) -> None:
        given[0].sub_(0.5)

    model = seeded(lambda: Forward(lambda model, x: x))
    model.register_forward_pre_hook(writes)
    with pytest.raises(ValueError, match="writes into its inputs"):
        clipped_gradient_sum(model, rows(), targets=TARGETS, clip_norm=0.2)


def _slope(model: Forward, x: Tensor) -> Tensor:
    energy = model.first(x).sin().sum()
    return torch.autograd.grad(energy, x, create_graph=True)[0]


def _penalised(model: Forward, x: Tensor) -> Tensor:
    with torch.enable_grad():
        given = x.detach().requires_grad_()
        values = model.first(given)
        (found,) = torch.autograd.grad(values, given, torch.ones_like(values), create_graph=True)
    return values * found.norm(2, dim=1, keepdim=True)


def _attacked(model: Forward, x: Tensor) -> Tensor:
    given = x.detach().requires_grad_()
    (found,) = torch.autograd.grad(model.first(given).logsumexp(1).sum(), given)
    return model.first(x + 0.1 * found.sign())


DERIVED: dict[str, Callable[[Forward, Tensor], Tensor]] = {
    "the slope of an energy": lambda model, x: _slope(model, x.detach().requires_grad_()),
    "a gradient of values that have one": _slope,
    "a penalty for gradients by inputs": _penalised,
    "an attack on the inputs": _attacked,
}


@pytest.mark.usefixtures("built_is_an_error")
@pytest.mark.parametrize("name", DERIVED)
def test_a_forward_that_takes_gradients_runs_side_by_side(name: str) -> None:
    assert_matches(seeded(lambda: Forward(DERIVED[name])), rows(), TARGETS, clip=0.2)


def test_a_gradient_by_what_all_examples_share_mixes_them() -> None:
    def between(model: Forward, x: Tensor) -> Tensor:
        weight = model.first.weight
        (found,) = torch.autograd.grad((x @ weight).square().sum(), weight, create_graph=True)
        return x @ (weight - 0.1 * found)

    with pytest.raises(ValueError, match="mixes examples"):
        clipped_gradient_sum(
            seeded(lambda: Forward(between)), rows(), targets=TARGETS, clip_norm=0.2
        )


def test_passes_of_several_threads_leave_pytorchs_own_functions_as_they_were() -> None:
    before = vars(torch.autograd.Function)["apply"]
    first, second = seen(), seen()
    first.__enter__()
    second.__enter__()
    assert vars(torch.autograd.Function)["apply"] is not before
    first.__exit__(None, None, None)
    assert vars(torch.autograd.Function)["apply"] is not before
    second.__exit__(None, None, None)
    assert vars(torch.autograd.Function)["apply"] is before
