"""Clients trained together do what each would do alone: their draws, their examples, and the layers
of their models."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from benchmarks.own_models import OWN, dropping
from discreet.data.examples import Examples
from discreet.data.partition import Numbers
from discreet.per_example.objective import cross_entropy
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.randomness import RandomSource, seeded_source
from discreet.simulation.chunk import (
    PIECE,
    Chunk,
    SecureDraws,
    SeededDraws,
    shared_examples,
    table_of,
)
from discreet.simulation.dual_form import dual_updates, largest_in_dual_form
from discreet.simulation.layer_sequence import Batch, ParameterLayout, sequence_of
from discreet.simulation.mapped_model import mapped_model
from discreet.training.local_training import ExamplePrivacy, LocalSettings
from tests.simulation.chunks import Clients, apart

SIZES = (13, 7, 7, 3, 1, 0)
EXAMPLE = ExamplePrivacy(0.5, 0.3)
SGD = LocalSettings(2, 5, 0.1, 0.0)
WAYS = {
    "sgd": SGD,
    "momentum": replace(SGD, momentum=0.6),
    "dp-sgd": replace(SGD, example=EXAMPLE),
    "dp-sgd with momentum": replace(SGD, momentum=0.6, example=EXAMPLE),
    "dp-sgd in secure mode": replace(SGD, epochs=1, example=replace(EXAMPLE, noise="secure_sum")),
    "dp-sgd by a declared number": replace(SGD, example=replace(EXAMPLE, public_num_examples=11)),
    "whole batches": replace(SGD, batch_size=64, example=EXAMPLE),
    "batches of one": replace(SGD, batch_size=1, epochs=1),
    "weight decay and a schedule": replace(SGD, momentum=0.6, weight_decay=0.3, schedule="cosine"),
    "adamw": replace(
        SGD, learning_rate=0.01, optimizer="adamw", weight_decay=0.3, schedule="linear"
    ),
    "dp-sgd with adam": replace(
        SGD, learning_rate=0.01, optimizer="adam", weight_decay=0.3, example=EXAMPLE
    ),
    "dp-sgd with a schedule": replace(SGD, momentum=0.6, schedule="linear", example=EXAMPLE),
}
MODELS = {
    "logistic_regression": (1, 8, 8),
    "mlp": (1, 8, 8),
    "mlp200": (4,),
    "cnn": (1, 8, 8),
    "lstm": (6,),
    **dict.fromkeys(OWN, (1, 8, 8)),
}

# What a step makes of a gradient is the same code for each model: these ways are tried with the
# five others, and those with these ways in the slow tier.
OF_THE_STEP = ("momentum", "dp-sgd with momentum", "dp-sgd by a declared number", "adamw")
OF_THE_STEP += ("weight decay and a schedule", "dp-sgd with adam", "dp-sgd with a schedule")
DEAR = ("lstm", *(name for name in OWN if not name.endswith("partly_frozen")))
BOTH = [
    pytest.param(
        model, way, marks=[pytest.mark.slow] if model in DEAR and way in OF_THE_STEP else []
    )
    for model in MODELS
    for way in WAYS
]


def secure() -> RandomSource:
    """From a key of the test's own, so that its verdict is the same each time."""
    return RandomSource(bytes(range(32)), is_secure=True)


@pytest.mark.parametrize(("model", "way"), BOTH)
def test_a_chunk_of_clients_is_each_of_them_alone(model: str, way: str) -> None:
    clients = Clients(model, MODELS[model], SIZES)
    together, alone = clients.together(WAYS[way]), clients.alone(WAYS[way])
    # A noised sum is rounded to a grid: few values lie so near a boundary that the last bits of a
    # sum decide on which side they fall.
    far = (together - alone).abs() > 2e-5 * alone.norm(dim=1, keepdim=True)
    assert far.sum() <= (0 if WAYS[way].example is None else 3)
    assert apart(together.masked_fill(far, 0), alone.masked_fill(far, 0)) < 2e-5
    assert apart(together, alone) < 1e-3


def test_the_comparison_finds_another_learning_rate() -> None:
    clients = Clients("mlp", (1, 8, 8), SIZES)
    assert apart(clients.together(SGD), clients.alone(replace(SGD, learning_rate=0.1001))) > 5e-4


def test_nonfinite_examples_spoil_no_other_client_and_are_dropped_by_dp_sgd() -> None:
    clients = Clients("mlp", (1, 8, 8), (6, 6, 6))
    data = clients.data
    data.inputs[clients.held[1][2]] = torch.nan
    shared = shared_examples(data, torch.device("cpu"))
    spoilt = replace(clients.chunk([SGD] * 3, SecureDraws(secure())), data=shared).updates(
        clients.start
    )
    assert torch.isfinite(spoilt).all(1).tolist() == [True, False, True]
    how, held = replace(SGD, example=ExamplePrivacy(0.5, 0.0), batch_size=64), clients.held[1]
    table = table_of([held, np.delete(held, 2)])
    updates = Chunk(clients.layers, shared, table, [how] * 2, SecureDraws(secure())).updates(
        clients.start
    )
    assert apart(updates[:1], updates[1:]) < 1e-5


FOUR = np.array([6, 6, 3, 1])


def seeded_draws() -> SeededDraws:
    return SeededDraws([seeded_source(58111).child("client", number) for number in range(4)])


def secure_draws() -> SecureDraws:
    """From a key of the test's own, so that its verdict is the same each time."""
    return SecureDraws(RandomSource(bytes(range(32)), is_secure=True))


def test_without_a_seed_every_client_has_masks_of_its_own() -> None:
    model = mapped_model(dropping((1, 8, 8), 5), cross_entropy).drawing(
        [secure_draws().source] * 40
    )
    assert len({generator.initial_seed() for generator in model.masks.generators}) == 40


@pytest.mark.parametrize("draws", [seeded_draws(), secure_draws()])
def test_an_order_is_a_permutation_and_zero_beyond(draws: SeededDraws | SecureDraws) -> None:
    for order, size in zip(draws.permutations(FOUR, epoch=0), FOUR, strict=True):
        assert sorted(order[:size]) == list(range(size))
        assert not order[size:].any()


def test_secure_orders_are_uniform() -> None:
    """Six orders of 6,000 clients: chi-squared with 5 degrees of freedom, above 60 with a chance
    below 1e-10.

    One order in ten that is sorted, which makes its chance 1/4, is found.
    """
    orders = secure_draws().permutations(np.full(6000, 3), epoch=0)
    assert unlike_uniform(orders) < 60
    orders[::10].sort(axis=1)
    assert unlike_uniform(orders) > 60


def unlike_uniform(orders: Numbers) -> float:
    """The chi-squared statistic of 6,000 orders of three."""
    counts = np.bincount(orders @ [9, 3, 1], minlength=27)
    found = counts[counts > 0]
    assert len(found) == 6
    return float(((found - 1000) ** 2 / 1000).sum())


def test_secure_batches_take_each_example_with_its_clients_probability() -> None:
    """Counts within 7 standard deviations: a false alarm is below 1e-9. Other probabilities are 12
    of them away."""
    sizes, probabilities = np.array([20000, 20000, 10000]), [0.25, 0.25, 0.5]
    clients, positions = secure_draws().batches(sizes, probabilities, step=0)
    assert (positions < sizes[clients]).all()
    for client, (size, chance) in enumerate(zip(sizes, probabilities, strict=True)):
        found = positions[clients == client]
        assert len(set(found.tolist())) == len(found)
        deviation = math.sqrt(size * chance * (1 - chance))
        assert abs(len(found) - size * chance) < 7 * deviation
        assert abs(len(found) - size * (chance + 0.1)) > 12 * deviation


def test_secure_batches_of_one_client_say_nothing_of_anothers() -> None:
    """Examples that two clients of 20,000 both draw: within 7 standard deviations of a quarter, but
    once in 10^11."""
    clients, positions = secure_draws().batches(np.full(4, 20_000), [0.5] * 4, step=0)
    held = [set(positions[clients == client].tolist()) for client in range(4)]
    deviation = math.sqrt(20_000 * 0.25 * 0.75)
    for one, other in combinations(held, 2):
        assert abs(len(one & other) - 5_000) < 7 * deviation
    shared = held[0] | set(range(2_000))
    assert abs(len(shared & held[1] | set(range(2_000))) - 5_000) > 7 * deviation


def test_secure_noise_has_each_clients_own_scale() -> None:
    """20,000 values each: the deviation is within 4 %, 8 of its own, but for a chance below 1e-9;
    1.1 times is not."""
    mechanisms = [Gaussian(1.0), Gaussian(1.5)]
    noised = secure_draws().add_noise(torch.zeros(2, 20_000), mechanisms, 2.0, step=0)
    assert noised[0].std() == pytest.approx(2.0, rel=0.04)
    assert noised[1].std() == pytest.approx(3.0, rel=0.04)
    assert 1.1 * noised[1].std() != pytest.approx(3.0, rel=0.04)


@pytest.mark.parametrize("multipliers", [(1.0, 1.0, 1.0), (1.0, 1.0, 2.0)])
def test_secure_noise_of_one_client_says_nothing_of_anothers(
    multipliers: tuple[float, ...],
) -> None:
    """Correlations of 20,000 values, normal of deviation 1 / sqrt(20,000): beyond 7 of them once in
    10^11 draws."""
    draws, mechanisms = secure_draws(), [Gaussian(multiplier) for multiplier in multipliers]
    steps = [
        draws.add_noise(torch.zeros(3, 20_000), mechanisms, 1.0, step=step) for step in range(2)
    ]
    correlations = torch.corrcoef(torch.cat(steps)).fill_diagonal_(0)
    assert correlations.abs().max() * math.sqrt(20_000) < 7
    shared = torch.cat(steps) + 0.3 * steps[0][0]
    assert torch.corrcoef(shared).fill_diagonal_(0).abs().max() * math.sqrt(20_000) > 7


def test_secure_draws_need_a_secure_source() -> None:
    with pytest.raises(ValueError, match="source must be secure"):
        SecureDraws(seeded_source(58111))


GENERATOR = torch.Generator().manual_seed(77041)


def gradients_by_torch(model: nn.Module, rows: Tensor, batch: Batch) -> Tensor:
    found = []
    for params, inputs, targets, weights in zip(
        rows, batch.inputs, batch.targets, batch.weights, strict=True
    ):
        nn.utils.vector_to_parameters(params.clone(), model.parameters())
        loss = (
            nn.functional.cross_entropy(model(inputs), targets, reduction="none") * weights
        ).sum()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        found.append(torch.cat([grad.flatten() for grad in grads]))
    return torch.stack(found)


def gradients_by_hand(model: nn.Module, rows: Tensor, batch: Batch) -> Tensor:
    layers = sequence_of(model, tuple(batch.inputs.shape[2:]))
    params = [view.contiguous() for view in layers.layout.views(rows)]
    into = [torch.zeros_like(values) for values in params]
    layers.accumulate(params, batch, into, keep=1.0, rate=1.0)
    return layers.layout.rows(into)


def compare(model: nn.Module, inputs: Tensor, classes: int) -> None:
    size = sum(parameter.numel() for parameter in model.parameters())
    rows = torch.randn(2, size, generator=GENERATOR) * 0.3
    targets = torch.randint(0, classes, (2, 3), generator=GENERATOR)
    batch = Batch(inputs, targets, torch.rand(2, 3, generator=GENERATOR))
    want = gradients_by_torch(model, rows, batch)
    torch.testing.assert_close(gradients_by_hand(model, rows, batch), want, rtol=1e-3, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    kernel=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    channels=st.integers(1, 3),
    image=st.tuples(st.integers(5, 9), st.integers(5, 9)),
)
def test_gradients_of_two_convolutions_are_those_of_torch(
    kernel: tuple[int, int],
    stride: tuple[int, int],
    padding: tuple[int, int],
    channels: int,
    image: tuple[int, int],
) -> None:
    model = nn.Sequential(
        nn.Conv2d(channels, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, kernel, stride, padding), nn.ReLU(),
        nn.Flatten(), nn.LazyLinear(4),
    )  # fmt: skip
    model(torch.zeros(1, channels, *image))
    compare(model, torch.randn(2, 3, channels, *image, generator=GENERATOR), 4)


@settings(max_examples=40, deadline=None)
@given(
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    image=st.tuples(st.integers(3, 8), st.integers(3, 8)),
)
def test_gradients_through_pooling_are_those_of_torch(
    stride: tuple[int, int], image: tuple[int, int]
) -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 3, 2), nn.Tanh(), nn.MaxPool2d(2, stride), nn.Flatten(), nn.LazyLinear(4)
    )
    model(torch.zeros(1, 1, *image))
    compare(model, torch.randn(2, 3, 1, *image, generator=GENERATOR), 4)


def test_ties_go_to_the_first_place_row_by_row() -> None:
    """Blank pixels tie everywhere: a gradient elsewhere would differ from PyTorch's."""
    model = nn.Sequential(
        nn.Conv2d(1, 2, 2), nn.MaxPool2d(2, 1), nn.Conv2d(2, 2, 2), nn.Flatten(), nn.LazyLinear(3)
    )
    model(torch.zeros(1, 1, 5, 5))
    inputs = torch.zeros(1, 1, 1, 5, 5)
    inputs[..., 1, 2] = 1.0
    batch = Batch(inputs, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
    rows = nn.utils.parameters_to_vector(model.parameters()).detach().unsqueeze(0)
    want = gradients_by_torch(model, rows, batch)
    torch.testing.assert_close(gradients_by_hand(model, rows, batch), want)


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(1, 2, 2, dilation=2), nn.Conv2d(1, 2, 2, bias=False),
     nn.Conv2d(1, 2, 3, padding="same"),
     nn.Conv2d(1, 2, 2, padding_mode="circular", padding=1),
     nn.MaxPool2d(3), nn.GroupNorm(1, 1), nn.MaxPool2d(2)],
)  # fmt: skip
def test_what_has_no_pass_by_hand_is_left_to_torch_func(layer: nn.Module) -> None:
    assert sequence_of(nn.Sequential(layer, nn.Flatten(), nn.LazyLinear(2)), (1, 6, 6)) is None


@pytest.mark.parametrize("count", [1, 2])
def test_training_a_stack_leaves_the_servers_parameters_alone(count: int) -> None:
    layout, params = ParameterLayout((((2, 3), (1, 0)), ((2,), (0,)))), torch.arange(8.0)
    for values in layout.copies(params, count):
        values.add_(1.0)
    assert torch.equal(params, torch.arange(8.0))


CPU = torch.device("cpu")
ALL_BYTES = torch.arange(256, dtype=torch.float32).div_(255)
INPUTS = {
    "images": (ALL_BYTES.view(64, 4), torch.uint8),
    "more than a piece": (ALL_BYTES.repeat(PIECE // 128).view(-1, 1), torch.uint8),
    "nothing": (torch.zeros(0, 4), torch.uint8),
    "negative": (torch.tensor([[-1 / 255]]), torch.float32),
    "above one": (torch.tensor([[256 / 255]]), torch.float32),
    "one bit off": (torch.nextafter(ALL_BYTES[100:104], torch.ones(4)).view(4, 1), torch.float32),
    "not a number": (torch.tensor([[float("nan")]]), torch.float32),
    "infinite": (torch.tensor([[float("inf")]]), torch.float32),
    "tokens": (torch.tensor([[3, 999]]), torch.int64),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_what_is_read_is_what_was_there(kind: str) -> None:
    inputs, stored = INPUTS[kind]
    data = shared_examples(Examples(inputs, torch.arange(len(inputs))), CPU)
    assert data.inputs.dtype == stored
    rows = torch.arange(len(inputs)).flip(0)
    assert torch.equal(data.read(rows).nan_to_num(nan=5), inputs.flip(0).nan_to_num(nan=5))
    assert data.read(rows).dtype == inputs.dtype


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 12), min_size=1, max_size=4).filter(any),
    epochs=st.integers(1, 3),
    batch_size=st.integers(1, 13),
    momentum=st.sampled_from([0.0, 0.7]),
    model=st.sampled_from(["logistic_regression", "mlp", "mlp200"]),
)
def test_the_dual_form_moves_clients_as_each_moves_alone(
    sizes: list[int], epochs: int, batch_size: int, momentum: float, model: str
) -> None:
    clients = Clients(model, (6,), tuple(sorted(sizes, reverse=True)))
    how = LocalSettings(epochs, batch_size, 0.1, momentum)
    chunk = clients.chunk([how] * len(clients.sizes), SeededDraws(clients.sources()))
    assert apart(dual_updates(chunk, clients.start), clients.alone(how)) < 1e-4


def test_the_dual_form_is_for_a_first_layer_that_is_large_for_the_examples() -> None:
    how = LocalSettings(1, 10, 0.1, 0.0)
    layers = Clients("mlp", (784,), (1,)).layers
    assert 60 <= largest_in_dual_form(layers, how) < 300
    assert 300 <= largest_in_dual_form(layers, replace(how, epochs=5)) < 5000
    assert largest_in_dual_form(layers, replace(how, weight_decay=0.1)) == 0


def test_dp_sgd_has_no_dual_form() -> None:
    clients, how = Clients("mlp", (784,), (3,)), replace(SGD, example=ExamplePrivacy(1.0, 1.0))
    assert largest_in_dual_form(clients.layers, how) == 0
    with pytest.raises(ValueError, match="no dual form"):
        dual_updates(clients.chunk([how], SeededDraws(clients.sources())), clients.start)
