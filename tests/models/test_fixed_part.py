"""A frozen first part is computed once: what is learned behind it is what the whole model would
have learned."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from discreet.data.datasets import load_task
from discreet.data.examples import Examples
from discreet.models import fixed_part
from discreet.models.fixed_part import behind_fixed, features_of, split_fixed
from discreet.models.models import build_model, frozen, to_train
from discreet.models.scattering import Scattering
from discreet.models.transformer import Reader
from discreet.per_example.objective import cross_entropy, trainable
from discreet.per_example.per_example import clipped_gradient_sum
from discreet.per_example.trial import same_chance
from discreet.run_files.compose import load_asked
from discreet.run_files.run_folder import RunFolder
from discreet.settings.rules import ConfigError
from discreet.simulation.in_process import simulate
from tests.tiny_transformers import write_bert, write_texts

LEVELS = {
    "user": ["privacy.user.noise_multiplier=0.3", "privacy.user.target_epsilon=null"],
    "example": [
        "privacy.user.enabled=false",
        "privacy.user.target_epsilon=null",
        "privacy.example.enabled=true",
        "privacy.example.noise_multiplier=0.3",
    ],
}


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    weights = write_bert(tmp_path / "weights", pooled=True)
    data = [
        "data.name=folder",
        f"data.path={write_texts(tmp_path / 'texts', weights)}",
        "data.partition=natural",
    ]
    return [
        *data,
        f"model.name=hf:{weights}",
        "data.num_clients=12",
        "rounds=2",
        "training.epochs=2",
        "seed=31013",
    ]


def learned(words: list[str], folder: Path) -> Tensor:
    simulate(*load_asked([*words, f"output_dir={folder}"]))
    last = RunFolder(folder).load_checkpoint()
    return last.params


@pytest.mark.parametrize("engine", ["auto", "sequential"])
@pytest.mark.parametrize("level", LEVELS)
def test_a_run_on_features_is_the_run_of_the_whole_model(
    level: str, engine: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*words, *LEVELS[level], f"engine={engine}", "model.freeze=[features.*]"]
    split = learned(words, tmp_path / "split")
    assert split.shape == (3 * 16 + 3,)
    monkeypatch.setattr(fixed_part, "split_fixed", lambda model, _: (None, model))
    torch.testing.assert_close(split, learned(words, tmp_path / "whole"), rtol=0, atol=1e-5)


def test_patterns_that_freeze_nothing_or_everything_are_refused(
    words: list[str], tmp_path: Path
) -> None:
    for pattern, said in {
        "nobody.*": "matches no parameter; .*",
        "*": "leaves no parameter .*",
    }.items():
        with pytest.raises(ConfigError, match=rf"model\.freeze: .*\* {said} features\.body"):
            learned([*words, f"model.freeze=[{pattern}]"], tmp_path / "run")


@pytest.mark.parametrize("place", ["memory", "file", "node"])
def test_features_are_computed_once_and_their_files_are_private_or_without_a_name(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fixed_part, "_held", {})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    if place == "file":
        monkeypatch.setattr(fixed_part, "MEMORY", 8)
    if place == "node":
        monkeypatch.setenv("DISCREET_FEATURES", str(tmp_path))
    layer, inputs = torch.nn.Linear(2, 3).requires_grad_(False), torch.rand(5, 2)
    examples = Examples(inputs, torch.zeros(5, dtype=torch.int64))
    assert torch.equal(fixed_part.features_of(layer, examples, batch_size=5).inputs, layer(inputs))
    assert [path.suffix for path in tmp_path.iterdir()] == ([".npy"] if place == "node" else [])
    if place == "node":  # in the process of the next message
        fixed_part._held.clear()
    with monkeypatch.context() as patched:
        patched.setattr(nn.Linear, "forward", None)
        again = fixed_part.features_of(layer, examples).inputs
    assert torch.equal(again, torch.nn.functional.linear(inputs, *layer.parameters()))
    layer.bias.data.add_(1)
    assert torch.equal(fixed_part.features_of(layer, examples, batch_size=5).inputs, layer(inputs))


@pytest.mark.parametrize(("level", "engine"), [("user", "auto"), ("example", "sequential")])
def test_a_run_of_a_transformers_head_is_that_of_the_whole_model(
    level: str, engine: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, split = list[str](), fixed_part.split_fixed
    (tmp_path / "weights" / "modules.json").unlink()  # of the pooling

    def seen(
        model: torch.nn.Module, inputs: Tensor
    ) -> tuple[torch.nn.Module | None, torch.nn.Module]:
        parts = split(model, inputs)
        found.append(type(parts[1]).__name__)
        return parts

    words = [*words, *LEVELS[level], f"engine={engine}", "model.freeze=[body.bert.*]"]
    monkeypatch.setattr(fixed_part, "split_fixed", seen)
    one = learned(words, tmp_path / "split")
    assert set(found) == {"Head"}
    monkeypatch.setattr(fixed_part, "split_fixed", lambda model, _: (None, model))
    torch.testing.assert_close(one, learned(words, tmp_path / "whole"), rtol=0, atol=1e-6)


class Whispers(nn.Module):
    """A frozen layer in which an example moves all others a little: too little to be seen in what
    is made up."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x)
        return found + 1e-6 * found.mean(0)


class Branches(Whispers):
    """A frozen layer that takes a branch for each example, which only one of them decides: nothing
    is mixed."""

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) if bool((x < 100).all()) else 2 * self.inner(x)


def frozen_first(layer: nn.Module) -> nn.Module:
    return nn.Sequential(layer.requires_grad_(False), nn.Linear(3, 2))


@pytest.mark.parametrize("layer", [Whispers, Branches])
def test_an_example_moves_no_features_of_another(layer: type[nn.Module]) -> None:
    model, inputs = (
        frozen_first(layer()),
        torch.randn(9, 4, generator=torch.Generator().manual_seed(50929)),
    )
    huge = inputs.clone()
    huge[3] = 1e9
    read = [
        behind_fixed(model, Examples(each, torch.zeros(9).long()))[1].inputs
        for each in (inputs, huge)
    ]
    others = [place for place in range(9) if place != 3]
    assert torch.equal(read[0][others], read[1][others])


IMAGES = torch.rand(5, 1, 28, 28, generator=torch.Generator().manual_seed(30977))


def test_an_image_does_not_change_the_features_of_another() -> None:
    fixed, others = Scattering((1, 28, 28)), IMAGES.clone()
    others[1:] = 1 - others[1:]
    torch.testing.assert_close(fixed(IMAGES)[0], fixed(others)[0], rtol=0, atol=1e-6)


def test_features_computed_once_are_those_of_the_whole_model() -> None:
    task = load_task("digits")
    model = build_model("scattering", task.shape.input_shape, 10, seed=1)
    fixed, learned = split_fixed(model, task.test.inputs)
    assert fixed is not None
    features = features_of(fixed, task.test, batch_size=7)
    assert torch.equal(features.targets, task.test.targets)
    torch.testing.assert_close(learned(features.inputs), model(task.test.inputs), rtol=0, atol=1e-5)
    assert features_of(fixed, task.test).inputs is features.inputs


class Times(nn.Linear):
    """A layer whose text does not show its factor."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.factor * super().forward(x)


def test_features_of_a_layer_with_another_factor_are_computed_anew() -> None:
    layer = Times(2, 3).requires_grad_(False)
    examples = Examples(torch.rand(5, 2), torch.zeros(5, dtype=torch.int64))
    features_of(layer, examples)
    layer.factor = 2.0
    found = features_of(layer, examples).inputs
    torch.testing.assert_close(found, layer(examples.inputs))


class Holding(nn.Linear):
    """A layer that reads what it holds beside its parameters."""

    def __init__(self, held: Any) -> None:
        super().__init__(2, 3)
        self.register_buffer("shift", torch.zeros(3))
        self.held = held
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.held[0] + self.shift


@pytest.mark.parametrize("one", [torch.ones(1), (1.0,), {0: torch.ones(1)}])
def test_features_of_a_layer_that_holds_other_values_are_computed_anew(one: Any) -> None:
    layer = Holding(one)
    examples = Examples(torch.rand(5, 2), torch.zeros(5, dtype=torch.int64))
    features_of(layer, examples)
    layer.held = (2.0,)
    torch.testing.assert_close(features_of(layer, examples).inputs, layer(examples.inputs))
    layer.shift.fill_(3)
    torch.testing.assert_close(features_of(layer, examples).inputs, layer(examples.inputs))


def test_features_are_of_the_file_that_has_the_code_of_a_layer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layer = Holding((1.0,))
    examples = Examples(torch.rand(5, 2), torch.zeros(5, dtype=torch.int64))
    before = features_of(layer, examples).inputs
    assert features_of(layer, examples).inputs is before
    # Another bundle with the same layers and weights, whose forward may differ.
    monkeypatch.setattr(f"{__name__}.__file__", "other.py")
    assert features_of(layer, examples).inputs is not before


COUNT = 9
DRAWS = torch.Generator().manual_seed(50923)
SMALL_IMAGES, TOKENS = (
    torch.rand(COUNT, 1, 8, 8, generator=DRAWS),
    torch.randint(20, (COUNT, 8), generator=DRAWS),
)
TOKENS[:4, 5:] = 0  # padding
TARGETS = torch.arange(COUNT) % 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.relu(images + self.norm(self.conv(images)))


class Resnet(nn.Module):
    """A model that names its parts, and is not a sequence of them."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), Block(), nn.Dropout2d(0.0))
        self.head = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(4, 3)
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images))


class Scaled(Resnet):
    """A model whose forward is not head(features(x))."""

    def forward(self, images: Tensor) -> Tensor:
        return 2 * super().forward(images)


class Outside(Resnet):
    """A model with a trained parameter outside its head."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(3, 3)

    def forward(self, images: Tensor) -> Tensor:
        return self.last(super().forward(images))


class Follows(nn.Conv2d):
    """A frozen layer that reads a trained parameter of another."""

    def __init__(self, others: list[Tensor]) -> None:
        super().__init__(1, 4, 3)
        self.others = others

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) * self.others[0].mean()


class Reading(Resnet):
    def __init__(self) -> None:
        super().__init__()
        self.features[0] = Follows([*self.head.parameters()])


class Positive(Resnet):
    """A model that cuts off what images do not have: negative values."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.clamp(min=0))


class Cut(Resnet):
    """A model that cuts off features that made-up images do not give."""

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.features(images).clamp(max=30))


class Centred(nn.Conv2d):
    """A layer that reads the other examples of its batch."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images - images.mean(0))


class Mixing(Resnet):
    def __init__(self) -> None:
        super().__init__()
        self.features[0] = Centred(1, 4, 3)


class Adding(nn.Linear):
    """A head that adds what the model left in it."""

    left: Tensor | None = None

    def forward(self, features: Tensor) -> Tensor:
        found = super().forward(features.mean((2, 3)))
        if self.left is None:
            return found
        return found + self.left.mean((1, 2, 3)).unsqueeze(1)


class Leaving(Resnet):
    def __init__(self) -> None:
        super().__init__()
        self.head = Adding(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        self.head.left = images
        return super().forward(images)


def hooked() -> nn.Module:
    model = Resnet()
    model.features[0].register_forward_hook(lambda *given: 2 * given[2])
    return model


def bert() -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    sizes: dict[str, Any] = {
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
    }
    sizes["classifier_dropout"] = (
        0.0  # a branch on the mask splits the batch of the whole: masks fall to others
    )
    config = BertConfig(vocab_size=20, hidden_size=16, intermediate_size=32, **sizes)
    config.num_labels = 3
    return Reader(BertForSequenceClassification(config), 0, at_each_step=False)


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2ForSequenceClassification

    config = GPT2Config(
        vocab_size=20, n_positions=16, n_embd=16, n_layer=1, n_head=2, pad_token_id=0
    )
    config.num_labels = 3
    return Reader(GPT2ForSequenceClassification(config), 0, at_each_step=False).eval()


def sequence() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Dropout(), nn.Tanh(), nn.Linear(8, 3)
    )


# A model, what of it learns, its inputs, and the size of a row of features.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], Tensor, int]] = {
    "sequence": (sequence, ("5",), SMALL_IMAGES, 8),
    "resnet": (Resnet, ("head",), SMALL_IMAGES, 4 * 6 * 6),
    "pooler": (bert, ("body.classifier",), TOKENS, 16 + 8),
    "last token": (gpt2, ("body.score",), TOKENS, 8 * 16 + 8),
}


def learning(model: nn.Module, learns: tuple[str, ...]) -> nn.Module:
    for key, value in model.named_parameters():
        value.requires_grad_(key.startswith(learns))
    return model


def built(name: str) -> tuple[nn.Module, Tensor]:
    build, learns, inputs, _ = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(20809)
        model = build()
    return learning(model, learns), inputs


def parts_of(model: nn.Module, inputs: Tensor) -> tuple[nn.Module, nn.Module]:
    fixed, learned = split_fixed(model, inputs)
    assert fixed is not None
    return fixed, learned


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_rest_has_the_outputs_and_the_clipped_gradients_of_the_whole(name: str) -> None:
    model, inputs = built(name)
    fixed, learned = parts_of(model, inputs)
    rows = features_of(fixed, Examples(inputs, TARGETS)).inputs
    assert rows[0].numel() == MODELS[name][3]
    assert list(map(id, trainable(learned))) == list(map(id, trainable(model)))
    sums = []
    for learner, given in ((model, inputs), (learned, rows)):
        to_train(learner)
        with same_chance(inputs.device):
            total, _ = clipped_gradient_sum(
                learner, given, targets=TARGETS, clip_norm=0.1, loss=cross_entropy
            )
            sums.append(total)
    assert sums[0].norm() > 0.01
    torch.testing.assert_close(*sums, rtol=0, atol=1e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_frozen_part_on_a_gpu_is_tried_there_and_its_features_are_those_of_the_cpu() -> None:
    model, inputs = built("sequence")
    found = []
    for device in ("cpu", "cuda"):
        fixed, _ = parts_of(copy.deepcopy(model).to(device), inputs)
        found.append(features_of(fixed, Examples(inputs, TARGETS)).inputs)
        fixed_part._held.clear()
    torch.testing.assert_close(*found, rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_rest_holds_what_is_trained_and_nothing_else(name: str) -> None:
    model, inputs = built(name)
    _, learned = parts_of(model, inputs)
    assert all(value.requires_grad for value in learned.parameters())
    assert len(list(learned.parameters())) == len(trainable(model))


def test_nothing_frozen_moves_and_dropout_in_a_frozen_layer_is_off() -> None:
    model, inputs = built("pooler")
    before = {key: value.clone() for key, value in frozen(model).items()}
    fixed, learned = parts_of(model, inputs)
    assert torch.equal(fixed(inputs), fixed(inputs))
    torch.nn.functional.cross_entropy(learned(fixed(inputs)), TARGETS).backward()
    assert all(torch.equal(value, before[key]) for key, value in frozen(model).items())
    assert all(
        layer.training == bool(trainable(layer))
        for layer in model.modules()
        if list(layer.parameters())
    )


# A model whose frozen part is computed at each step, what of it learns, its inputs, and the reason.
WHOLE: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], Tensor, str]] = {
    "other": (Scaled, ("head",), SMALL_IMAGES, "head(features(x)) has other values"),
    "positive": (Positive, ("head",), SMALL_IMAGES - 0.5, "has other values"),
    "cut": (Cut, ("head",), SMALL_IMAGES, "has other values"),
    "leaving": (Leaving, ("head",), SMALL_IMAGES, "has other values"),
    "mixing": (Mixing, ("head",), SMALL_IMAGES, "depend on others"),
    "hooked": (hooked, ("head",), SMALL_IMAGES, "has a hook"),
    "outside": (Outside, ("head", "last"), SMALL_IMAGES, "parameters outside its head"),
    "reading": (Reading, ("head",), SMALL_IMAGES, "depend on a trained parameter"),
    "last block": (
        bert,
        ("body.bert.encoder.layer.2", "body.bert.pooler", "body.classifier"),
        TOKENS,
        "its features is trained",
    ),
    "first layer": (sequence, ("1",), SMALL_IMAGES, "no frozen layer"),
    "no parts": (Block, ("norm",), torch.rand(COUNT, 4, 8, 8), "no layers `features`"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_another_frozen_part_is_computed_at_each_step_and_the_log_says_why_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    build, learns, inputs, reason = WHOLE[name]
    model = learning(build(), learns)
    with caplog.at_level("INFO", "discreet.client"):
        for _ in range(2):
            assert split_fixed(model, inputs) == (None, model)
    assert [reason in line for line in caplog.messages] == [True]
