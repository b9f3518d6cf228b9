"""The operator's command: called on refusals, on lateness and at 80 % of the budget, with words that
are fixed in guard.toml alone."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from discreet.guard import alerts, site_check
from discreet.guard.alerts import BUDGET, HOUR, LATE, REFUSED, Alerts
from discreet.guard.guard_policy import read_guard
from discreet.guard.reply_slots import ReplySlots
from discreet.guard.site_guard import SiteGuard
from discreet.node.account import Refused
from discreet.settings.rules import ConfigError
from tests.guard.made import context, guard_toml, message, site
from tests.guard.test_block_release import APP, PATIENTS, guard_at

# Writes its words, variables and input, and then an empty file that says it is done.
PROGRAM = """#!{python}
import json, os, sys
told = {{"words": sys.argv[1:], "variables": sorted(os.environ), "input": sys.stdin.read()}}
with open({out!r}, "a") as file:
    file.write(json.dumps(told) + "\\n")
"""


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """A command with two words of its own."""
    program = tmp_path / "tell"
    program.write_text(PROGRAM.format(python=sys.executable, out=str(tmp_path / "told")))
    program.chmod(0o700)
    return [str(program), "--to", "ward; touch $HOME"]


def told(guard: SiteGuard, folder: Path) -> list[dict[str, object]]:
    """The calls of the command, after each has ended."""
    for process in guard.alerts.running.values():
        assert process.wait(60) == 0
    path = folder / "told"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_refusal_is_told_once_an_hour_and_no_word_of_the_app_reaches_the_command(
    tmp_path: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [5.0]
    monkeypatch.setattr(alerts.time, "monotonic", lambda: now[0])
    monkeypatch.setenv("DISCREET_SECRET", "not for others")
    guard = guard_at(tmp_path / "guard", alert=command)
    hostile = replace(APP, fab_id="$(touch /tmp/x)", version="`id`")
    for _ in range(3):
        with pytest.raises(Refused):
            guard.answer(message(kind="query"), context(), hostile)
    (call,) = told(guard, tmp_path)
    assert call["words"] == ["--to", "ward; touch $HOME", REFUSED]
    assert call["input"] == ""
    assert {*call["variables"]} <= {"PATH", "LC_CTYPE"}  # type: ignore[misc]
    now[0] += HOUR
    with pytest.raises(Refused):
        guard.answer(message(kind="query"), context(), hostile)
    assert len(told(guard, tmp_path)) == 2


def test_eighty_percent_of_the_budget_are_told_once(tmp_path: Path, command: list[str]) -> None:
    first = guard_at(tmp_path / "first")
    first.answer(message(), context(), APP)
    reached = first.epsilon
    for share, wanted in ((0.79, []), (0.81, [BUDGET])):
        folder = tmp_path / str(share)
        guard = guard_at(folder, alert=command, max_epsilon=reached / share)
        guard.answer(message(), context(), APP)
        assert [call["words"][-1] for call in told(guard, tmp_path)] == wanted  # type: ignore[index]


def test_a_late_reply_is_told(tmp_path: Path, command: list[str]) -> None:
    guard = guard_at(tmp_path / "guard", alert=command)
    guard.answer(message(), context(), APP)
    assert told(guard, tmp_path) == []
    for _ in range(2):
        came = time.monotonic() - guard.policy.round_seconds
        guard.answer(message(), context(), APP, ReplySlots(came, guard.policy.round_seconds))
    (call,) = told(guard, tmp_path)
    assert call["words"][-1] == LATE  # type: ignore[index]


def test_a_command_that_can_not_be_started_stops_no_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    guard = guard_at(tmp_path, alert=["/nowhere/tell"], max_epsilon=10.0)
    with pytest.raises(Refused):
        guard.answer(message(kind="query"), context(), APP)
    assert guard.answer(message(), context(), APP).charged
    assert "alert can't be sent: No such" in caplog.text


def test_a_command_that_hangs_is_not_started_a_second_time(tmp_path: Path) -> None:
    called = Alerts(["/bin/sh", "-c", "sleep 60"])
    called.call(LATE)
    called.next.clear()
    process = called.running[LATE]
    called.call(LATE)
    assert called.running[LATE] is process
    process.kill()
    process.wait(60)
    called.call(LATE)
    assert called.running[LATE] is not process
    called.running[LATE].kill()
    called.running[LATE].wait(60)


def test_a_command_must_be_a_program_with_its_path(tmp_path: Path) -> None:
    policy = site(tmp_path, PATIENTS)
    for wrong in (["tell"], ["./tell", "x"]):
        with pytest.raises(ConfigError, match="alert must be a list"):
            read_guard(guard_toml(tmp_path, alert=wrong))
    missing = replace(policy, alert=("/nowhere/tell",))
    assert any("alert must begin with" in each for each in site_check.faults_of(missing))
