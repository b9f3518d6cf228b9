"""How far a run is: the numbers of the line, and who gets to see it."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from discreet.federated.messages import Reply
from discreet.federated.progress import Progress
from discreet.federated.round import PartialSum
from discreet.federated.transport import Failure, Replies
from discreet.logs import ERASE

ROOT = Path(__file__).resolve().parent.parent.parent
WORDS = ["rounds=3", "data.num_clients=20", "training.epochs=1", "privacy.user.noise_multiplier=1", "seed=37"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    """Every look takes so many seconds."""

    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def replies(count: int) -> Iterable[Reply | Replies | Failure]:
    several = Replies(PartialSum(torch.zeros(1), 0, count - 2, 1.0, None))
    return [Reply(1, torch.zeros(1), below=True), Failure(3, "late", ""), several]


def test_the_line_counts_clients_of_every_kind_and_estimates_the_time_left() -> None:
    clock = Clock(0.0)
    progress = Progress(Terminal(), rounds=10, clock=clock)
    progress.begin(4)
    clock.now = 20.0
    assert len(list(progress.counted(replies(50), cohort=50))) == 3
    assert progress.line(50) == "round 5/10  50/50 clients  2.5 clients/s  1 min 40 s left"
    clock.now = 40.0
    list(progress.counted(replies(25), cohort=50))
    assert progress.line(50) == "round 6/10  25/50 clients  1.88 clients/s  2 min 0 s left"


def test_before_anything_is_done_the_time_left_is_unknown_and_an_empty_cohort_is_a_round() -> None:
    progress = Progress(Terminal(), rounds=4, clock=Clock(1.0))
    progress.begin(0)
    assert list(progress.counted([], cohort=5)) == []
    assert progress.line(5).endswith("? left")
    list(progress.counted([], cohort=0))
    assert progress.line(0).startswith("round 2/4  0/0 clients  0 clients/s")


def test_it_is_one_line_that_ends_empty() -> None:
    stream = Terminal()
    progress = Progress(stream, rounds=1, clock=Clock(1.0))
    progress.begin(0)
    list(progress.counted(replies(5), cohort=5))
    progress.end()
    written = stream.getvalue()
    assert "\n" not in written
    assert written.count(ERASE + "round 1/1") == 4
    assert written.endswith(ERASE)


@pytest.mark.parametrize("stream", [None, io.StringIO()])
def test_what_is_no_terminal_stays_quiet(stream: io.StringIO | None) -> None:
    progress = Progress(stream, rounds=1, clock=Clock(1.0))
    progress.begin(0)
    list(progress.counted(replies(5), cohort=5))
    progress.end()
    assert stream is None or stream.getvalue() == ""


def simulated(folder: Path, *words: str, terminal: bool) -> str:
    """What `scripts.simulate` writes to its output."""
    command = [sys.executable, "-m", "scripts.simulate", *WORDS, *words, f"output_dir={folder}"]
    if not terminal:
        return subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, cwd=ROOT, stdout=theirs) as process:
        os.close(theirs)
        written = b""
        try:
            while piece := os.read(ours, 4096):
                written += piece
        except OSError:  # Linux says so when the last writer has gone
            pass
        os.close(ours)
    assert process.returncode == 0
    return written.decode()


def test_a_simulation_on_a_terminal_shows_its_progress_below_the_log(tmp_path: Path) -> None:
    written = simulated(tmp_path / "run", terminal=True)
    assert f"{ERASE}round 1/3" in written
    assert "clients/s" in written
    # Each log line takes the place of the line, and nothing is left of it at the end.
    assert all(line.startswith(("\r\x1b[K", "\x1b[K")) for line in written.splitlines() if "accuracy" in line)
    assert "clients/s" not in written.splitlines()[-1]


@pytest.mark.parametrize(("terminal", "log_format"), [(False, "text"), (True, "json")])
def test_a_simulation_elsewhere_writes_no_control_characters(terminal: bool, log_format: str, tmp_path: Path) -> None:
    written = simulated(tmp_path / "run", f"operations.log_format={log_format}", terminal=terminal)
    assert "round 3/3" in written
    assert "\x1b" not in written
    assert "clients/s" not in written
