"""A node's state on disk: there before the reply, gone after the round."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest

from discreet.masking.store import FolderStore, NodeState, read_state
from discreet.masking.wire import MalformedBytes, MaskingRefused, Stage, digest
from tests.masking.federation import RUN, Federation, federation, terms_of

ME = "node-00"


@pytest.fixture
def ours(tmp_path: Path) -> Federation:
    return federation(terms_of(3), store=lambda name: FolderStore(tmp_path / name))


def state_of(folder: Path) -> NodeState:
    saved = FolderStore(folder / ME).load(RUN)
    assert saved is not None
    return read_state(saved)


def test_after_a_round_of_nodes_that_keep_nothing_in_memory_nothing_of_it_is_left(
    ours: Federation, tmp_path: Path
) -> None:
    assert ours.sum(1).names == tuple(ours.nodes)
    assert state_of(tmp_path) == NodeState(closed=1, charged=1, price=digest(terms_of(3).encode(), b""))
    assert not list((tmp_path / ME).glob("*.new"))


def test_its_own_secrets_are_gone_once_its_vector_is_masked_and_those_of_the_next_round_stay(
    ours: Federation, tmp_path: Path
) -> None:
    exchange = ours.until(Stage.MASKED)
    assert len(state_of(tmp_path).attempts[1].secrets) == 80
    ours.answer(ME, exchange.requests[ME])
    assert state_of(tmp_path).attempts[1].secrets == b""
    ours.sum(1, then=2)
    assert {number: len(each.secrets) for number, each in state_of(tmp_path).attempts.items()} == {2: 80}


def test_only_the_owner_can_read_it(ours: Federation, tmp_path: Path) -> None:
    ours.until(Stage.SHARES)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / ME).iterdir()} == {0o600}
    assert stat.S_IMODE((tmp_path / ME).stat().st_mode) == 0o700


def test_the_state_is_synced_before_the_reply_leaves(ours: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange, seen = ours.until(Stage.KEYS), []
    replace, fsync = os.replace, os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (seen.append("fsync"), fsync(handle)))
    monkeypatch.setattr(os, "replace", lambda *paths: (seen.append("replace"), replace(*paths)))
    ours.answer(ME, exchange.requests[ME])
    assert seen == ["fsync", "replace", "fsync"]  # the file, its name, and the folder


def test_without_room_on_the_disk_nothing_leaves(ours: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    exchange = ours.until(Stage.MASKED)
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
    with pytest.raises(MaskingRefused, match="can't be kept: No space left on device"):
        ours.answer(ME, exchange.requests[ME])


def test_a_release_that_is_not_paid_does_not_happen(ours: Federation, tmp_path: Path) -> None:
    exchange, spent = ours.until(Stage.MASKED), Mock(side_effect=RuntimeError("the budget is spent"))
    with pytest.raises(RuntimeError, match="the budget is spent"):
        ours.nodes[ME].answer(exchange.requests[ME], lambda: ours.vectors[ME], spent)
    assert state_of(tmp_path).attempts[1].stage is Stage.SHARES


def test_a_damaged_state_is_refused_and_never_a_new_one(ours: Federation, tmp_path: Path) -> None:
    exchange = ours.until(Stage.SHARES)
    for damage in (b"", b"x", bytes(200)):
        (tmp_path / ME / f"{RUN}.state").write_bytes(damage)
        with pytest.raises(MaskingRefused, match="state of this run is damaged"):
            ours.answer(ME, exchange.requests[ME])
    FolderStore(tmp_path / ME).save(RUN, b"of another version")
    with pytest.raises(MaskingRefused, match="malformed: the state of this run"):
        ours.answer(ME, exchange.requests[ME])


def test_two_processes_never_answer_at_once(ours: Federation, tmp_path: Path) -> None:
    exchange = ours.until(Stage.SHARES)
    with FolderStore(tmp_path / ME).locked(RUN), pytest.raises(MaskingRefused, match="another process is answering"):
        ours.answer(ME, exchange.requests[ME])


def test_no_secret_is_shown(ours: Federation, tmp_path: Path) -> None:
    ours.until(Stage.MASKED)
    state = state_of(tmp_path)
    assert repr(state.attempts[1].secrets) not in repr(state)
    with pytest.raises(MalformedBytes) as refusal:
        read_state(state.encode().replace(b'"stage":2', b'"stage":9'))
    assert str(refusal.value.__cause__).count("input_value") == 0
