"""What tests ask that end a run early: which of its processes live, and what its files say."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import termios
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from discreet.deployment.flower_home import wait_until
from discreet.ledger.durable_ledger import DurableLedger
from discreet.run_files.run_folder import RunFolder, read_status
from discreet.simulation.processes import carrying, child_processes
from tests.conftest import REPOSITORY
from tests.deployment.ends import RUN_SECONDS

MARK = "DISCREET_TEST_MARK"
SMALL = (
    "data.num_clients=20",
    "model.name=logistic_regression",
    "training.epochs=1",
    "privacy.user.noise_multiplier=0.1",  # with more, a long run diverges and ends by itself
)
LONG = "rounds=5000"
# as /proc/net writes addresses
LOOPBACK = {
    "0100007F",
    "0" * 16 + "FFFF00000100007F",
    "0" * 24 + "01000000",
}
# Ray's client tries for minutes if it is refused, so a stranger asks first.
STRANGER = """
import sys
from pathlib import Path
import ray
from ray._raylet import GcsClient

GcsClient(address=sys.argv[1])
ray.init(sys.argv[1], log_to_driver=False)
ray.get(ray.remote(lambda path: Path(path).touch()).remote(sys.argv[2]))
"""


def start(
    mark: str, *words: str, verb: str = "simulate", terminal: int | None = None
) -> subprocess.Popen[str]:
    """A command of discreet with its output in pipes, or at a terminal that is its own."""

    def as_at_a_terminal() -> None:
        default_signals()
        if terminal is not None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    return subprocess.Popen(
        [sys.executable, "-m", "discreet", verb, *words],
        cwd=REPOSITORY,
        env=os.environ | {MARK: mark, "OMP_NUM_THREADS": "1"},
        stdin=terminal,
        stdout=subprocess.PIPE if terminal is None else terminal,
        stderr=subprocess.PIPE if terminal is None else terminal,
        text=True,
        start_new_session=True,
        preexec_fn=as_at_a_terminal,
    )


def after_rounds(folder: RunFolder, process: subprocess.Popen[str], rounds: int = 2) -> None:
    """Waits until a run has done so many rounds, and goes on."""
    wait_until(
        lambda: len(folder.read_metrics()) >= rounds or process.poll() is not None,
        RUN_SECONDS,
        "rounds",
    )
    assert process.poll() is None


def marked(mark: str, *, program: str = "") -> list[int]:
    """The living processes of a mark, or those of them that run a program."""
    return sorted({*carrying(MARK, mark)} & {*child_processes(0, program.encode())})


def listening(pids: Iterable[int]) -> set[tuple[str, int]]:
    """The addresses, as /proc/net writes them, and the ports that processes listen on."""
    opened = set()
    for pid in pids:
        with suppress(OSError):  # it has ended in the meantime
            opened |= {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [
        row.split()
        for name in ("tcp", "tcp6")
        for row in Path(f"/proc/net/{name}").read_text().splitlines()[1:]
    ]
    ends = [row[1].split(":") for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in opened]
    return {(host, int(port, 16)) for host, port in ends}


def intrude(address: str, file: Path) -> str:
    """What a process says that knows the address of a cluster, and nothing else, and has it make a
    file."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    words = [sys.executable, "-c", STRANGER, address, str(file)]
    return subprocess.run(
        words,
        env=environment,
        cwd=file.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    ).stderr


def default_signals() -> None:
    """As at a terminal, also where the tests themselves run in the background."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def check_interrupted(folder: RunFolder, reason: str) -> int:
    """The last whole round of a run whose files say what they should after an interruption."""
    status, checkpoint = read_status(folder), folder.load_checkpoint()
    assert (status.state, status.reason) == ("interrupted", reason)
    ledger = DurableLedger(folder.ledger_path)
    assert ledger.verify() == []
    assert ledger.spent("user").num_releases - checkpoint.round in (0, 1)
    return checkpoint.round
