"""Flower apps of the kinds that people have, each on a tiny data set. Their clients know nothing of privacy."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg, FedProx, Strategy
from numpy.typing import NDArray
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

from discreet import PrivateEvaluation

Data = tuple[Tensor, Tensor]
Model = nn.Module
RATED = {"private_evaluation": PrivateEvaluation(every=1, noise_multiplier=4.0)}


@dataclass(frozen=True)
class App:
    """A Flower app: its client, and what its server gives to the strategy and to `start`.

    Attributes:
      nodes: how many there are.
      starts: the arguments of `start`.
      diff: what the private strategy of this app is given beside an epsilon; instead: and `start`, in place of its own.
      above: an accuracy that chance does not reach.
      given: what both strategies are given.
      strategy: Flower's, or one of the app's own, which the private one replaces.
    """

    client: ClientApp
    nodes: int
    starts: dict[str, Any]
    above: float
    diff: dict[str, Any] = field(default_factory=dict)
    instead: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)
    strategy: Callable[..., Strategy] = FedAvg


def shuffled(inputs: NDArray[Any], labels: NDArray[Any], test: int) -> tuple[Data, Data]:
    """What all nodes hold, and what the server holds."""
    order = np.random.default_rng(41017).permutation(len(labels))
    x, y = torch.tensor(inputs[order], dtype=torch.float32), torch.tensor(labels[order])
    return (x[test:], y[test:]), (x[:test], y[:test])


def digits() -> tuple[Data, Data]:
    """Images (n, 1, 8, 8) and labels (n,)."""
    data = load_digits()
    return shuffled(data.images[:, None] / 16, data.target, 360)


def tumours() -> Data:
    """Thirty numbers (n, 30) on each tumour, and labels (n,), of which 63 % are 1. They lie by label, so that each node
    of some has both."""
    data = load_breast_cancer()
    order = np.argsort(data.target, kind="stable")
    x = (data.data - data.data.mean(0)) / data.data.std(0)
    return torch.tensor(x[order], dtype=torch.float32), torch.tensor(data.target[order])


def of_node(data: Data, context: Context) -> tuple[Data, Data]:
    """What a node trains on, and each fourth of its examples, on which it evaluates."""
    number, count = int(context.node_config["partition-id"]), int(context.node_config["num-partitions"])
    x, y = (each[number::count] for each in data)
    kept = torch.arange(len(y)) % 4 == 0
    return (x[~kept], y[~kept]), (x[kept], y[kept])


def logits_of(model: Model, x: Tensor) -> Tensor:
    said = model(x)
    found: Tensor = said if isinstance(said, Tensor) else said.logits
    return found


def measured(model: Model, data: Data) -> MetricRecord:
    """Loss and accuracy."""
    with torch.no_grad():
        logits = logits_of(model.eval(), data[0])
    loss, right = nn.functional.cross_entropy(logits, data[1]), logits.argmax(1) == data[1]
    return MetricRecord({"loss": float(loss), "accuracy": float(right.float().mean()), "num-examples": len(right)})


def whole(model: Model) -> Model:
    """What of a model travels."""
    return model


def torch_client(
    build: Callable[[], Model], data: Data, *, travels: Callable[[Model], Model] = whole, keeps: str = ""
) -> ClientApp:
    """A loop of PyTorch. `travels`: the part that is sent; `keeps`: a layer whose weights stay in the node's state."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model, (mine, _) = build(), of_node(data, context)
        travels(model).load_state_dict(message.content["arrays"].to_torch_state_dict())
        if keeps in context.state:
            model.get_submodule(keeps).load_state_dict(context.state[keeps].to_torch_state_dict())
        config, learned = message.content["config"], [each for each in model.parameters() if each.requires_grad]
        before = [each.detach().clone() for each in learned]
        optimizer = torch.optim.Adam(learned, lr=config["lr"])
        model.train()
        for _ in range(5):
            optimizer.zero_grad()
            far = sum(((now - then) ** 2).sum() for now, then in zip(learned, before, strict=True))
            loss = nn.functional.cross_entropy(logits_of(model, mine[0]), mine[1])
            (loss + config.get("proximal-mu", 0.0) / 2 * far).backward()
            optimizer.step()
        if keeps:
            context.state[keeps] = ArrayRecord(model.get_submodule(keeps).state_dict())
        arrays, metrics = ArrayRecord(travels(model).state_dict()), MetricRecord({"num-examples": len(mine[1])})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        model, (_, kept) = build(), of_node(data, context)
        travels(model).load_state_dict(message.content["arrays"].to_torch_state_dict())
        return Message(RecordDict({"metrics": measured(model, kept)}), reply_to=message)

    return app


def started(
    build: Callable[[], Model], test: Data | None, lr: float, travels: Callable[[Model], Model] = whole
) -> dict[str, Any]:
    """The arguments of `start`; without test data of the server's own there is no `evaluate_fn`."""

    def evaluate(number: int, arrays: ArrayRecord) -> MetricRecord:
        assert test is not None
        model = build()
        travels(model).load_state_dict(arrays.to_torch_state_dict())
        return measured(model, test)

    starts = {"initial_arrays": ArrayRecord(travels(build()).state_dict()), "train_config": ConfigRecord({"lr": lr})}
    return starts if test is None else starts | {"evaluate_fn": evaluate}


def same(build: Callable[[], Model]) -> Callable[[], Model]:
    """A model that starts alike whenever it is built."""

    def again() -> Model:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(30491)
            return build()

    return again


def small_net() -> Model:
    return nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 10))


def quickstart() -> App:
    """A convolutional network, and a test set at the server."""
    build, (train, test) = same(small_net), digits()
    return App(torch_client(build, train), 60, started(build, test, 0.02), above=0.5, given={"fraction_train": 0.5})


def transformers() -> App:
    """A BERT of random weights with a head that classifies, on sequences whose words mostly are of one kind; no
    test set at the server."""
    library = pytest.importorskip("transformers", reason="needs transformers, which the project does not install")
    sizes = {"vocab_size": 12, "hidden_size": 8, "intermediate_size": 8, "max_position_embeddings": 6}
    config = library.BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, num_labels=2)
    source = np.random.default_rng(20399)
    kinds = torch.tensor(source.integers(0, 2, 1200))
    other, words = (torch.tensor(source.integers(0, most, (1200, 6))) for most in (4, 6))
    build = same(lambda: library.BertForSequenceClassification(config))
    client = torch_client(build, (6 * torch.where(other == 0, 1 - kinds[:, None], kinds[:, None]) + words, kinds))
    return App(client, 60, started(build, None, 0.02), above=0.7, diff=RATED)


def scikit_learn() -> App:
    """A logistic regression of scikit-learn, whose arrays have no names and are of float64; no test set."""
    data, app = tumours(), ClientApp()

    def loaded(message: Message) -> LogisticRegression:
        model = LogisticRegression(max_iter=1, warm_start=True, solver="saga", random_state=3)
        model.coef_, model.intercept_ = message.content["arrays"].to_numpy_ndarrays()
        model.classes_ = np.arange(2)
        return model

    @app.train()
    def train(message: Message, context: Context) -> Message:
        model, ((x, y), _) = loaded(message), of_node(data, context)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ConvergenceWarning)
            model.fit(x.numpy(), y.numpy())
        arrays, metrics = ArrayRecord([model.coef_, model.intercept_]), MetricRecord({"num-examples": len(y)})
        return Message(RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        model, (_, (x, y)) = loaded(message), of_node(data, context)
        metrics = MetricRecord({"accuracy": float(model.score(x.numpy(), y.numpy())), "num-examples": len(y)})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    starts = {"initial_arrays": ArrayRecord([np.zeros((1, 30)), np.zeros(1)])}
    return App(app, 60, starts, above=0.85, diff=RATED)


def tabular() -> App:
    """A table of numbers, of which each node holds some ten rows, a small network, and FedProx; no test set."""
    build = same(lambda: nn.Sequential(nn.Linear(30, 8), nn.ReLU(), nn.Linear(8, 2)))
    client, starts = torch_client(build, tumours()), started(build, None, 0.01)
    instead = {"train_config": ConfigRecord({"lr": 0.01, "proximal-mu": 0.1})}
    return App(client, 60, starts, 0.8, RATED, instead, strategy=partial(FedProx, proximal_mu=0.1))


class Softmax(NumPyClient):
    """A softmax regression in NumPy, on the digits of one node."""

    def __init__(self, mine: Data, kept: Data) -> None:
        (self.x, self.y), (self.kept_x, self.kept_y) = ([each.numpy() for each in part] for part in (mine, kept))

    def fit(
        self, parameters: list[NDArray[Any]], config: dict[str, Any]
    ) -> tuple[list[NDArray[Any]], int, dict[str, Any]]:
        weight, bias = (each.copy() for each in parameters)
        for _ in range(5):
            logits = self.x @ weight + bias
            shares = np.exp(logits - logits.max(1, keepdims=True))
            wrong = (shares / shares.sum(1, keepdims=True) - np.eye(10)[self.y]) / len(self.y)
            weight, bias = weight - config["lr"] * self.x.T @ wrong, bias - config["lr"] * wrong.sum(0)
        return [weight, bias], len(self.y), {}

    def evaluate(self, parameters: list[NDArray[Any]], config: dict[str, Any]) -> tuple[float, int, dict[str, Any]]:
        right = (self.kept_x @ parameters[0] + parameters[1]).argmax(1) == self.kept_y
        return 0.0, len(right), {"accuracy": float(right.mean())}


def numpy_client() -> App:
    """A NumPyClient of Flower's first API; no test set."""
    (images, labels), _ = digits()
    data = images.flatten(1), labels
    client = ClientApp(client_fn=lambda context: Softmax(*of_node(data, context)).to_client())
    arrays = ArrayRecord({"weight": Array(np.zeros((64, 10), np.float32)), "bias": Array(np.zeros(10, np.float32))})
    keys = {"arrayrecord_key": "fitins.parameters", "configrecord_key": "fitins.config"}
    return App(
        client, 60, {"initial_arrays": arrays, "train_config": ConfigRecord({"lr": 0.5})}, 0.5, {**RATED, **keys}
    )


class SmallViT(nn.Module):
    """Patches of 4 by 4, one block of attention, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.ModuleDict(
            {
                "patches": nn.Conv2d(1, 24, 4, stride=2),
                "block": nn.TransformerEncoderLayer(24, 2, 48, dropout=0.0, batch_first=True),
            }
        )
        self.heads = nn.Linear(9 * 24, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.backbone["patches"](images).flatten(2).transpose(1, 2)
        logits: Tensor = self.heads(self.backbone["block"](tokens).flatten(1))
        return logits


def frozen_vit() -> Model:
    model = SmallViT()
    model.backbone.requires_grad_(False)
    return model


def vit_head() -> App:
    """A vision transformer whose backbone every node has: the head alone travels."""
    build, (train, test) = same(frozen_vit), digits()

    def head(model: Model) -> Model:
        return model.get_submodule("heads")

    client, starts = torch_client(build, train, travels=head), started(build, test, 0.02, head)
    return App(client, 60, starts, above=0.5)


def vit_whole() -> App:
    """The same, but all of it travels: `frozen` names what is not learned."""
    build, (train, test) = same(frozen_vit), digits()
    client, starts = torch_client(build, train), started(build, test, 0.02)
    return App(client, 60, starts, above=0.5, diff={"frozen": ("backbone.*",)})


def with_state() -> App:
    """A network whose last layer a node keeps in `context.state` from one time to the next."""
    build, (train, test) = same(small_net), digits()
    client = torch_client(build, train, keeps="3")
    return App(client, 60, started(build, test, 0.02), above=0.4)


class Halving(FedAvg):
    """Halves the learning rate in the third round, and adds nothing else to FedAvg."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        given = ConfigRecord({**config, "lr": config["lr"] * (0.5 if server_round >= 3 else 1.0)})
        return super().configure_train(server_round, arrays, given, grid)


def subclass() -> App:
    """The first app with a strategy of its own, which halves the learning rate later on."""
    build, (train, test) = same(small_net), digits()
    client, starts = torch_client(build, train), started(build, test, 0.02)
    instead = {"train_config": lambda number: ConfigRecord({"lr": 0.01 if number >= 3 else 0.02})}
    return App(client, 60, starts, above=0.5, strategy=Halving, instead=instead)
