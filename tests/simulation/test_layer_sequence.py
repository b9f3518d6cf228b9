"""Batched layers against those of PyTorch and their derivatives; the data that they read."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from discreet.data.examples import Examples
from discreet.simulation.chunk import PIECE, shared_examples
from discreet.simulation.layer_sequence import Batch, ParameterLayout, sequence_of

GENERATOR = torch.Generator().manual_seed(77041)


def gradients_by_torch(model: nn.Module, rows: Tensor, batch: Batch) -> Tensor:
    found = []
    for params, inputs, targets, weights in zip(rows, batch.inputs, batch.targets, batch.weights, strict=True):
        nn.utils.vector_to_parameters(params.clone(), model.parameters())
        loss = (nn.functional.cross_entropy(model(inputs), targets, reduction="none") * weights).sum()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        found.append(torch.cat([grad.flatten() for grad in grads]))
    return torch.stack(found)


def gradients_by_hand(model: nn.Module, rows: Tensor, batch: Batch) -> Tensor:
    layers = sequence_of(model, tuple(batch.inputs.shape[2:]))
    assert layers is not None
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
    kernel: tuple[int, int], stride: tuple[int, int], padding: tuple[int, int], channels: int, image: tuple[int, int]
) -> None:
    model = nn.Sequential(
        nn.Conv2d(channels, 3, 2), nn.Tanh(), nn.Conv2d(3, 2, kernel, stride, padding), nn.ReLU(), nn.Flatten(),
        nn.LazyLinear(4),
    )  # fmt: skip
    model(torch.zeros(1, channels, *image))
    compare(model, torch.randn(2, 3, channels, *image, generator=GENERATOR), 4)


@settings(max_examples=40, deadline=None)
@given(stride=st.tuples(st.integers(1, 3), st.integers(1, 3)), image=st.tuples(st.integers(3, 8), st.integers(3, 8)))
def test_gradients_through_pooling_are_those_of_torch(stride: tuple[int, int], image: tuple[int, int]) -> None:
    model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Tanh(), nn.MaxPool2d(2, stride), nn.Flatten(), nn.LazyLinear(4))
    model(torch.zeros(1, 1, *image))
    compare(model, torch.randn(2, 3, 1, *image, generator=GENERATOR), 4)


def test_ties_go_to_the_first_place_row_by_row() -> None:
    """Blank pixels tie everywhere: a gradient elsewhere would differ from PyTorch's."""
    model = nn.Sequential(nn.Conv2d(1, 2, 2), nn.MaxPool2d(2, 1), nn.Conv2d(2, 2, 2), nn.Flatten(), nn.LazyLinear(3))
    model(torch.zeros(1, 1, 5, 5))
    inputs = torch.zeros(1, 1, 1, 5, 5)
    inputs[..., 1, 2] = 1.0
    batch = Batch(inputs, torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1))
    rows = nn.utils.parameters_to_vector(model.parameters()).detach().unsqueeze(0)
    want = gradients_by_torch(model, rows, batch)
    torch.testing.assert_close(gradients_by_hand(model, rows, batch), want)


@pytest.mark.parametrize(
    "layer",
    [nn.Conv2d(1, 2, 2, dilation=2), nn.Conv2d(1, 2, 2, bias=False), nn.Conv2d(1, 2, 3, padding="same"),
     nn.Conv2d(1, 2, 2, padding_mode="circular", padding=1), nn.MaxPool2d(3), nn.GroupNorm(1, 1), nn.MaxPool2d(2)],
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
