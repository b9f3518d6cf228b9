"""What an app behind a mod may do, and leave behind: the reply that was charged leaves, and tells
nothing of it. Through the ClientApp, for both mods."""

from __future__ import annotations

import asyncio
import math
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import NoReturn

import numpy as np
import pytest
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp

from discreet import local_dp_mod, secure_sum_mod
from discreet.flower import local_dp_mod as local_module
from discreet.flower import secure_sum_mod as masked_module
from discreet.ledger.durable_ledger import DurableLedger
from discreet.masking.wire import Stage
from discreet.node import time_limit
from discreet.privacy.randomness import RandomSource, seeded_source
from tests.node.dishonest import ARRAYS, NotGiven, Told, server_of

App = Callable[[Message], RecordDict]
RANGES = {"loss": (0.0, 4.0), "error": (-1.0, 1.0), "cost": (0.0, 2e5)}
SECRET = "patient Ann Lee has HIV"


@pytest.fixture(autouse=True)
def _identity(monkeypatch: pytest.MonkeyPatch) -> None:
    import flwr.supercore.task_identity as identity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(identity.TaskIdentity, name, 1)


@pytest.fixture
def _seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    def source() -> RandomSource:
        return seeded_source(52_361)

    for module in (local_module, masked_module):
        monkeypatch.setattr(module, "secure_source", source)


FILES = ("identity-key", "peers", "masking-state", "ledger")
LIMITS = (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)


@pytest.fixture(autouse=True)
def _settings() -> Iterator[None]:
    folder, limits = Path.cwd(), [(kind, resource.getrlimit(kind)) for kind in LIMITS]
    yield
    os.chdir(folder)
    threading.stack_size(0)
    threading.settrace(None)
    for kind, limit in limits:
        resource.setrlimit(kind, limit)
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def client_app(app: App, mod: object) -> ClientApp:
    client = ClientApp(mods=[mod])

    @client.train()
    def train(message: Message, context: Context) -> Message:
        return Message(app(message), reply_to=message)

    return client


def trained(_: Message) -> RecordDict:
    arrays = ArrayRecord({"weight": Array(np.full((2, 3), 0.1, np.float32))})
    return RecordDict({"arrays": arrays, "metrics": MetricRecord({"loss": 1.7, "cost": 1e5})})


def asked() -> Message:
    content = RecordDict({"arrays": ARRAYS, "config": ConfigRecord({"server-round": 3})})
    return Message(content, dst_node_id=1, message_type="train")


def behind_local(app: App, folder: Path, sent: Message | None = None) -> Message:
    """The reply of an app behind `local_dp_mod`, whose ledger is folder/node.db."""
    DurableLedger.create(folder / "node.db")
    mod = local_dp_mod(
        clip_norm=0.5, target_epsilon=8.0, delta=1e-5, rounds=4,
        ledger=folder / "node.db", metrics=RANGES,
    )  # fmt: skip
    return client_app(app, mod)(sent or asked(), Context(1, 1, {}, RecordDict(), {}))


def behind_masked(app: App, folder: Path) -> Message:
    """The reply of an app behind `secure_sum_mod` that has the masked vector, or is an error. The
    nodes' files have relative paths."""
    client, replies = client_app(app, secure_sum_mod), list[Message]()

    def door(message: Message, context: Context) -> Message:
        replies.append(client(message, context))
        return replies[-1]

    server = server_of(folder, replace(Told.of(), arrays=ARRAYS), door=door)
    os.chdir(folder)
    for config in server.configs.values():
        config |= {key: str(Path(str(config[key])).relative_to(folder)) for key in FILES}
    name, request = next(iter(server.until(Stage.MASKED).requests.items()))
    try:
        server.ask(name, request)
    except NotGiven:
        assert replies[-1].has_error()
    return replies[-1]


Behind = Callable[[App, Path], Message]
both = pytest.mark.parametrize("behind", [behind_local, behind_masked], ids=["local", "masked"])


def is_reply(reply: Message) -> bool:
    return not reply.has_error() and bool(reply.content)


class Unprintable(BaseException):
    def __str__(self) -> str:
        raise KeyboardInterrupt


RAISED = [
    ValueError(SECRET),
    SystemExit(SECRET),
    KeyboardInterrupt(SECRET),
    GeneratorExit(SECRET),
    asyncio.CancelledError(SECRET),
    Unprintable(),
]


@both
@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_an_app_that_raises_anything_counts_as_no_change(
    behind: Behind, error: BaseException, tmp_path: Path
) -> None:
    def app(_: Message) -> NoReturn:
        raise error

    try:
        reply = behind(app, tmp_path)
    except BaseException as found:  # noqa: BLE001 - KeyboardInterrupt would end the tests
        pytest.fail(f"{type(found).__name__} went through")
    assert is_reply(reply)


def test_an_app_that_raises_in_another_thread_counts_as_no_change(tmp_path: Path) -> None:
    def app(_: Message) -> NoReturn:
        raise KeyboardInterrupt

    replies: list[Message] = []
    thread = threading.Thread(target=lambda: replies.append(behind_local(app, tmp_path)))
    thread.start()
    thread.join()
    assert [is_reply(reply) for reply in replies] == [True]


@both
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT])
def test_a_signal_of_the_operator_ends_the_node_while_the_app_works(
    behind: Behind, number: signal.Signals, tmp_path: Path
) -> None:
    def ends(number: int, frame: FrameType | None) -> NoReturn:
        raise SystemExit(number)  # as Flower's own handlers do

    def app(given: Message) -> RecordDict:
        os.kill(os.getpid(), number)
        return trained(given)

    before = signal.signal(number, ends)
    try:
        with pytest.raises(SystemExit, match=str(int(number))):
            behind(app, tmp_path)
        assert signal.getsignal(number) is ends
    finally:
        signal.signal(number, before)


def test_a_ctrl_c_ends_a_process_without_handlers_of_its_own(tmp_path: Path) -> None:
    def app(given: Message) -> RecordDict:
        signal.raise_signal(signal.SIGINT)
        return trained(given)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    try:
        with pytest.raises(KeyboardInterrupt):
            behind_local(app, tmp_path)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def fails(*_: object) -> NoReturn:
    raise RuntimeError(SECRET)


def has_own_handler(given: Message) -> RecordDict:
    signal.signal(signal.SIGALRM, fails)
    return trained(given)


def has_own_timer(given: Message) -> RecordDict:
    signal.setitimer(signal.ITIMER_REAL, 3600.0, 3600.0)
    return trained(given)


def has_own_handler_and_raises(given: Message) -> NoReturn:
    has_own_handler(given)
    raise ValueError(SECRET)


def outlasts_its_limit(given: Message) -> RecordDict:
    signal.raise_signal(signal.SIGALRM)
    return trained(given)


TIMED = [trained, has_own_handler, has_own_timer, has_own_handler_and_raises, outlasts_its_limit]


@both
@pytest.mark.parametrize("app", TIMED, ids=lambda app: app.__name__)
def test_the_limit_of_an_apps_time_ends_before_its_noise_is_drawn(
    behind: Behind, app: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timers = []
    for module, name in ((local_module, "release_update"), (masked_module, "noised_vector")):
        real = getattr(module, name)

        def drawn(*given, real=real, **more):
            timers.append(signal.getitimer(signal.ITIMER_REAL))
            return real(*given, **more)

        monkeypatch.setattr(module, name, drawn)
    before = signal.getsignal(signal.SIGALRM)
    left, interval = signal.getitimer(signal.ITIMER_REAL)  # of whoever runs the tests
    reply = behind(app, tmp_path)
    assert is_reply(reply)
    assert {*timers} == {(0.0, 0.0)}
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) <= (left, interval)


@both
def test_an_alarm_between_the_apps_end_and_the_end_of_its_limit_is_no_error(
    behind: Behind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lift, goes_off = time_limit.lift_limit, [True]

    def later() -> None:
        if goes_off and goes_off.pop():
            signal.raise_signal(signal.SIGALRM)
        lift()

    monkeypatch.setattr(time_limit, "lift_limit", later)
    assert is_reply(behind(trained, tmp_path))
    assert goes_off == []


def renames(given: Message) -> RecordDict:
    given.metadata.group_id = SECRET
    given.metadata.message_type = "train.secret71"
    given.metadata.ttl = 71.0
    return trained(given)


def empties(given: Message) -> RecordDict:
    found = trained(given)
    given.content["arrays"].clear()
    given.content.clear()
    return found


def forgets(given: Message) -> RecordDict:
    given.metadata.__dict__.clear()
    return trained(given)


@both
@pytest.mark.parametrize("app", [renames, empties, forgets], ids=lambda app: app.__name__)
def test_what_an_app_writes_into_its_message_is_not_in_the_reply(
    behind: Behind, app: App, tmp_path: Path
) -> None:
    reply = behind(app, tmp_path)
    assert is_reply(reply)
    assert (reply.metadata.group_id, reply.metadata.message_type) == ("", "train")
    assert reply.metadata.ttl > 71.0


@pytest.mark.parametrize("changes", ["limit", "owner", "name"])
def test_what_an_app_writes_into_its_context_is_not_there_for_the_next_message(
    changes: str, tmp_path: Path
) -> None:
    """Flower keeps the context of a run for its next message."""
    DurableLedger.create(tmp_path / "node.db")
    mod = local_dp_mod(
        clip_norm=0.5, target_epsilon=8.0, delta=1e-5, rounds=4, ledger=tmp_path / "node.db"
    )
    client = ClientApp(mods=[mod])
    names = {"limit": "max-epsilon", "owner": "partition-id", "name": SECRET}

    @client.train()
    def train(message: Message, context: Context) -> Message:
        context.node_config[names[changes]] = 1000
        context.run_config[SECRET] = 1
        context.state["seen"] = ConfigRecord({"times": 1 + len(context.state)})
        return Message(trained(message), reply_to=message)

    given = {"max-epsilon": 4.0, "max-delta": 1e-5}
    context = Context(1, 1, dict(given), RecordDict(), {})
    first, second = (client(asked(), context) for _ in range(2))
    assert is_reply(first)
    assert second.has_error()
    assert "would reach epsilon 5.298 of 4" in second.error.reason
    assert (context.node_config, context.run_config) == (given, {})
    assert context.state["seen"]["times"] == 1  # what the app keeps stays


def test_an_app_gets_a_message_of_its_own(tmp_path: Path) -> None:
    sent = asked()
    assert is_reply(behind_local(empties, tmp_path, sent))
    assert {*sent.content} == {"arrays", "config"}
    assert {*sent.content["arrays"]} == {"weight"}


class Odd(float):
    """A number that fails when it is read."""

    def __float__(self) -> float:
        raise RuntimeError(SECRET)


class Liar(float):
    """A number that is far from what it compares as."""

    def __float__(self) -> float:
        return 1e300

    def __lt__(self, other: object) -> bool:
        return False

    __gt__ = __lt__


def said_of(loss: object, folder: Path) -> Mapping[str, object]:
    """The metrics that leave if the app gives this loss."""
    metrics = MetricRecord({} if loss is None else {"loss": loss})
    folder.mkdir()
    reply = behind_local(lambda given: RecordDict({**trained(given), "metrics": metrics}), folder)
    assert not reply.has_error(), reply.error.reason
    return dict(reply.content["metrics"])


@pytest.mark.usefixtures("_seeded")
@pytest.mark.parametrize(
    ("loss", "as_if"),
    [
        (10**400, 4.0),
        (-(10**400), 0.0),
        (math.inf, 4.0),
        (5, 4.0),
        (Liar(1.0), 4.0),
        (Odd(1.0), None),
        (math.nan, None),
        (2.0, None),
    ],
    ids=["huge", "-huge", "inf", "beyond", "lies", "fails", "nan", "middle"],
)
def test_a_metric_leaves_whatever_number_an_app_gives(
    loss: object, as_if: float | None, tmp_path: Path
) -> None:
    found = said_of(loss, tmp_path / "given")
    assert found == said_of(as_if, tmp_path / "as if")
    assert found != said_of(1.0, tmp_path / "other")


def on_meta(given: Message) -> RecordDict:
    torch.set_default_device("meta")
    return trained(given)


def on_meta_and_fails(given: Message) -> NoReturn:
    on_meta(given)
    raise ValueError(SECRET)


def in_halves(given: Message) -> RecordDict:
    torch.set_default_dtype(torch.float16)
    return trained(given)


@both
@pytest.mark.usefixtures("_seeded")
@pytest.mark.parametrize(
    ("app", "as_if"),
    [(on_meta, trained), (on_meta_and_fails, fails), (in_halves, trained)],
    ids=lambda app: app.__name__,
)
def test_noise_does_not_depend_on_settings_that_an_app_leaves(
    behind: Behind, app: App, as_if: App, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vectors = []

    def noted(*given):
        vectors.append(real(*given))
        return vectors[-1]

    real = masked_module.noised_vector
    monkeypatch.setattr(masked_module, "noised_vector", noted)
    found = []
    for number, each in enumerate((as_if, app, app)):
        (tmp_path / str(number)).mkdir()
        reply = behind(each, tmp_path / str(number))
        assert is_reply(reply)
        if behind is behind_local:
            arrays = reply.content["arrays"]["weight"].numpy()
            found.append((arrays.tolist(), dict(reply.content["metrics"])))
        else:
            found.append(vectors[-1].tolist())
    assert found[0] == found[1] == found[2]


def limited(kind: int, most: int) -> None:
    resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))


def leaves_no_more_files(given: Message) -> RecordDict:
    with Path(os.devnull).open() as free:
        lowest = free.fileno()
    limited(resource.RLIMIT_NOFILE, lowest)
    return trained(given)


def leaves_no_room_in_files(given: Message) -> RecordDict:
    limited(resource.RLIMIT_FSIZE, 0)
    return trained(given)


def goes_elsewhere(given: Message) -> RecordDict:
    os.chdir("/")
    return trained(given)


def leaves_too_large_stacks(given: Message) -> RecordDict:
    threading.stack_size(1 << 45)
    return trained(given)


def leaves_a_trace_of_threads(given: Message) -> RecordDict:
    threading.settrace(fails)
    return trained(given)


LEFT = [
    leaves_no_more_files, leaves_no_room_in_files, goes_elsewhere, leaves_too_large_stacks,
    leaves_a_trace_of_threads,
]  # fmt: skip


@both
@pytest.mark.parametrize("app", LEFT, ids=lambda app: app.__name__)
def test_a_reply_leaves_whatever_limits_an_app_leaves_behind(
    behind: Behind, app: App, tmp_path: Path
) -> None:
    assert is_reply(behind(app, tmp_path))
