"""The model, what it is trained for, and a client's local work."""

from __future__ import annotations

from dataclasses import dataclass, field

from discreet.settings.rules import (
    LEARNING_RATE,
    MOMENTUM,
    NOT_NEGATIVE,
    POSITIVE,
    at_least,
    check,
    list_of,
    one_of,
    require,
    setting,
)

FLOWER_APP = "flower_app"  # model.name and data.name of a run that drives the clients of another Flower app
WEIGHTS = list_of(POSITIVE, "class")
LOSS = one_of("cross_entropy", "binary_cross_entropy", "squared", "absolute", "huber")


@dataclass(frozen=True)
class ModelConfig:
    """Which model is trained."""

    name: str = "mlp"


@dataclass(frozen=True)
class TrainingConfig:
    """A client's local work."""

    epochs: int = setting(5, at_least(1))
    batch_size: int = setting(8, at_least(1))
    learning_rate: float = setting(0.2, LEARNING_RATE)
    momentum: float = setting(0.0, MOMENTUM)
    optimizer: str = setting("sgd", one_of("sgd", "adam", "adamw"))
    weight_decay: float = setting(0.0, NOT_NEGATIVE)
    schedule: str = setting("constant", one_of("constant", "cosine", "linear"))

    def __post_init__(self) -> None:
        check(self, "training.")
        rule = f"0 with training.optimizer={self.optimizer}"
        require(self.optimizer == "sgd" or self.momentum == 0, "training.momentum", rule, self.momentum)


@dataclass(frozen=True)
class TaskConfig:
    """What is learned by. What is predicted, classes, labels or numbers, is the data's to say.

    Attributes:
      loss: one that fits what is predicted; None for the usual one.
      class_weights: what multiplies the cross entropy of an example of each class: public constants.
      huber_delta: the error up to which Huber's loss is quadratic, where numbers are learned as -1..1.
    """

    loss: str | None = setting(None, LOSS)
    class_weights: list[float] | None = field(default=None, metadata={"rule": WEIGHTS})
    huber_delta: float = setting(0.1, POSITIVE)

    def __post_init__(self) -> None:
        check(self, "task.")
