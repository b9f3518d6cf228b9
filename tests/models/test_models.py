"""Models by name: sizes, seeds, tied parameters and masks of dropout, and which are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from discreet.layers.recurrent import LSTMLayer
from discreet.models.models import build_model, flatten_parameters, load_parameters, masks_from
from discreet.privacy.randomness import secure_source, seeded_source
from discreet.run_files.compose import load_config
from discreet.run_files.predictions import named_parameters_of
from discreet.server.model_check import check_model
from discreet.server.resolve import resolve
from discreet.settings.rules import ConfigError
from discreet.training.local_training import ExamplePrivacy, LocalSettings, local_update
from tests.node.clients import examples, params_of

# McMahan et al. 2017, the 2NN; Tramer and Boneh 2021.
PUBLISHED = [
    ("mlp200", (1, 28, 28), 199_210),
    ("cnn", (1, 28, 28), 26_010),
    ("cnn", (3, 32, 32), 550_570),
]


def test_a_model_has_the_published_number_of_parameters() -> None:
    for name, shape, published in PUBLISHED:
        assert len(flatten_parameters(build_model(name, shape, 10, seed=7))) == published


class Tied(nn.Module):
    """Two names for one matrix, as in a language model whose output is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.output = nn.Linear(3, 5)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.output(self.embedding(tokens))


class Counting(nn.Module):
    def __init__(self, persistent: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("seen", torch.zeros(1), persistent=persistent)


def test_tied_parameters_are_counted_once_and_stay_tied() -> None:
    model = Tied()
    check_model(model)
    load_parameters(model, torch.arange(20.0))
    assert len(flatten_parameters(model)) == 5 * 3 + 5
    assert model.output.weight is model.embedding.weight
    assert list(named_parameters_of(model, torch.arange(20.0))) == [
        "embedding.weight",
        "output.bias",
    ]


def not_numbers() -> nn.Module:
    model = nn.Linear(2, 2)
    nn.init.constant_(model.bias, float("nan"))
    return model


def with_whole_numbers() -> nn.Module:
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.ones(1, dtype=torch.int64), requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            nn.Sequential(nn.Sequential(nn.BatchNorm1d(4))),
            r"0\.0 is a .*BatchNorm.* mixes the examples .*GroupNorm",
        ),
        (nn.SyncBatchNorm(4), "mixes the examples .*GroupNorm"),
        (
            Counting(persistent=True),
            r"the buffer seen, which would leave a client.*persistent=False",
        ),
        (nn.ReLU(), "no trainable parameters"),
        (nn.Linear(2, 2).requires_grad_(False), "no trainable parameters"),
        (not_numbers(), "the parameter bias holds NaN or infinity before any training"),
        (with_whole_numbers(), r"scale is torch\.int64; only floating-point"),
    ],
)
def test_a_model_that_can_not_be_trained_privately_is_refused(
    model: nn.Module, message: str
) -> None:
    check_model(Counting(persistent=False))
    with pytest.raises(ValueError, match=message):
        check_model(model)


def test_the_lstm_layer_gives_the_outputs_of_torch() -> None:
    layer, inputs = (
        LSTMLayer(3, 5),
        torch.randn(4, 7, 3, generator=torch.Generator().manual_seed(50077)),
    )
    theirs = nn.LSTM(3, 5, batch_first=True)
    values = [layer.input_weight, layer.hidden_weight, layer.bias, torch.zeros_like(layer.bias)]
    with torch.no_grad():
        for their, our in zip(theirs.parameters(), values, strict=True):
            their.copy_(our)
    torch.testing.assert_close(layer(inputs), theirs(inputs)[0], atol=1e-6, rtol=1e-5)


PLAIN, BY_EXAMPLE = (
    LocalSettings(2, 3, 0.2, 0.5),
    LocalSettings(2, 3, 0.2, 0.5, ExamplePrivacy(0.4, 0.7)),
)


def sequence(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    size = shape[0] if len(shape) == 1 else 64
    layers = [nn.Linear(size, 8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, num_classes)]
    return nn.Sequential(nn.Flatten(), *layers)


def built(seed: int = 6029) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return sequence((5,), 3)


def trained(settings: LocalSettings, seed: int, model: nn.Module | None = None) -> Tensor:
    start = params_of(built())
    return local_update(
        model or built(), start, examples(7), settings=settings, source=seeded_source(seed)
    )


@pytest.mark.parametrize("settings", [PLAIN, BY_EXAMPLE])
def test_a_seeded_client_draws_the_same_masks_whatever_was_drawn_before(
    settings: LocalSettings,
) -> None:
    first, model = trained(settings, 811), built()
    torch.rand(5)
    assert torch.equal(trained(settings, 811, model), first)
    assert torch.equal(trained(settings, 811, model), first)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        assert torch.equal(trained(settings, 811), first)


def test_training_with_masks_is_that_of_a_loop_by_hand() -> None:
    data, source, model = examples(7), seeded_source(5119), built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    orders = [source.child("epoch", epoch).permutation(7) for epoch in range(2)]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(source.child("dropout").words(1)[0]))
        for batch in [part for order in orders for part in torch.split(order, 3)]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(
                model.train()(data.inputs[batch]), data.targets[batch]
            ).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    torch.testing.assert_close(trained(PLAIN, 5119), params_of(model) - params_of(built()))
    without = built()
    without[3] = nn.Identity()
    assert not torch.allclose(trained(PLAIN, 5119, without), trained(PLAIN, 5119), atol=1e-3)


def test_the_generator_is_left_as_it_was_and_untouched_without_dropout() -> None:
    plain, before = nn.Linear(2, 2), torch.random.get_rng_state()
    with masks_from(seeded_source(1), built()):
        assert not torch.equal(torch.random.get_rng_state(), before)
        torch.rand(3)
    assert torch.equal(torch.random.get_rng_state(), before)
    with masks_from(seeded_source(1), plain):
        assert torch.equal(torch.random.get_rng_state(), before)
    drawn, source = list[Tensor](), secure_source()
    for _ in range(2):
        with masks_from(source, built()):
            drawn.append(torch.rand(4))
    assert not torch.equal(*drawn)  # of two seeds of 64 bits


OWN_MODELS = """
import torch
from torch import nn

def raises(shape, classes):
    raise KeyError("foo")

def reads(shape, classes):
    return torch.load("nowhere.pt")

def lazy(shape, classes):
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(classes))
"""


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("built_here:raises", r"model\.name: built_here:raises.* failed with KeyError: 'foo'"),
        ("built_here:reads", r"model\.name: built_here:reads.* FileNotFoundError: .*nowhere\.pt"),
        ("built_here:lazy", r"has no size for 1\.weight yet: .* instead of nn\.LazyLinear"),
        ("built_here:nope", r"built_here has no 'nope'; it is .*built_here\.py"),
        ("math:build", "math has no 'build'; it is "),
    ],
)
def test_a_model_of_ones_own_that_can_not_be_built_is_named_with_the_reason(
    name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "built_here.py").write_text(OWN_MODELS)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=said):
        resolve(load_config([f"model.name={name}"]))
