"""Flower apps of the kinds that people have, each on a tiny data set. Their clients know nothing of
privacy."""

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
      strategy, given: Flower's, or one of the app's own; and its arguments, which the private one
        keeps.
      diff: what the private strategy is given beside them and an epsilon.
      instead: arguments of `start` in place of those before.
    """

    client: ClientApp
    starts: dict[str, Any]
    above: float
    strategy: Callable[..., Strategy] = FedAvg
    given: dict[str, Any] = field(default_factory=dict)
    diff: dict[str, Any] = field(default_factory=dict)
    instead: dict[str, Any] = field(default_factory=dict)


def digits() -> tuple[Data, Data]:
    """Images (n, 1, 8, 8) of digits and labels (n,): what all nodes hold, and what the server
    holds."""
    data, order = load_digits(), np.random.default_rng(41017).permutation(1797)
    x, y = (
        torch.tensor(data.images[order, None] / 16, dtype=torch.float32),
        torch.tensor(data.target[order]),
    )
    return (x[360:], y[360:]), (x[:360], y[:360])


def tumours() -> Data:
    """Thirty numbers (n, 30) on each tumour and labels (n,), of which 63 % are 1, by label: each
    node has both."""
    data = load_breast_cancer()
    order = np.argsort(data.target, kind="stable")
    x = (data.data - data.data.mean(0)) / data.data.std(0)
    return torch.tensor(x[order], dtype=torch.float32), torch.tensor(data.target[order])


def of_node(data: Data, context: Context) -> tuple[Data, Data]:
    """What a node trains on, and each fourth of its examples, on which it evaluates."""
    x, y = (each[int(context.node_config["partition-id"]) :: NODES] for each in data)
    kept = torch.arange(len(y)) % 4 == 0
    return (x[~kept], y[~kept]), (x[kept], y[kept])


def logits_of(model: Model, x: Tensor) -> Tensor:
    said = model(x)
    return getattr(said, "logits", said)


def measured(model: Model, data: Data) -> MetricRecord:
    """Loss and accuracy."""
    with torch.no_grad():
        logits = logits_of(model.eval(), data[0])
    loss, right = nn.functional.cross_entropy(logits, data[1]), logits.argmax(1) == data[1]
    return MetricRecord(
        {"loss": float(loss), "accuracy": float(right.float().mean()), "num-examples": len(right)}
    )


def replied(message: Message, arrays: ArrayRecord, examples: int) -> Message:
    """A client's reply to a message to train."""
    return Message(
        RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": examples})}),
        reply_to=message,
    )


def descend(model: Model, x: Tensor, y: Tensor, config: ConfigRecord) -> None:
    """Five steps of Adam, with a proximal term if it is asked for."""
    learned = [each for each in model.parameters() if each.requires_grad]
    before = [each.detach().clone() for each in learned]
    optimizer = torch.optim.Adam(learned, lr=float(config["lr"]))  # type: ignore[arg-type]
    pull = float(config.get("proximal-mu", 0.0)) / 2  # type: ignore[arg-type]
    for _ in range(5):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(logits_of(model, x), y)
        if pull:
            pairs = zip(learned, before, strict=True)
            loss = loss + pull * sum(((now - then) ** 2).sum() for now, then in pairs)
        loss.backward()
        optimizer.step()


def torch_app(
    build: Callable[[], Model],
    data: Data,
    *,
    test: Data | None = None,
    travels: str = "",
    keeps: str = "",
    **facts: Any,
) -> App:
    """A loop of PyTorch.

    Args:
      test: what the server evaluates on; None: it does not.
      travels: the layer that is sent; all of them by default.
      keeps: a layer whose weights stay in the node's state.
    """
    app = ClientApp()
    model = build()  # made once: each message writes all weights that may differ

    def loaded(arrays: ArrayRecord) -> Model:
        model.get_submodule(travels).load_state_dict(arrays.to_torch_state_dict())
        return model

    @app.train()
    def train(message: Message, context: Context) -> Message:
        loaded(message.content["arrays"]).train()
        x, y = of_node(data, context)[0]
        if keeps in context.state:
            model.get_submodule(keeps).load_state_dict(context.state[keeps].to_torch_state_dict())
        descend(model, x, y, message.content["config"])
        if keeps:
            context.state[keeps] = ArrayRecord(model.get_submodule(keeps).state_dict())
        return replied(message, ArrayRecord(model.get_submodule(travels).state_dict()), len(y))

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        metrics = measured(loaded(message.content["arrays"]), of_node(data, context)[1])
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    starts = {
        "initial_arrays": ArrayRecord(model.get_submodule(travels).state_dict()),
        "train_config": ConfigRecord({"lr": 0.02}),
    }
    if test is not None:
        starts["evaluate_fn"] = lambda number, arrays: measured(loaded(arrays), test)
    return App(client=app, starts=starts, **facts)


def small_net() -> Model:
    return nn.Sequential(nn.Conv2d(1, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, 10))


def quickstart() -> App:
    """A convolutional network, a part of the nodes in each round, and a test set at the server."""
    train, test = digits()
    return torch_app(small_net, train, test=test, above=0.5, given={"fraction_train": 0.5})


def transformers() -> App:
    """A BERT of random weights with a head that classifies, on sequences whose words are mostly of
    one of two kinds."""
    library = pytest.importorskip(
        "transformers", reason="needs transformers, which the project does not install"
    )
    sizes = {
        "vocab_size": 12,
        "hidden_size": 8,
        "intermediate_size": 8,
        "max_position_embeddings": 6,
    }
    config = library.BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2, num_labels=2)
    source = torch.Generator().manual_seed(20399)
    kinds, words = (
        torch.randint(most, (1200, wide), generator=source) for most, wide in ((2, 1), (6, 6))
    )
    other = (torch.rand(1200, 6, generator=source) < 0.2).long()
    data = words + 6 * (kinds ^ other), kinds[:, 0]
    return torch_app(
        lambda: library.BertForSequenceClassification(config), data, above=0.7, diff=RATED
    )


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
        metrics = MetricRecord(
            {"accuracy": float(loaded(message).score(x.numpy(), y.numpy())), "num-examples": len(y)}
        )
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    starts = {"initial_arrays": ArrayRecord([np.zeros((1, 30)), np.zeros(1)])}
    return App(client=app, starts=starts, above=0.85, diff=RATED)


def tabular() -> App:
    """A table of numbers, of which each node holds some ten rows, a small network, and FedProx."""
    facts = {"strategy": partial(FedProx, proximal_mu=0.1), "diff": RATED, "above": 0.85}
    instead = {"train_config": ConfigRecord({"lr": 0.02, "proximal-mu": 0.1})}
    return torch_app(
        lambda: nn.Sequential(nn.Linear(30, 8), nn.ReLU(), nn.Linear(8, 2)),
        tumours(),
        **facts,
        instead=instead,
    )


class Softmax(NumPyClient):
    """A softmax regression in NumPy, on the digits of one node."""

    def __init__(self, mine: Data, kept: Data) -> None:
        (self.x, self.y), (self.kept_x, self.kept_y) = (
            [each.numpy() for each in part] for part in (mine, kept)
        )

    def fit(self, parameters: Arrays, config: dict[str, Any]) -> tuple[Arrays, int, dict[str, Any]]:
        weight, bias = parameters
        for _ in range(5):
            shares = np.exp(self.x @ weight + bias)
            wrong = (shares / shares.sum(1, keepdims=True) - np.eye(10)[self.y]) / len(self.y)
            weight, bias = (
                weight - config["lr"] * self.x.T @ wrong,
                bias - config["lr"] * wrong.sum(0),
            )
        return [weight, bias], len(self.y), {}

    def evaluate(
        self, parameters: Arrays, config: dict[str, Any]
    ) -> tuple[float, int, dict[str, Any]]:
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
    """Patches, one block of attention and a head. The first two are the same in each, and
    frozen."""

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
        return self.heads(tokens.flatten(1))


def vit_head() -> App:
    """A vision transformer whose backbone every node has: the head alone travels."""
    train, test = digits()
    return torch_app(SmallViT, train, test=test, travels="heads", above=0.8)


def vit_whole() -> App:
    """The same, but all of it travels: `frozen` names what is not learned."""
    train, test = digits()
    return torch_app(
        SmallViT, train, test=test, above=0.8, diff={"frozen": ("patches.*", "block.*")}
    )


def with_state() -> App:
    """A network whose last layer a node keeps in `context.state` from one time to the next."""
    train, test = digits()
    return torch_app(small_net, train, test=test, keeps="3", above=0.4)


class Halving(FedAvg):
    """FedAvg that halves the learning rate in the third round."""

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        given = ConfigRecord({**config, "lr": 0.02 if server_round < 3 else 0.01})
        return super().configure_train(server_round, arrays, given, grid)


def subclass() -> App:
    """An app with a strategy of its own."""
    train, test = digits()
    instead = {"train_config": lambda number: ConfigRecord({"lr": 0.02 if number < 3 else 0.01})}
    return torch_app(small_net, train, test=test, above=0.5, strategy=Halving, instead=instead)
