"""A part of the neighbour replay: whatever parameters a server chooses, the kind of a node's reply,
its names, its shapes and its text are the same on neighbouring data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from torch import Tensor, nn

from discreet.data.examples import Examples, TaskShape
from discreet.flower.serving import encode_request, parameters_record
from discreet.ledger.durable_ledger import DurableLedger
from discreet.masking.wire import Stage
from discreet.models.models import MODELS, flatten_parameters, load_parameters, model_for
from discreet.node.account import Accounts, Refused
from discreet.node.app import DPClient, train
from discreet.node.client import Client
from discreet.node.nodes import node_client
from discreet.node.policy import ClientPolicy
from discreet.node.work import Work, work_of
from discreet.privacy.randomness import seeded_source
from discreet.protocol.messages import Assignment, TrainRequest, request_items
from discreet.settings.settings import client_settings
from discreet.settings.training import ModelConfig
from tests.mechanisms.made import masked
from tests.node.clients import EXAMPLE, OFF, config, ledger_at, request
from tests.node.dishonest import NotGiven
from tests.node.test_secure_doors import App, behind_mod

COUNT = 6
IMAGES = TaskShape((1, 8, 8), 3)
TOKENS = TaskShape((5,), 3, num_tokens=11)


class Asserts(nn.Module):
    """A model whose author wants to hear of numbers that are not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.layer(inputs.flatten(1))
        if not outputs.isfinite().all():
            raise ArithmeticError("the outputs are not finite")
        return outputs


class Branches(nn.Module):
    """A model that looks something up by what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 3)
        self.table = [1.0, 2.0]

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.layer(inputs.flatten(1))
        return outputs * self.table[int(outputs.abs().max() > 50) * 2]


class Writes(nn.Module):
    """A model that notes an outlier in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 3)
        self.register_buffer("seen", torch.zeros(64))

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.flatten(1)
        if float(flat.detach().abs().max()) > 100:
            self.seen.add_(flat.detach()[0])
        return self.layer(flat + 0 * self.seen)


OWN: dict[str, Callable[[], nn.Module]] = {
    "asserts": Asserts,
    "branches": Branches,
    "writes": Writes,
}
# Of the others one kind of parameters alone is in the usual tests.
ALWAYS = ("logistic_regression", *OWN)
BUILT = {name: TOKENS if name == "lstm" else IMAGES for name in MODELS} | dict.fromkeys(OWN, IMAGES)


def model_of(name: str) -> nn.Module:
    if name not in OWN:
        return model_for(ModelConfig(name=name), BUILT[name], seed=0)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(40609)
        return OWN[name]()


def data_of(shape: TaskShape) -> Examples:
    generator = torch.Generator().manual_seed(7211)
    targets = torch.randint(3, (COUNT,), generator=generator)
    if shape.num_tokens:
        return Examples(torch.randint(11, (COUNT, 5), generator=generator), targets)
    return Examples(torch.rand(COUNT, *shape.input_shape, generator=generator), targets)


def neighbours(data: Examples) -> list[Examples]:
    """The same data with another first record: none, a dark one, and one that is far from all."""
    found = [data]
    for value in (0, 10) if data.inputs.dtype == torch.int64 else (0.0, 1e30):
        inputs = data.inputs.clone()
        inputs[0] = value
        found.append(replace(data, inputs=inputs))
    return found


def question(model: nn.Module, record: Tensor) -> Tensor:
    """Parameters with which only records like this one have a finite gradient, if the model is one
    layer, or two with a ReLU between: the attack of an audit."""
    values = [parameter.detach().clone().zero_() for parameter in model.parameters()]
    if record.is_floating_point() and values[0].dim() == 2 and len(values[0][0]) == record.numel():
        asked = torch.linspace(-1, 1, record.numel())
        answer = float(asked @ record.flatten())
        for row, sign in ((0, 1.0), (1, -1.0)):
            values[0][row] = sign * 1e5 * asked
            values[1][row] = -sign * 1e5 * answer - 20.0
            if len(values) > 2:
                values[-2][0, row] = 1e38
    return torch.cat([each.reshape(-1) for each in values])


def saturated(model: nn.Module, _: Tensor) -> Tensor:
    params = torch.zeros_like(flatten_parameters(model))
    params[0] = 3e38
    return params


def filled(value: float, model: nn.Module, _: Tensor) -> Tensor:
    return torch.full_like(flatten_parameters(model), value)


def large(model: nn.Module, _: Tensor) -> Tensor:
    return flatten_parameters(model) * 1e20


VALUES = (math.nan, math.inf, -math.inf, 1e38, -1e38, 1e-40)
PARAMETERS = {str(value): partial(filled, value) for value in VALUES} | {
    "one unit saturated": saturated,
    "large": large,
    "a question about one record": question,
}

NOISED = (*OFF, "privacy.delta=1e-3")
RATES = ("evaluation.kind=private", "evaluation.noise_multiplier=3", "evaluation.every=2")
LOCAL = "privacy.local.kind={}"
BOTH = Assignment(trains=True, query="evaluation")
DOORS: dict[str, tuple[tuple[str, ...], Assignment]] = {
    "user level in the clear": (("rounds=4", "privacy.user.noise_multiplier=1"), Assignment()),
    "example level": ((*EXAMPLE, "privacy.delta=1e-3"), Assignment()),
    "local gaussian": (
        (*NOISED, LOCAL.format("gaussian"), "privacy.local.noise_multiplier=2"),
        Assignment(),
    ),
    "local laplace": (
        (*NOISED, LOCAL.format("laplace"), "privacy.local.noise_multiplier=2"),
        Assignment(),
    ),
    "laplace step": (
        (*NOISED, LOCAL.format("laplace_step"), "privacy.local.noise_multiplier=2"),
        Assignment(),
    ),
    "ratings by examples": ((*EXAMPLE, *RATES, "privacy.delta=1e-3"), BOTH),
    "statistics": (
        (
            "rounds=4",
            "privacy.user.noise_multiplier=1",
            "statistics.only=true",
            "statistics.low=0",
            "statistics.high=1",
        ),
        Assignment(trains=False, query="statistics"),
    ),
    "ratings by clients": (
        (*NOISED, *RATES, LOCAL.format("gaussian"), "privacy.local.noise_multiplier=2"),
        BOTH,
    ),
}


def kind_of(work: Work, client: Client, params: Tensor) -> tuple[object, ...]:
    """What an observer sees of a reply before its numbers."""
    try:
        reply = client.answer(work, params)
    except (Refused, ValueError) as error:
        return "refused", str(error)
    answer = None if reply.answer is None else (reply.answer.shape, reply.answer.dtype)
    spent = reply.epsilon_example, reply.epsilon_local, reply.epsilon_local_pure
    return "reply", reply.update.shape, reply.update.dtype, answer, spent


def cases() -> Iterator[ParameterSet]:
    for name in BUILT:
        for params in PARAMETERS:
            usual = name in ALWAYS or params == "one unit saturated"
            marks = () if usual else (pytest.mark.slow,)
            yield pytest.param(name, params, marks=marks, id=f"{name}-{params}")


@pytest.mark.parametrize(("name", "params"), [*cases()])
def test_the_kind_of_reply_does_not_depend_on_one_record(
    name: str, params: str, tmp_path: Path
) -> None:
    data = data_of(BUILT[name])
    asked = PARAMETERS[params](model_of(name), data.inputs[0])
    for number, (door, (words, work)) in enumerate(DOORS.items()):
        if door == "statistics" and name == "lstm":  # tokens have no range
            continue
        loss = ("task.loss=least_squares",) if name == "least_squares" else ()
        run = client_settings(config(*words, f"model.name={name}", *loss))
        kinds = set()
        for other, examples in enumerate(neighbours(data)):
            ledger = ledger_at(tmp_path / f"{number}-{other}.db")
            client = Client(
                model_of(name),
                examples,
                Accounts(ledger, run.delta, "pld"),
                ClientPolicy(),
                seeded_source(6871),
                held_out=examples if work.query else None,
                shape=BUILT[name],
            )
            todo = work_of(TrainRequest(1, 1.0, run, work=work))
            kinds.add(kind_of(todo, client, asked))
        assert len(kinds) == 1, (door, kinds)
        assert next(iter(kinds))[0] == "reply", (door, kinds)


@pytest.mark.parametrize("params", PARAMETERS)
@pytest.mark.parametrize("name", ["logistic_regression", *OWN])
def test_a_masked_vector_comes_whatever_the_parameters_are(name: str, params: str) -> None:
    data = data_of(BUILT[name])
    asked = PARAMETERS[params](model_of(name), data.inputs[0])
    sums = masked(1.0, 4.0, nodes=5, size=len(asked)).participation.vector
    assert sums is not None
    work = work_of(TrainRequest(1, 1.0, client_settings(config("rounds=3"))))
    for examples in neighbours(data):
        client = Client(model_of(name), examples, None, ClientPolicy(), seeded_source(6871))
        assert client.vector(work, asked, sums).shape == (sums.length,)


DIGITS = (
    "data.name=digits",
    "data.num_clients=12",
    "model.name=mlp",
    "training.batch_size=1000",
    "privacy.delta=1e-3",
)


def asked_of_node(folder: Path, number: int, ask: TrainRequest, params: Tensor) -> list[object]:
    """The replies of a node as it is started, by the ClientApp and by `DPClient.fit`."""
    node = {
        "partition-id": number,
        "num-partitions": 12,
        "ledger": str(folder / f"{number}.db"),
        "min-noise-multiplier": 60.0,
        "max-epsilon": 0.5,
        "max-delta": 1e-3,
        "require": "example",
    }
    ledger_at(folder / f"{number}.db")
    sent = Message(encode_request(ask, parameters_record(params)), 1, "train", ttl=3600.0)
    reply = train(sent, Context(1, 1, node, RecordDict(), {}))
    if reply.has_error():
        return [reply.error.code, reply.error.reason]
    arrays, count, numbers = DPClient(node).fit([params.numpy()], dict(request_items(ask)))
    names = {name: [*record] for name, record in reply.content.items()}
    return [names, [each.shape for each in arrays], count, numbers]


@pytest.mark.usefixtures("_identity")
def test_a_node_does_not_say_whether_it_holds_a_record(tmp_path: Path) -> None:
    # Of the audit: with these parameters one record alone has a finite gradient.
    words = ("privacy.example.noise_multiplier=60", "training.epochs=1")
    ask = request(config(*EXAMPLE[:1], *DIGITS, *EXAMPLE[-2:-1], *words, "rounds=4"), 1)
    holder = {"partition-id": 1, "num-partitions": 12, "ledger": str(tmp_path / "any.db")}
    ledger_at(tmp_path / "any.db")
    found = node_client(work_of(ask), holder, 3)
    params = question(found.model, found.examples.inputs[5])
    said = [asked_of_node(tmp_path, number, ask, params) for number in (1, 2, 3)]
    assert said[0] == said[1] == said[2]
    assert len(said[0]) == 4


def trained_on(examples: Examples, message: Message, _: Context) -> Message:
    """An app as people write them, whose model raises."""
    net = Asserts()
    sent = message.content["arrays"]
    assert isinstance(sent, ArrayRecord)
    net.load_state_dict(sent.to_torch_state_dict())
    outputs = net(examples.inputs)
    nn.functional.cross_entropy(outputs, examples.targets).backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    content = {"arrays": ArrayRecord(net.state_dict()), "metrics": MetricRecord({"loss": 1.0})}
    return Message(RecordDict(content), reply_to=message)


@pytest.fixture
def _identity(monkeypatch: pytest.MonkeyPatch) -> None:
    import flwr.supercore.task_identity as identity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(identity.TaskIdentity, name, 1)


@pytest.mark.usefixtures("_identity")
@pytest.mark.parametrize("params", PARAMETERS)
def test_an_app_behind_the_mod_does_not_say_whether_it_failed(params: str, tmp_path: Path) -> None:
    from discreet import local_dp_mod

    DurableLedger.create(tmp_path / "node.db")
    mod = local_dp_mod(
        clip_norm=1.0, target_epsilon=0.1, delta=1e-5, rounds=100, ledger=tmp_path / "node.db"
    )
    data = data_of(IMAGES)
    net = Asserts()
    load_parameters(net, PARAMETERS[params](net, data.inputs[0]))
    kinds = []
    for examples in neighbours(data):
        content = RecordDict(
            {"arrays": ArrayRecord(net.state_dict()), "config": ConfigRecord({"server-round": 1})}
        )
        app = partial(trained_on, examples)
        reply = mod(Message(content, 1, "train"), Context(1, 1, {}, RecordDict(), {}), app)
        if reply.has_error():  # of the message: its arrays are not finite
            kinds.append((reply.error.code, reply.error.reason))
            continue
        shapes = [array.shape for array in reply.content["arrays"].values()]
        kinds.append(([*reply.content], shapes, dict(reply.content["metrics"])))
    assert kinds[0] == kinds[1] == kinds[2]


@pytest.mark.usefixtures("_identity")
def test_an_app_that_fails_behind_the_masked_mod_gives_a_vector_and_is_charged(
    tmp_path: Path,
) -> None:
    class Fails(App):
        def inner(self, message: Message, context: Context) -> Message:
            self.calls += 1
            raise ValueError("patient Ann Lee has HIV")

    server = behind_mod(tmp_path)
    server.door = Fails()
    try:
        found = server.until(Stage.CONFIRM)
    except NotGiven as refused:
        pytest.fail(str(refused))
    assert found.stage is Stage.CONFIRM
    assert server.door.calls == len(server.configs)
