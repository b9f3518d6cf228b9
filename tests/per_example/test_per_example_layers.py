"""Layer by layer, clipped sums of per-example gradients are those of a loop over examples."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from discreet.layers.terms import repeats
from tests.per_example.test_per_example_oracle import assert_matches

CONVOLUTIONS: dict[int, type[nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
ORDERS = st.sampled_from([1, 2])
COUNTS = st.integers(1, 5)


@pytest.fixture(autouse=True)
def no_slow_method(caplog: pytest.LogCaptureFixture) -> object:
    """All these layers have a rule: nothing may be served by torch.func or a loop."""
    with caplog.at_level(logging.INFO, logger="discreet"):
        yield
        assert not caplog.records


def check(
    build: Callable[[], nn.Module], inputs: Tensor, *, targets: Tensor, order: int = 2
) -> None:
    """The model's sum at a clip norm that clips some examples, with weights that do not depend on
    the test's order."""
    with torch.random.fork_rng():
        torch.manual_seed(2903)
        model = build()
    assert_matches(model, inputs, targets, clip=1.5, order=order)


def draw(*shape: int, classes: int = 3) -> tuple[Tensor, Tensor]:
    """Inputs and one class an example."""
    draws = torch.Generator().manual_seed(6421)
    return torch.randn(*shape, generator=draws), torch.randint(
        0, classes, shape[:1], generator=draws
    )


def tokens(count: int, length: int) -> tuple[Tensor, Tensor]:
    """Sequences of small numbers, and a number for every position."""
    draws = torch.Generator().manual_seed(5147)
    shape = (count, length)
    return torch.randint(0, 6, shape, generator=draws), torch.randint(0, 6, shape, generator=draws)


@st.composite
def convolutions(draw_value: st.DrawFn) -> tuple[int, dict[str, object], tuple[int, ...]]:
    """Dimensions, settings of a convolution, and the shape of its inputs."""
    dims = draw_value(st.sampled_from([1, 2, 2, 3]))
    groups = draw_value(st.sampled_from([1, 1, 2, 4]))
    each = st.tuples(*[st.integers(1, 3)] * dims)
    settings: dict[str, object] = {"groups": groups, "bias": draw_value(st.booleans())}
    settings.update({name: draw_value(each) for name in ("kernel_size", "dilation", "stride")})
    settings["padding"] = draw_value(
        st.one_of(st.integers(0, 2), st.tuples(*[st.integers(0, 2)] * dims))
    )
    if draw_value(st.booleans()):
        settings.update(padding=draw_value(st.sampled_from(["same", "valid"])), stride=1)
    settings["padding_mode"] = draw_value(
        st.sampled_from(["zeros", "zeros", "circular", "reflect"])
    )
    space = draw_value(st.tuples(*[st.integers(7, 9) if dims < 3 else st.just(7)] * dims))
    return dims, settings, (draw_value(COUNTS), 4, *space)


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@given(case=convolutions(), order=ORDERS)
@settings(max_examples=60, deadline=None)
def test_convolutions(case: tuple[int, dict[str, object], tuple[int, ...]], order: int) -> None:
    dims, options, shape = case
    assume(dims < 3 or options["padding_mode"] != "reflect")
    layer = CONVOLUTIONS[dims](4, 8, **options)
    size = layer(torch.zeros(shape)).flatten(1).shape[1]
    inputs, targets = draw(*shape)
    layers = [layer, nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(size, 3)]
    check(lambda: nn.Sequential(*layers), inputs, targets=targets, order=order)


def test_a_convolution_with_many_examples_and_positions_is_taken_in_pieces() -> None:
    inputs, targets = draw(40, 3, 30, 30)
    layers = [nn.Conv2d(3, 4, 5, padding=2), nn.Tanh(), nn.AvgPool2d(5), nn.Flatten()]
    check(lambda: nn.Sequential(*layers, nn.Linear(144, 3)), inputs, targets=targets)


def test_a_convolution_with_few_positions_has_gram_matrices() -> None:
    inputs, targets = draw(5, 64, 4, 4)
    layers = [nn.Conv2d(64, 64, 3), nn.Tanh(), nn.Conv2d(64, 32, 2), nn.Flatten()]
    check(lambda: nn.Sequential(*layers, nn.Linear(32, 3)), inputs, targets=targets)


@pytest.mark.parametrize("length", [2, 60])
def test_long_and_short_sequences_through_wide_layers(length: int) -> None:
    inputs, targets = tokens(4, length)
    layers = [nn.Embedding(6, 48), nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 6)]
    check(lambda: nn.Sequential(*layers), inputs, targets=targets)


@given(
    count=COUNTS, length=st.integers(1, 6), padding=st.sampled_from([None, 0, -1, 3]), order=ORDERS
)
@settings(max_examples=25, deadline=None)
def test_embeddings_add_up_what_an_example_picks_twice(
    count: int, length: int, padding: int | None, order: int
) -> None:
    inputs, targets = tokens(count, length)
    layer = nn.Embedding(6, 4, padding_idx=padding)
    check(
        lambda: nn.Sequential(layer, nn.Tanh(), nn.Linear(4, 6)),
        inputs,
        targets=targets,
        order=order,
    )


@given(
    count=COUNTS,
    groups=st.sampled_from([1, 2, 4]),
    space=st.lists(st.integers(2, 4), max_size=2),
    order=ORDERS,
)
@settings(max_examples=30, deadline=None)
def test_normalisation_of_each_example(
    count: int, groups: int, space: list[int], order: int
) -> None:
    assume(space or groups < 4)  # a group of one number has no variance
    inputs, targets = draw(count, 4, *space)
    size = 4 * int(torch.Size(space).numel())
    layers = [
        nn.LayerNorm((4, *space)),
        nn.GroupNorm(groups, 4),
        nn.Tanh(),
        nn.Flatten(),
        nn.RMSNorm(size),
    ]
    check(lambda: nn.Sequential(*layers, nn.Linear(size, 3)), inputs, targets=targets, order=order)


@given(
    count=COUNTS, space=st.lists(st.integers(2, 4), max_size=3), order=ORDERS, affine=st.booleans()
)
@settings(max_examples=20, deadline=None)
def test_batch_normalisation_by_statistics_that_stay(
    count: int, space: list[int], order: int, affine: bool
) -> None:
    inputs, targets = draw(count, 4, *space)
    kind = (nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)[len(space)]
    norm = kind(4, affine=affine)
    norm(3 * draw(8, 4, *space)[0] + 1)  # statistics that are not 0 and 1
    layers = [norm, nn.Tanh(), nn.Flatten(), nn.Linear(4 * int(torch.Size(space).numel()), 3)]
    check(lambda: nn.Sequential(*layers).eval(), inputs, targets=targets, order=order)


def test_a_frozen_weight_with_a_trainable_bias() -> None:
    for layers, shape in (
        ([nn.Conv1d(3, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(24, 3)], (4, 3, 8)),
        ([nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 3)], (4, 8)),
    ):
        model = nn.Sequential(*layers)
        for name, value in model.named_parameters():
            value.requires_grad_(name.endswith("bias"))
        inputs, targets = draw(*shape)
        assert_matches(model, inputs, targets, clip=1.5)


@pytest.mark.parametrize("entries", [1, 5, 2**22, 2**40])
def test_places_of_one_id_are_found_whatever_the_table_held_before(
    entries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("discreet.layers.terms._TABLE_ENTRIES", entries)
    ids = torch.randint(0, 7, (9, 12), generator=torch.Generator().manual_seed(389))
    again, first = repeats(ids, 7)
    assert torch.equal(again, (first != torch.arange(9 * 12)).nonzero().squeeze(1))
    found = first.view(9, 12)
    for example, (own, places) in enumerate(
        zip(ids, found - 12 * torch.arange(9).unsqueeze(1), strict=True)
    ):
        assert torch.equal(own[places], own), example  # each stands for its id
        assert len(places.unique()) == len(own.unique())
    assert repeats(ids[:, :0], 7)[1].shape == (0,)
