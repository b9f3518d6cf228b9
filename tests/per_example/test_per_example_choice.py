"""Models with a layer that has no rule are served by a slower method that is right, or refused; the
log says so."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils import module_tracker
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from discreet.layers import convolution
from discreet.per_example.objective import cross_entropy
from discreet.per_example.per_example import clipped_gradient_sum
from tests.per_example.call_counts import as_on
from tests.per_example.in_turn import sequential_sum
from tests.per_example.test_per_example_oracle import assert_matches

Model = TypeVar("Model", bound=nn.Module)


def batch(count: int = 6) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(4363)
    return torch.randn(count, 5, generator=draws), torch.randint(0, 3, (count,), generator=draws)


def seeded(build: Callable[[], Model]) -> Model:
    """A model whose weights are the same in every run."""
    with torch.random.fork_rng():
        torch.manual_seed(8123)
        return build()


class Scaled(nn.Module):
    """A parameter that no layer owns, and one that is a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.ones(5)), nn.Linear(5, 3)
        self.shift = nn.Parameter(torch.tensor(0.3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs * self.scale.exp()) * self.shift


class Branching(nn.Module):
    """Control flow that depends on the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.shift = nn.Linear(5, 3), nn.Parameter(torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.layer(inputs)
        return torch.stack([row + self.shift if row.sum() > 0 else row for row in logits])


def hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    model[0].register_forward_hook(lambda layer, given, outputs: 3.0 * outputs)
    return model


def tied() -> nn.Module:
    layer = nn.Linear(5, 5)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(5, 3))


def normed() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 4)), nn.Linear(4, 3))


class LargestOfABag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.layer = nn.EmbeddingBag(4, 5, mode="max"), nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(self.bag(inputs.clamp(0, 3).long()))


def weighed() -> nn.Module:
    """A softmax needs its outputs for its gradient: a dropout of nothing may not write into them,
    as PyTorch's does not."""
    layers = [nn.Linear(5, 4), nn.Softmax(1), nn.Dropout(0.0, inplace=True)]
    return nn.Sequential(*layers, nn.Linear(4, 3))


@pytest.mark.parametrize("build", [Scaled, hooked, tied, normed, weighed, Branching, LargestOfABag])
@pytest.mark.parametrize("order", [1, 2])
def test_parameters_without_a_layer_used_twice_or_computed_and_hooks_are_right(
    build: Callable[[], nn.Module], order: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, (inputs, targets) = seeded(build), batch()
    with caplog.at_level(logging.INFO, logger="discreet"):
        for count in (1, 6):
            assert_matches(model, inputs[:count], targets[:count], clip=0.6, order=order)
    assert not caplog.records


class ReadByNumpy(nn.Module):
    """What numpy reads, vmap can't follow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        means = torch.from_numpy(inputs.numpy().mean(1, keepdims=True))
        return self.layer(inputs - means)  # type: ignore[no-any-return]


class Followed(TorchDispatchMode):
    """A mode that changes nothing."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", [FlopCounterMode, Followed, torch.profiler.profile])
def test_a_counter_or_profiler_does_not_change_the_way(
    mode: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    model, (inputs, targets) = seeded(normed), batch()
    settings = {"display": False} if mode is FlopCounterMode else {}
    with caplog.at_level(logging.INFO, logger="discreet"), mode(**settings):
        assert_matches(model, inputs, targets, clip=0.6, order=2)
    assert not caplog.records
    assert module_tracker.register_multi_grad_hook is register_multi_grad_hook


@pytest.mark.parametrize("build", [ReadByNumpy])
@pytest.mark.parametrize("order", [1, 2])
def test_what_vmap_can_not_follow_is_right_and_said_once_with_its_line(
    build: Callable[[], nn.Module], order: int, caplog: pytest.LogCaptureFixture
) -> None:
    model, (inputs, targets) = seeded(build), batch()
    with caplog.at_level(logging.INFO, logger="discreet"):
        for count in (1, 6, 6):
            assert_matches(model, inputs[:count], targets[:count], clip=0.6, order=order)
    (record,) = caplog.records
    assert "slower loop over examples" in record.getMessage()
    assert "at test_per_example_choice.py:" in record.getMessage()


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Flatten(0), nn.Linear(12, 3)), (2, 6)),
        (nn.Sequential(nn.Conv1d(2, 3, 1), nn.Flatten(), nn.Linear(6, 3)), (2, 6)),
        (nn.Sequential(nn.LayerNorm((2, 6)), nn.Linear(6, 3)), (2, 6)),
    ],
    ids=["flattened", "no batch", "normalised over the batch"],
)
def test_a_layer_that_does_not_see_the_examples_first_is_refused(
    model: nn.Module, shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="with one example alone"):
        clipped_gradient_sum(model, torch.ones(shape), targets=torch.tensor([0, 1]), clip_norm=1.0)


@pytest.mark.parametrize("training", [True, False])
def test_a_layer_with_only_batch_statistics_is_refused_in_either_mode(
    training: bool,
) -> None:
    model = nn.Sequential(nn.BatchNorm1d(5, track_running_stats=False), nn.Linear(5, 3)).train(
        training
    )
    with pytest.raises(
        ValueError,
        match=r"mixes examples: use GroupNorm instead \(discreet.to_group_norm makes it\)$",
    ):
        clipped_gradient_sum(model, batch()[0], targets=batch()[1], clip_norm=1.0)


LENGTHS, SORTED = [3, 7, 2, 5, 2, 5], [7, 5, 5, 3, 2, 2]


class Reader(nn.Module):
    """Tokens (n, 7) with their lengths, packed, to three logits from the last state or from the
    padded outputs."""

    def __init__(
        self, kind: type[nn.RNNBase], *, layers: int, pads: bool, first: bool, is_sorted: bool
    ) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(11, 6), nn.Linear(10, 3)
        self.layer = kind(6, 5, layers, batch_first=first, bidirectional=True)
        self.pads, self.first, self.is_sorted = pads, first, is_sorted

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        inner = self.tokens(tokens) if self.first else self.tokens(tokens).transpose(0, 1)
        packed = pack_padded_sequence(
            inner, lengths, batch_first=self.first, enforce_sorted=self.is_sorted
        )
        outputs, state = self.layer(packed)
        if self.pads:
            padded, _ = pad_packed_sequence(outputs, batch_first=self.first, total_length=7)
            return self.head(padded.sum(1 if self.first else 0))  # type: ignore[no-any-return]
        hidden = state[0] if isinstance(state, tuple) else state
        return self.head(torch.cat([hidden[-2], hidden[-1]], 1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(("pads", "first"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize(("layers", "is_sorted"), [(1, False), (2, True)])
def test_packed_sequences_are_watched_by_their_lengths(
    kind: type[nn.RNNBase],
    layers: int,
    pads: bool,
    first: bool,
    is_sorted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # the slow way is an error
    monkeypatch.setattr("discreet.per_example.per_example.built_terms", None)
    model = seeded(lambda: Reader(kind, layers=layers, pads=pads, first=first, is_sorted=is_sorted))
    tokens = torch.randint(0, 11, (6, 7), generator=torch.Generator().manual_seed(7127))
    lengths, targets = (
        torch.tensor(SORTED if is_sorted else LENGTHS),
        torch.tensor([0, 1, 2, 0, 1, 2]),
    )
    alone = []
    for row in range(6):
        one = slice(row, row + 1)
        loss = cross_entropy(model(tokens[one], lengths[one]), targets[one]).sum()
        alone.append(
            torch.cat(
                [grad.flatten() for grad in torch.autograd.grad(loss, list(model.parameters()))]
            )
        )
    gradients = torch.stack(alone)
    norms = gradients.norm(dim=1)
    clip = float(norms.median())
    total, found = clipped_gradient_sum(model, (tokens, lengths), targets=targets, clip_norm=clip)
    torch.testing.assert_close(found, norms, rtol=1e-4, atol=0)
    torch.testing.assert_close(total, (clip / norms).clamp(max=1) @ gradients, rtol=1e-3, atol=1e-5)


LAYERS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "1d": (nn.Conv1d(3, 4, 3, stride=2, padding=1), (3, 17)),
    "2d": (nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), (3, 9, 8)),
    "2d, same on both sides": (nn.Conv2d(2, 5, 4, padding="same"), (2, 7, 6)),
    "3d": (nn.Conv3d(2, 3, 2, padding=1), (2, 4, 3, 5)),
    "transposed": (nn.ConvTranspose2d(4, 3, 3, stride=2, padding=1), (4, 5, 4)),
}


class Twice(nn.Module):
    """A layer that is called on an input and on its square."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x).tanh() - self.layer(x * x)).flatten(1)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel:UserWarning")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", LAYERS)
def test_sums_and_norms_without_held_patches_are_those_of_single_examples(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on(device, monkeypatch)
    monkeypatch.setattr(convolution, "_FEW_PATCHES", 0)
    monkeypatch.setattr(convolution, "_PATCH_FLOATS", 400)  # some examples at a time
    monkeypatch.setattr(convolution, "grams_are_cheaper", lambda *_: True)
    made = list[Any]()
    monkeypatch.setattr(convolution.Convolved, "grams", _noting(convolution.Convolved.grams, made))
    layer, shape = LAYERS[name]
    inputs = torch.randn(6, *shape, generator=torch.Generator().manual_seed(40961))
    inputs[4] = float("inf")  # counts as zero

    def loss(outputs: Tensor, _: Tensor) -> Tensor:
        return (outputs * torch.linspace(-1, 1, outputs.shape[1])).sum(1)

    model = Twice(layer)
    total, norms = clipped_gradient_sum(model, inputs, clip_norm=2.0, loss=loss)
    assert torch.allclose(total, sequential_sum(model, inputs, clip_norm=2.0, loss=loss), atol=1e-5)
    assert made
    assert norms.isinf().tolist() == [False] * 4 + [True, False]


def _noting(grams: Any, made: list[Any]) -> Any:
    def noted(self: Any) -> Any:
        made.append(self)
        return grams(self)

    return noted
