"""A cluster is found, checked, and left or ended: what is not the same everywhere does not compute."""

from __future__ import annotations

import os
import signal
import socket

import pytest

pytest.importorskip("ray")
import ray

from discreet.settings.rules import ConfigError
from discreet.simulation.processes import RunLostError
from discreet.simulation.ray_cluster import Alike, connected, versions

OWN = ("examples.own.model:build",)
HERE = versions(OWN)


@pytest.mark.parametrize("what", HERE)
def test_a_task_does_not_begin_where_something_differs(what: str) -> None:
    assert len(HERE) == 3
    Alike(OWN, HERE).check()
    with pytest.raises(RunLostError, match=rf"^\S+ has another version of {what}: \S+ there, 0 here$"):
        Alike(OWN, {**HERE, what: "0"}).check()


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
