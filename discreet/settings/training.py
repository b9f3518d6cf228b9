"""The model, its loss, and a client's local work."""

from __future__ import annotations

import re
from dataclasses import field
from typing import Annotated

from discreet.settings import rules
from discreet.settings.rules import require, section, settings_json

LEAST_SQUARES = "least_squares"  # a model, and its loss
HF = "hf:"  # before the folder of a pretrained transformer, in model.name
# the environment's name for a folder of features that outlive a process
FEATURES = "DISCREET_FEATURES"
FLOWER_APP = (
    "flower_app"  # model.name and data.name of a run that drives the clients of another Flower app
)
LOSSES = (
    "cross_entropy",
    "binary_cross_entropy",
    "squared",
    "absolute",
    "huber",
    "hazards",
    "least_squares",
)
LOSS = rules.one_of(*LOSSES)


def _is_quick(pattern: str) -> bool:
    """True for a regular expression that matches any name quickly: a node receives it from the
    server."""
    repeats = len(re.findall(r"[*+?{]", pattern))
    choices = pattern.count("|")
    nested = re.search(r"\)[*+?{]|\(\?|\\\d", pattern)
    if len(pattern) > 1000 or repeats > 3 or choices > 8 or nested:
        return False
    try:
        re.compile(pattern)
    except (re.error, RecursionError):
        return False
    return True


QUICK = rules.Rule(
    ("a regular expression with at most 3 repeats, none of a group, and at most 8 choices"),
    _is_quick,
)


@section("model.lora.")
class LoraConfig:
    """Low-rank matrices B A that are trained in place of a transformer's own weights. ffa: A is
    fixed and public."""

    kind: Annotated[str, rules.one_of("none", "lora", "ffa")] = "none"
    rank: rules.Rank = 8
    alpha: rules.Count = 16
    targets: Annotated[rules.Text, QUICK] | None = None


@section("model.")
class ModelConfig:
    """The model to train, and patterns of the names of its frozen parameters."""

    name: rules.Text = "mlp"
    freeze: list[rules.Text] = field(default_factory=list)
    lora: LoraConfig = LoraConfig()

    def __hash__(self) -> int:
        return hash(settings_json(self))


@section("training.")
class TrainingConfig:
    """A client's local work."""

    epochs: rules.Count = 5
    batch_size: rules.Count = 8
    learning_rate: rules.LearningRate = 0.2
    momentum: rules.Momentum = 0.0
    optimizer: Annotated[str, rules.one_of("sgd", "adam", "adamw")] = "sgd"
    weight_decay: rules.NotNegative = 0.0
    schedule: Annotated[str, rules.one_of("constant", "cosine", "linear")] = "constant"

    def __post_init__(self) -> None:
        rule = f"0 with training.optimizer={self.optimizer}"
        require(
            self.optimizer == "sgd" or self.momentum == 0, "training.momentum", rule, self.momentum
        )


@section("task.")
class TaskConfig:
    """The loss. The data decide the target: classes, labels or numbers."""

    loss: Annotated[str, LOSS] | None = None
    class_weights: Annotated[list[float], rules.list_of(rules.POSITIVE, "class")] | None = None
    huber_delta: rules.Positive = 0.1
