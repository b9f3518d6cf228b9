"""What frozen layers give is recorded once: the rest gives, and learns, what the whole model does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from discreet.models.cut import FrozenPart, cut
from discreet.models.models import frozen, to_train, trainable
from discreet.models.transformer import Reader
from discreet.per_example.objective import cross_entropy
from discreet.per_example.per_example import clipped_gradient_sum
from discreet.per_example.trial import same_chance

COUNT = 9
DRAWS = torch.Generator().manual_seed(50923)
IMAGES, TOKENS = torch.rand(COUNT, 1, 8, 8, generator=DRAWS), torch.randint(20, (COUNT, 8), generator=DRAWS)
TOKENS[:4, 5:] = 0  # padding
TARGETS = torch.arange(COUNT) % 3


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4)

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.relu(images + self.norm(self.conv(images)))


class Resnet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.relu, self.first, self.second = nn.Conv2d(1, 4, 3), nn.ReLU(), Block(), Block()
        self.drop, self.fc = nn.Dropout(), nn.Linear(4, 3)

    def forward(self, images: Tensor) -> Tensor:
        found = self.second(self.first(self.relu(self.stem(images))))
        return self.fc(self.drop(self.relu(found.mean((2, 3)))))


def bert() -> nn.Module:
    sizes: dict[str, Any] = {"num_hidden_layers": 3, "num_attention_heads": 2, "max_position_embeddings": 16}
    sizes["classifier_dropout"] = 0.0  # a branch on the mask splits the batch of the whole: masks fall to others
    config = BertConfig(vocab_size=20, hidden_size=16, intermediate_size=32, num_labels=3, **sizes)
    return Reader(BertForSequenceClassification(config), 0, at_each_step=False)


def sequence() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Dropout(), nn.Tanh(), nn.Linear(8, 3))


# A model, what of it learns, its inputs, and the size of a row that is recorded.
MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[str, ...], Tensor, int]] = {
    "sequence": (sequence, ("5",), IMAGES, 8),
    "resnet": (Resnet, ("fc",), IMAGES, 4 * 6 * 6 + 4),
    "head": (bert, ("body.classifier",), TOKENS, 8 + 2 * 16),
    "last block": (bert, ("body.bert.encoder.layer.2", "body.bert.pooler", "body.classifier"), TOKENS, 8 + 8 * 16),
}


def built(name: str) -> tuple[nn.Module, Tensor]:
    build, learns, inputs, _ = MODELS[name]
    with torch.random.fork_rng():
        torch.manual_seed(20809)
        model = build()
    for key, value in model.named_parameters():
        value.requires_grad_(key.startswith(learns))
    return model, inputs


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_rest_has_the_outputs_and_the_clipped_gradients_of_the_whole(name: str) -> None:
    model, inputs = built(name)
    part, rest = cut(model, inputs)
    rows = part(inputs).detach()
    assert rows[0].numel() == MODELS[name][3]
    sums = []
    for learner, given in ((model, inputs), (rest, rows)):
        to_train(learner)
        with same_chance(inputs.device):
            assert list(map(id, trainable(learner))) == list(map(id, trainable(model)))
            total, _ = clipped_gradient_sum(learner, given, targets=TARGETS, clip_norm=0.1, loss=cross_entropy)
            sums.append(total)
    assert sums[0].norm() > 0.01
    torch.testing.assert_close(*sums, rtol=0, atol=1e-6)


def test_no_frozen_layer_before_the_first_trained_one_is_computed_again_or_held() -> None:
    model, inputs = built("last block")
    part, rest = cut(model, inputs)
    rows, called = part(inputs), list[str]()
    for key, layer in rest.named_modules():
        layer.register_forward_hook(lambda *_, key=key: called.append(key))
    rest(rows)
    assert "model.body.bert.encoder.layer.2.attention" in called
    assert not [key for key in called if "layer.1." in key or "embeddings." in key]
    assert sum(value.numel() for value in rest.parameters()) == sum(value.numel() for value in trainable(model))


def test_nothing_frozen_moves_and_dropout_in_a_frozen_layer_is_off() -> None:
    model, inputs = built("head")
    before = {key: value.clone() for key, value in frozen(model).items()}
    part, rest = cut(model, inputs)
    assert torch.equal(part(inputs), part(inputs))
    torch.nn.functional.cross_entropy(rest(part(inputs)), TARGETS).backward()
    assert all(torch.equal(value, before[key]) for key, value in frozen(model).items())
    assert all(layer.training == bool(trainable(layer)) for layer in model.modules() if list(layer.parameters()))


class Branching(nn.Module):
    """Calls its second frozen layer for large inputs alone, as made-up ones are not."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(2, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        found = self.one(inputs)
        return self.head(self.two(found) if inputs.max() < 9 else found)


class Trained(nn.Module):
    """Reads a trained parameter before its frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.one, self.head = nn.Parameter(torch.ones(2)), nn.Linear(2, 4), nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.one((inputs * self.scale).detach()))


def test_a_forward_that_goes_another_way_than_it_did_is_an_error() -> None:
    model = Branching()
    for layer in (model.one, model.two):
        layer.requires_grad_(False)
    part, rest = cut(model, torch.rand(COUNT, 2))
    assert isinstance(part, FrozenPart)
    assert rest(part(torch.rand(COUNT, 2))).shape == (COUNT, 3)
    with pytest.raises(ValueError, match="does not call the frozen layers"):
        part(torch.full((COUNT, 2), 10.0))


def test_what_follows_from_a_trained_parameter_is_not_recorded_although_no_gradient_shows_it() -> None:
    model = Trained()
    model.one.requires_grad_(False)
    with pytest.raises(ValueError, match="no frozen layer"):
        cut(model, torch.rand(COUNT, 2))


def test_whole_numbers_that_no_float_holds_are_an_error() -> None:
    model, inputs = built("head")
    part, _ = cut(model, inputs)
    part.columns[0] = part.columns[0]._replace(is_read=True)
    part.recorded = lambda given: [torch.zeros(len(given), *each.shape) for each in part.columns[1:]]  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="too large"):
        part(inputs + 2**24 + 1)
