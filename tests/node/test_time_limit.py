"""A server can't occupy a node: the steps and the seconds of one message have an end, which the
owner sets."""

from __future__ import annotations

import pkgutil
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict

from discreet.flower.serving import encode_request, parameters_record
from discreet.ledger.durable_ledger import Charge, DurableLedger
from discreet.node import time_limit
from discreet.node.account import Refused
from discreet.node.app import answered, train
from discreet.node.policy import ClientPolicy
from discreet.node.time_limit import done_within
from discreet.node.work import work_of
from discreet.training.failing_units import NOISE_ALONE
from discreet.training.local_training import LocalSettings
from tests.node.clients import (
    EXAMPLE,
    OFF,
    client,
    config,
    examples,
    params_of,
    request,
)

NODE: dict[str, str | int] = {"partition-id": 1, "num-partitions": 12}
DIGITS = (
    "data.name=digits",
    "data.num_clients=12",
    "model.name=logistic_regression",
    "privacy.delta=1e-3",
)


def message(*words: str, ttl: float = 3600.0) -> Message:
    asked = request(config(*DIGITS, *words))
    return Message(encode_request(asked, parameters_record(torch.zeros(650))), 1, "train", ttl=ttl)


def reply(asked: Message, **node: str | int) -> Message:
    return train(asked, Context(1, 1, {**NODE, **node}, RecordDict(), {}))


ENDLESS = (
    "training.epochs=100000000",
    "privacy.user.noise_multiplier=1000",
    "privacy.user.target_epsilon=null",
)


def test_a_server_that_asks_for_endless_steps_is_refused_by_every_policy() -> None:
    assert "allows 1000000 local steps" in reply(message(*ENDLESS)).error.reason


def test_an_owner_says_how_many_steps_a_message_may_ask_for() -> None:
    who = client(examples(20), None, policy=ClientPolicy(max_steps=9))
    for epochs, said in (
        (2, "allows 9 local steps; this message asks for 10"),
        (1, "has no ledger"),
    ):
        with pytest.raises(Refused, match=said):
            who.answer(
                work_of(request(config(*EXAMPLE, f"training.epochs={epochs}"))),
                params_of(who.model),
            )


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_where_n_is_hidden_no_refusal_follows_from_it(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = config(
        *OFF,
        f"privacy.local.kind={kind}",
        "privacy.local.noise_multiplier=1e-6",
        *("training.epochs=9", "training.batch_size=1", "privacy.delta=0.2", "data.num_clients=2"),
    )
    moved = list[bool]()
    for count in (1, 2, 38):
        who = client(
            examples(count),
            tmp_path / f"{count}.db",
            policy=ClientPolicy(max_steps=9),
        )
        found = who.answer(work_of(request(run)), params_of(who.model))
        moved.append(float(found.update.norm()) > 1e-3)
    assert moved == [True, False, False]  # what is too much is no change
    assert "allows 9 local steps; this message asks for 342" in caplog.text


@pytest.mark.parametrize("limit", ["time to live", "max-seconds"])
def test_work_that_takes_too_long_ends_in_time_and_what_was_charged_is_answered(
    limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DurableLedger.create(tmp_path / "ledger.db")
    charged = list[int]()
    real = DurableLedger.charge

    def noted(self: DurableLedger, charges: Sequence[Charge], **more: Any) -> Any:
        position = real(self, charges, **more)
        charged.extend(each.count for each in charges)
        return position

    monkeypatch.setattr(DurableLedger, "charge", noted)
    words = ("training.epochs=20000", *EXAMPLE[:1], *EXAMPLE[-2:])
    ttl, most = (1.0, 86_400) if limit == "time to live" else (3600.0, 1)
    started = time.monotonic()
    answer = reply(
        message(*words, ttl=ttl), ledger=str(tmp_path / "ledger.db"), **{"max-seconds": most}
    )
    assert time.monotonic() - started < 30
    # A machine that is too slow is refused before the charge.
    if charged:
        assert not answer.has_error()
    else:
        assert answer.error.reason.startswith("the work of this message took 1 s")
    assert DurableLedger(tmp_path / "ledger.db").spent("example").num_releases == sum(charged)


def test_a_time_that_is_up_while_the_charge_is_written_takes_no_reply_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    DurableLedger.create(tmp_path / "ledger.db")
    monkeypatch.setattr(DurableLedger, "charge", goes_off(DurableLedger.charge))
    words = ("training.epochs=1", *EXAMPLE[:1], *EXAMPLE[-2:])
    answer = reply(message(*words), ledger=str(tmp_path / "ledger.db"))
    assert not answer.has_error()
    assert DurableLedger(tmp_path / "ledger.db").spent("example").num_releases > 0


def goes_off(real: Callable[..., Any]) -> Callable[..., Any]:
    """The alarm goes off after it."""

    def late(*given: Any, **named: Any) -> Any:
        found = real(*given, **named)
        if signal.getsignal(signal.SIGALRM) is not signal.SIG_IGN:
            signal.raise_signal(signal.SIGALRM)
        return found

    return late


def ends_by(error: BaseException) -> Callable[..., Any]:
    def raising(real: Callable[..., Any]) -> Callable[..., Any]:
        def ended(*given: Any, settings: LocalSettings, **named: Any) -> Any:
            if settings.failing == NOISE_ALONE:
                return real(*given, settings=settings, **named)
            raise error

        return ended

    return raising


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("node.client:clip_updates", goes_off),
        ("node.app:reply_numbers", goes_off),
        ("node.client:local_update", ends_by(KeyboardInterrupt())),
        ("node.client:local_update", ends_by(GeneratorExit())),
    ],
)
def test_what_is_charged_is_answered_whatever_a_model_raises_and_when_time_is_up(
    name: str,
    fault: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = f"discreet.{name.replace(':', '.')}"
    monkeypatch.setattr(path, fault(pkgutil.resolve_name(f"discreet.{name}")))
    DurableLedger.create(tmp_path / "ledger.db")
    answer = reply(message(*EXAMPLE[:1], *EXAMPLE[-2:]), ledger=str(tmp_path / "ledger.db"))
    charged = DurableLedger(tmp_path / "ledger.db").releases()
    assert (answer.has_error(), len(charged)) == (False, 1)


def stubborn(_: ClientPolicy) -> RecordDict:
    while True:
        try:
            time.sleep(0.01)
        except Exception:  # noqa: BLE001 - as apps are written
            continue


def slow(seconds: float) -> Callable[[], RecordDict]:
    """Work that takes so long."""

    def work() -> RecordDict:
        time.sleep(seconds)
        return RecordDict()

    return work


class Entered:
    """A context that notes whether it holds; the alarm goes off while it is entered or left."""

    holds = False

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> None:
        Entered.holds = True
        if self.where == "entered":
            signal.raise_signal(signal.SIGALRM)

    def __exit__(self, *error: object) -> None:
        if self.where == "left":
            signal.raise_signal(signal.SIGALRM)
        Entered.holds = False


@pytest.mark.parametrize("where", ["entered", "left"])
def test_time_that_is_up_leaves_no_context_half_entered_or_half_left(where: str) -> None:
    def work() -> RecordDict:
        with Entered(where):
            pass
        time.sleep(30)
        return RecordDict()

    with pytest.raises(Refused, match="took 60 s"):
        done_within(60, work)
    assert not Entered.holds


class Endless:
    def __enter__(self) -> None:
        while True:
            time.sleep(0.01)

    def __exit__(self, *error: object) -> None:
        pass


def test_a_context_that_is_entered_for_ever_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_limit, "GRACE", 0.05)

    def work() -> RecordDict:
        with Endless():
            return RecordDict()

    with pytest.raises(Refused, match=r"took 0\.1 s"):
        done_within(0.1, work)


def test_an_app_that_holds_up_every_exception_ends_too() -> None:
    asked = Message(RecordDict({"config": ConfigRecord()}), 1, "train", ttl=0.2)
    assert "took 0.2 s" in answered(asked, stubborn, {}).error.reason


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_message_without_time_is_not_worked_on(seconds: float) -> None:
    def worked_on() -> RecordDict:
        raise AssertionError("the work began")

    with pytest.raises(Refused, match="exceeded its time"):
        done_within(seconds, worked_on)


def test_the_alarm_of_whoever_calls_goes_on() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda number, _: heard.append(number))
    left = signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        done_within(30.0, slow(0.3))
        time.sleep(0.1)
    finally:
        signal.setitimer(signal.ITIMER_REAL, *left)
        signal.signal(signal.SIGALRM, before)
    assert heard == [signal.SIGALRM]


def test_outside_the_main_thread_work_that_was_done_is_answered_also_if_it_is_late() -> None:
    found: list[RecordDict] = []
    thread = threading.Thread(target=lambda: found.append(done_within(0.05, slow(0.1))))
    thread.start()
    thread.join()
    assert len(found) == 1
