"""Flower apps of the kinds that people have, each on a tiny data set. Their clients know nothing of privacy."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from discreet import PrivateEvaluation

NODES = 60
RATED = {"private_evaluation": PrivateEvaluation(every=1, noise_multiplier=4.0)}

Arrays = list[NDArray[Any]]
Data = tuple[Tensor, Tensor]
Model = nn.Module


@dataclass(frozen=True, kw_only=True)
class App:
    """A Flower app: its client, and what its server gives to the strategy and to `start`.

    Attributes:
      starts: the arguments of `start`.
      above: an accuracy that chance does not reach.
      given: arguments of Flower's FedAvg, which the private one keeps.
      diff: what the private strategy is given beside them and an epsilon.
    """

    client: ClientApp
    starts: dict[str, Any]
    above: float
    given: dict[str, Any] = field(default_factory=dict)
    diff: dict[str, Any] = field(default_factory=dict)


def digits() -> tuple[Data, Data]:
    """Images (n, 1, 8, 8) of digits and labels (n,): what all nodes hold, and what the server holds."""
    data, order = load_digits(), np.random.default_rng(41017).permutation(1797)
    x, y = torch.tensor(data.images[order, None] / 16, dtype=torch.float32), torch.tensor(data.target[order])
    return (x[360:], y[360:]), (x[:360], y[:360])


def tumours() -> Data:
    """Thirty numbers (n, 30) on each tumour and labels (n,), of which 63 % are 1, by label: each node has both."""
    data = load_breast_cancer()
    order = np.argsort(data.target, kind="stable")
    x = (data.data - data.data.mean(0)) / data.data.std(0)
    return torch.tensor(x[order], dtype=torch.float32), torch.tensor(data.target[order])


def of_node(data: Data, context: Context) -> tuple[Data, Data]:
    """What a node trains on, and each fourth of its examples, on which it evaluates."""
    x, y = (each[int(context.node_config["partition-id"]) :: NODES] for each in data)
    kept = torch.arange(len(y)) % 4 == 0
    return (x[~kept], y[~kept]), (x[kept], y[kept])


def measured(model: Model, data: Data) -> MetricRecord:
    """Loss and accuracy."""
    with torch.no_grad():
        logits = model.eval()(data[0])
    loss, right = nn.functional.cross_entropy(logits, data[1]), logits.argmax(1) == data[1]
    return MetricRecord({"loss": float(loss), "accuracy": float(right.float().mean()), "num-examples": len(right)})


def replied(message: Message, arrays: ArrayRecord, examples: int) -> Message:
    """A client's reply to a message to train."""
    return Message(
        RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": examples})}), reply_to=message
    )


def torch_app(
    build: Callable[[], Model],
    data: Data,
    *,
    test: Data,
    keeps: str = "",
    **facts: Any,
) -> App:
    """A loop of PyTorch. `test`: what the server evaluates on; `keeps`: a layer that stays in the node's state."""
    app = ClientApp()

    def loaded(arrays: ArrayRecord) -> Model:
        model = build()
        model.load_state_dict(arrays.to_torch_state_dict())
        return model

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model, (x, y) = loaded(message.content["arrays"]).train(), of_node(data, context)[0]
        if keeps in context.state:
            model.get_submodule(keeps).load_state_dict(context.state[keeps].to_torch_state_dict())
        config, learned = message.content["config"], [each for each in model.parameters() if each.requires_grad]
        optimizer = torch.optim.Adam(learned, lr=config["lr"])
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        if keeps:
            context.state[keeps] = ArrayRecord(model.get_submodule(keeps).state_dict())
        return replied(message, ArrayRecord(model.state_dict()), len(y))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = measured(loaded(message.content["arrays"]), of_node(data, context)[1])
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    starts = {
        "initial_arrays": ArrayRecord(build().state_dict()),
        "train_config": ConfigRecord({"lr": 0.02}),
    }
    starts["evaluate_fn"] = lambda number, arrays: measured(loaded(arrays), test)
    return App(client=app, starts=starts, **facts)


def small_net() -> Model:
    return nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 10))


def quickstart() -> App:
    """A convolutional network, a part of the nodes in each round, and a test set at the server."""
    train, test = digits()
    return torch_app(small_net, train, test=test, above=0.5, given={"fraction_train": 0.5})


def scikit_learn() -> App:
    """A logistic regression of scikit-learn, whose arrays have no names and are of float64."""
    data, app = tumours(), ClientApp()

    def loaded(message: Message) -> LogisticRegression:
        model = LogisticRegression(max_iter=1, warm_start=True, solver="saga", random_state=3)
        model.coef_, model.intercept_ = message.content["arrays"].to_numpy_ndarrays()
        model.classes_ = np.arange(2)
        return model

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model, (x, y) = loaded(message), of_node(data, context)[0]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(x.numpy(), y.numpy())
        return replied(message, ArrayRecord([model.coef_, model.intercept_]), len(y))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        x, y = of_node(data, context)[1]
        metrics = MetricRecord({"accuracy": float(loaded(message).score(x.numpy(), y.numpy())), "num-examples": len(y)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    starts = {"initial_arrays": ArrayRecord([np.zeros((1, 30)), np.zeros(1)])}
    return App(client=app, starts=starts, above=0.85, diff=RATED)


class Softmax(NumPyClient):
    """A softmax regression in NumPy, on the digits of one node."""

    def __init__(self, mine: Data, kept: Data) -> None:
        (self.x, self.y), (self.kept_x, self.kept_y) = ([each.numpy() for each in part] for part in (mine, kept))

    def fit(self, parameters: Arrays, config: dict[str, Any]) -> tuple[Arrays, int, dict[str, Any]]:
        weight, bias = parameters
        for _ in range(5):
            shares = np.exp(self.x @ weight + bias)
            wrong = (shares / shares.sum(1, keepdims=True) - np.eye(10)[self.y]) / len(self.y)
            weight, bias = weight - config["lr"] * self.x.T @ wrong, bias - config["lr"] * wrong.sum(0)
        return [weight, bias], len(self.y), {}

    def evaluate(self, parameters: Arrays, config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
        right = (self.kept_x @ parameters[0] + parameters[1]).argmax(1) == self.kept_y
        return 0.0, len(right), {"accuracy": float(right.mean())}


def numpy_client() -> App:
    """A NumPyClient of Flower's first API."""
    (images, labels), _ = digits()
    data, zeros = (images.flatten(1), labels), np.zeros((64, 10), np.float32)
    client = ClientApp(client_fn=lambda context: Softmax(*of_node(data, context)).to_client())
    arrays = ArrayRecord({"weight": Array(zeros), "bias": Array(zeros[0])})
    starts = {"initial_arrays": arrays, "train_config": ConfigRecord({"lr": 0.5})}
    keys = {"arrayrecord_key": "fitins.parameters", "configrecord_key": "fitins.config"}
    return App(client=client, starts=starts, above=0.5, diff={**RATED, **keys})


class SmallViT(nn.Module):
    """Patches, one block of attention and a head. The first two are the same in each, and frozen."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(30491)
            self.patches = nn.Conv2d(1, 24, 4, stride=2)
            self.block = nn.TransformerEncoderLayer(24, 2, 48, dropout=0.0, batch_first=True)
        self.requires_grad_(False)
        self.heads = nn.Linear(9 * 24, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.block(self.patches(images).flatten(2).transpose(1, 2))
        logits: Tensor = self.heads(tokens.flatten(1))
        return logits


def vit_whole() -> App:
    """A vision transformer, all of which travels: `frozen` names what is not learned."""
    train, test = digits()
    return torch_app(SmallViT, train, test=test, above=0.8, diff={"frozen": ("patches.*", "block.*")})


def with_state() -> App:
    """A network whose last layer a node keeps in `context.state` from one time to the next."""
    train, test = digits()
    return torch_app(small_net, train, test=test, keeps="3", above=0.4)
