"""Content that is not there yet is looked for again soon."""

from __future__ import annotations

import threading

import pytest
from flwr.supercore.inflatable import inflatable_utils
from flwr.supercore.inflatable.inflatable_utils import ObjectUnavailableError, pull_objects

from discreet.deployment.flower_fixes.object_pauses import FIRST_PAUSE_SECONDS, look_for_objects_soon


@pytest.fixture
def defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    for function in (pull_objects, inflatable_utils.pull_and_inflate_object_from_tree):
        monkeypatch.setattr(function, "__kwdefaults__", dict(function.__kwdefaults__))


@pytest.mark.usefixtures("defaults")
def test_the_first_pause_is_short_and_each_further_one_twice_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout is not None:
                pauses.append(timeout)
            return False

    misses = iter(range(3))

    def pull(_: str) -> bytes:
        if next(misses, None) is not None:
            raise ObjectUnavailableError("it")
        return b"content"

    look_for_objects_soon()
    monkeypatch.setattr(inflatable_utils.threading, "Event", Stop)
    assert pull_objects(["it"], pull, max_concurrent_pulls=1) == {"it": b"content"}
    waits = [pause for pause in pauses if pause > 0][-3:]
    # Flower varies each pause by a fifth.
    assert waits == pytest.approx([FIRST_PAUSE_SECONDS * 2**number for number in range(3)], rel=0.21)
    assert inflatable_utils.pull_and_inflate_object_from_tree.__kwdefaults__["initial_backoff"] == FIRST_PAUSE_SECONDS
