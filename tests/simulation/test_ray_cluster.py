"""A cluster is found, checked, and left or ended: what is not the same everywhere does not compute."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

pytest.importorskip("ray")
import ray

from discreet.protocol.run_lost import RunLostError
from discreet.settings.rules import ConfigError
from discreet.simulation.ray_cluster import Alike, connected, source_digest, versions

OWN = ("examples.own.model:build",)
HERE = versions(OWN)


@pytest.mark.parametrize("what", HERE)
def test_a_task_does_not_begin_where_something_differs(what: str) -> None:
    assert len(HERE) == 3
    Alike(OWN, HERE).check()
    with pytest.raises(RunLostError, match=rf"^\S+ has another version of {what}: \S+ there, 0 here$"):
        Alike(OWN, {**HERE, what: "0"}).check()


def test_a_word_of_the_source_changes_its_digest_and_what_a_wheel_adds_does_not(tmp_path: Path) -> None:
    for name, text in {"a.py": "x = 1\n", "below/b.py": "y = 2\n"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    before = source_digest(tmp_path)
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "conf.py").write_text("packed")
    assert source_digest(tmp_path) == before
    (tmp_path / "below" / "b.py").write_text("y = 3\n")
    assert source_digest(tmp_path) != before


@pytest.mark.parametrize("address", ["10.0.0.1", "ray://10.0.0.1:10001", "head:first", ":6379"])
def test_an_address_that_names_no_head_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^ray\.address must be null, auto or host:port"), connected(address):
        pass


@pytest.mark.parametrize("named", ["setting", "RAY_ADDRESS"])
def test_a_cluster_that_is_not_there_is_refused_at_once(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:  # a port that nobody listens on
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with (
            pytest.raises(ConfigError, match=rf"^ray\.address={address} can't be reached"),
            connected(address if named == "setting" else "auto"),
        ):
            pass


def test_a_signal_that_comes_while_ray_connects_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []

    def take_signals(*_: object, **__: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, _: exit(number))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(ray, "init", take_signals)
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with pytest.raises(SystemExit), connected(None):
            pass
        assert heard == [signal.SIGTERM]
        signal.raise_signal(signal.SIGTERM)
        assert len(heard) == 2
    finally:
        signal.signal(signal.SIGTERM, before)
