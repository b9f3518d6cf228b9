"""When a guard's replies leave: at whole multiples of a public time, whatever blocks did or kept.

What leaves does not follow the time: a reply whose blocks ended late has all that one in time has. It
was noise alone before, and so one block that ended late took all others out of the sum.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from flwr.app import RecordDict

from discreet.guard.alerts import LATE, Alerts
from discreet.guard.block_release import BlockRelease
from discreet.guard.block_task import DEADLINE, BlockTask
from discreet.guard.guard_policy import (
    ENDING_SECONDS,
    KERNEL_ENDING_SECONDS,
    GuardPolicy,
    read_guard,
)
from discreet.guard.reply_slots import ReplySlots
from discreet.guard.sandbox import BlockInput, BlockResult, Sandbox, SandboxError, most_state
from discreet.guard.site_guard import SiteGuard, opened_blocks
from discreet.guard.site_records import JOURNAL
from discreet.guard.zygote import ENDED, Pipes
from discreet.privacy.randomness import seeded_source
from discreet.privacy.secure_grid import SecureSum
from tests.guard.made import SIZE, PlayedSandbox, context, message, site
from tests.guard.test_block_release import APP, PATIENTS, answered, guard_at, opposed
from tests.guard.test_guarded_replies import Node
from tests.guard.test_masked_blocks import asked

DISK = 1 << 20  # bytes a second
wait = ReplySlots.wait


class Clock:
    """A clock that goes on only while somebody sleeps or works."""

    def __init__(self) -> None:
        self.now = 1000.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: made.now)
    monkeypatch.setattr(time, "sleep", made.sleep)
    return made


class KeepingSandbox(PlayedSandbox):
    """Blocks that keep the largest state, and end after some seconds."""

    def __init__(self, clock: Clock, seconds: float) -> None:
        super().__init__(opposed)
        self.clock = clock
        self.seconds = seconds

    def run(self, task: BlockTask, blocks: Sequence[BlockInput]) -> Iterator[BlockResult]:
        for each in super().run(task, blocks):
            yield BlockResult(each.number, each.vector, bytes(most_state(2)), b"")
        self.clock.sleep(self.seconds)


class WaitingNode(Node):
    """A node whose replies wait for the end of their slot."""

    def _waits(self, slots: ReplySlots) -> None:
        super()._waits(slots)
        wait(slots)


@dataclass(frozen=True)
class Sent:
    """A reply's values, or its error; the number of slots after which it left; and its journal."""

    values: list[float]
    error: str
    slots: float
    rows: list[dict[str, object]]


def played(folder: Path, clock: Clock, seconds: float = 0.0) -> Sent:
    """What a guarded node sends if blocks end after some seconds. The noise has a seed."""
    policy = site(folder, PATIENTS)
    guard = SiteGuard(policy, sandbox=KeepingSandbox(clock, seconds))  # type: ignore[arg-type]
    node = WaitingNode(guard.answer)
    node.replies.guard = guard
    write_bytes = Path.write_bytes

    def written(path: Path, content: bytes) -> int:
        clock.sleep(len(content) / DISK)
        return write_bytes(path, content)

    started = clock.now
    seeded = patch("discreet.guard.site_guard.secure_source", lambda: seeded_source(61003))
    with patch.object(Path, "write_bytes", written), seeded:
        node.answers()
    ((reply, _),) = node.sent
    slots = (clock.now - started) / policy.round_seconds
    rows = [json.loads(line) for line in (guard.records / JOURNAL).read_text().splitlines()]
    if reply.has_error():
        return Sent([], reply.error.reason, slots, rows)
    arrays = [each.numpy().ravel() for each in reply.content["arrays"].values()]
    return Sent(np.concatenate(arrays).tolist(), "", slots, rows)


def noise_alone(folder: Path) -> list[float]:
    """What leaves if no block gives anything."""
    guard = guard_at(folder, lambda values: None)
    with patch("discreet.guard.site_guard.secure_source", lambda: seeded_source(61003)):
        content = answered(guard)
    return np.concatenate([each.numpy().ravel() for each in content["arrays"].values()]).tolist()


def test_no_state_that_blocks_keep_delays_a_reply(tmp_path: Path, clock: Clock) -> None:
    sent = played(tmp_path / "kept", clock)
    assert sent.slots == pytest.approx(1)
    assert sent.values != noise_alone(tmp_path / "none")
    assert sent.rows[-1]["late"] is False


@pytest.mark.parametrize(("rounds", "late", "slots"), [(1, -0.5, 1), (1, 0.5, 2), (2, 0.5, 3)])
def test_a_reply_whose_blocks_ended_late_leaves_later_with_all_that_one_in_time_has(
    rounds: int, late: float, slots: int, tmp_path: Path, clock: Clock
) -> None:
    in_time = played(tmp_path / "in-time", clock)
    round_seconds = site(tmp_path / "any", PATIENTS).round_seconds
    sent = played(tmp_path / "late", clock, rounds * round_seconds + late)
    assert sent.slots == pytest.approx(slots)
    assert sent.values == in_time.values != noise_alone(tmp_path / "none")
    assert (sent.rows[-1]["late"], sent.rows[-1]["failed"]) == (slots > 1, 0)


def test_a_reply_that_takes_long_to_build_leaves_later_too(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    in_time = played(tmp_path / "in-time", clock)
    assert "leaves late" not in caplog.text
    mean = BlockRelease.mean

    def slow(release: BlockRelease, *given: Any) -> torch.Tensor:
        clock.sleep(60)
        return mean(release, *given)

    with patch.object(BlockRelease, "mean", slow):
        sent = played(tmp_path / "site", clock)
    assert (sent.error, sent.values) == ("", in_time.values)
    seconds = read_guard(tmp_path / "site" / "guard.toml").round_seconds
    assert sent.slots == pytest.approx(math.ceil(60 / seconds))
    assert "a reply leaves late: set reply-seconds" in caplog.text


def test_a_slot_has_time_for_a_kernel_to_give_back_its_memory(tmp_path: Path) -> None:
    seconds = [
        site(tmp_path / str(megabytes), PATIENTS, limits={"memory-mb": megabytes}).slot_seconds
        for megabytes in (1024, 3072)
    ]
    assert seconds[1] - seconds[0] == pytest.approx(2 * KERNEL_ENDING_SECONDS)


def masked_vector(folder: Path, clock: Clock, *, late: float) -> list[int]:
    """What a site adds to a masked sum, without noise, if its blocks end so late."""
    policy = site(folder, PATIENTS, min_noise_multiplier=1.0, max_epsilon=50.0)
    sandbox = KeepingSandbox(clock, policy.round_seconds * late)
    guard = SiteGuard(policy, sandbox=sandbox)  # type: ignore[arg-type]
    vectors = []

    def masking(content: RecordDict, config: object, **how: Any) -> RecordDict:
        vectors.append(how["work"]().vector(lambda: None))
        return RecordDict()

    silent = patch.object(SecureSum, "noise", lambda self, source: torch.zeros(self.length).long())
    with patch("discreet.guard.site_guard.answer_masking", masking), silent:
        assert guard.answer(asked(), context(), APP).charged
    (vector,) = vectors
    return [int(each) for each in vector]


def test_a_masked_vector_whose_blocks_ended_late_has_all_that_one_in_time_has(
    tmp_path: Path, clock: Clock
) -> None:
    in_time = masked_vector(tmp_path / "in-time", clock, late=0.0)
    assert any(in_time)
    assert masked_vector(tmp_path / "late", clock, late=2.5) == in_time


PIPES = tuple(field.name for field in fields(Pipes))


class FakeZygote:
    """What the guard starts blocks from. Each gives ones and has ended at once, but the first, which
    gives nothing and stays on."""

    def __init__(self, first_stays: float, said: bytes = ENDED) -> None:
        self.first_stays = first_stays
        self.said = said
        self.control, self.theirs = socket.socketpair()
        self.started: list[float] = []
        self.ends: list[float] = []
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        while True:
            said, given, _, _ = socket.recv_fds(self.theirs, DEADLINE.size, len(PIPES))
            if not said:
                self.theirs.close()
                return
            self.started.append(time.monotonic())
            self.ends += DEADLINE.unpack(said)
            pipes = dict(zip(PIPES, given, strict=True))
            done = pipes.pop("done")
            os.write(done, self.said)
            if len(self.started) > 1:
                os.write(pipes["out"], np.ones(SIZE, np.float32).tobytes())
            for each in pipes.values():
                os.close(each)
            if len(self.started) == 1:
                threading.Timer(self.first_stays, os.close, [done]).start()
            else:
                os.close(done)


def ran_by(zygote: FakeZygote, policy: GuardPolicy) -> list[BlockResult]:
    """What comes of two blocks."""
    sandbox = object.__new__(Sandbox)
    sandbox.policy = policy
    sandbox.alerts = Alerts(policy.alert)
    sandbox.control = zygote.control
    sandbox.groups = None
    sandbox.home = None
    sandbox.process = subprocess.Popen(["true"])
    guard = SiteGuard(policy, sandbox=sandbox)
    task = guard._task(message(), context(), APP, work=guard._work(message(), context()))
    try:
        with opened_blocks(guard.blocks, [0, 1], {}) as inputs:
            return list(sandbox.run(task, inputs))
    finally:
        sandbox.close()
        zygote.thread.join()


def test_a_keeper_that_ends_without_a_word_ends_the_sandbox_and_gives_nothing(
    tmp_path: Path,
) -> None:
    policy = site(tmp_path, PATIENTS, block_seconds=1.0, limits={"memory-mb": 256})
    zygote = FakeZygote(0.0, said=b"")
    with pytest.raises(SandboxError, match="has ended before its block"):
        ran_by(zygote, policy)
    assert len(zygote.ends) == 1


@pytest.mark.parametrize(("stays", "slots"), [(0.0, 1), (1.3, 2), (2.3, 3)])
def test_a_block_that_is_still_there_lengthens_its_slot_and_no_other(
    stays: float, slots: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However long it stays: the guard gave up after END_SECONDS before, and nothing left.
    monkeypatch.setattr("discreet.guard.sandbox.END_SECONDS", 0.1)
    ending = ENDING_SECONDS + KERNEL_ENDING_SECONDS / 4
    policy = site(tmp_path, PATIENTS, block_seconds=1.0 - ending, limits={"memory-mb": 256})
    zygote = FakeZygote(stays)
    first_result, second_result = ran_by(zygote, policy)
    assert first_result.vector is None
    assert second_result.vector is not None
    assert second_result.vector.tolist() == [1.0] * SIZE
    first, second = zygote.ends  # deadlines are absolute: no delay of this machine moves them
    assert second - first == pytest.approx(slots, abs=1e-6)
    assert zygote.started[1] >= second - policy.block_seconds


def test_operators_are_told_of_a_block_that_can_not_be_ended_while_the_guard_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("discreet.guard.sandbox.END_SECONDS", 0.1)
    told: list[str] = []
    monkeypatch.setattr(Alerts, "call", lambda self, reason: told.append(reason))
    policy = site(tmp_path, PATIENTS, block_seconds=1.0, limits={"memory-mb": 256})
    assert len(ran_by(FakeZygote(2.5), policy)) == 2
    assert set(told) == {LATE}
    assert "a block could not be ended for 0.1 s: the guard waits on" in caplog.text
