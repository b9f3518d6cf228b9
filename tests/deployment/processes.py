"""A federation of real processes on loopback: SuperLink, gate, SuperNodes, with TLS and node authentication on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from discreet.runs import RunFolder
from discreet.status import read_status
from scripts.certificates import make_authority, make_node, make_server
from scripts.federation import flower_environment, free_port
from scripts.healthy import healthy
from scripts.superlink import CONNECTION, write_connection

REPOSITORY = Path(__file__).resolve().parents[2]
START_SECONDS, RUN_SECONDS = 90.0, 300.0


def wait_until(holds: Callable[[], object], seconds: float, what: str) -> None:
    """Returns as soon as `holds()` is true; fails, naming `what`, when it is not by the deadline."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {seconds:g} s: {what}")
        time.sleep(0.1)


def make_secrets(folder: Path, nodes: Iterable[str]) -> Path:
    """An authority, a server certificate for loopback, and keys of nodes."""
    make_authority(folder)
    make_server(folder, ["localhost", "127.0.0.1"])
    for name in nodes:
        make_node(folder, name)
    return folder


@dataclass
class Federation:
    """Starts processes, knows their logs, and ends every one of them.

    Attributes:
      folder: everything that is written lies in it.
      secrets: what `make_secrets` made; the keys under `nodes/` are registered.
    """

    folder: Path
    secrets: Path
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    port: int = field(default_factory=free_port)
    gate_port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        self.home = self.folder / "home"
        self.environment = flower_environment(self.home) | {
            "OMP_NUM_THREADS": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
            "PYTHONPATH": str(REPOSITORY),
        }
        self.authority = self.secrets / "ca.crt"

    def start(self, name: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        """Starts a process with a log of its own, which a later one of the same name goes on with."""
        with self.log(name).open("ab") as log:
            process = subprocess.Popen(
                command, cwd=self.folder, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
        self.processes[name] = process
        self.started.append(process)
        return process

    def log(self, name: str) -> Path:
        """Where a process writes."""
        return self.folder / f"{name}.log"

    def says(self, name: str) -> str:
        """What a process has written so far."""
        return self.log(name).read_text(errors="replace")

    def start_superlink(self) -> None:
        """Starts the SuperLink and the gate where they do not run, and waits until both answer."""
        state = self.folder / "state"
        words = ["--secrets", str(self.secrets), "--state", str(state), "--port", str(self.port)]
        ready = self.folder / "ready"
        ready.unlink(missing_ok=True)
        self.start("superlink", [sys.executable, "-m", "scripts.superlink", *words, "--ready", str(ready)])
        if "gate" not in self.processes:
            upstream = f"https://127.0.0.1:{self.port}"
            words = ["--upstream", upstream, "--secrets", str(self.secrets), "--port", str(self.gate_port)]
            self.start("gate", [sys.executable, "-m", "scripts.gate", *words])
        wait_until(ready.exists, START_SECONDS, "the SuperLink knows the nodes' keys")
        url = f"https://127.0.0.1:{self.gate_port}/health"
        wait_until(lambda: healthy(url, authority=self.authority), START_SECONDS, "the gate answers")
        write_connection(self.home, address=f"127.0.0.1:{self.port}", authority=self.authority)

    def start_node(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        """Starts a SuperNode with the key and the ledger of its name; `words` come last and win."""
        command = [
            *(sys.executable, "-m", "scripts.supernode", "--superlink", f"127.0.0.1:{self.gate_port}"),
            *("--port", str(free_port()), "--authority", str(self.authority)),
            *("--key", str(self.secrets / "nodes" / f"{name}.key"), "--ledger", str(self.folder / f"{name}.db")),
            *words,
        ]
        return self.start(name, command)

    def wait_for_nodes(self, names: Iterable[str]) -> None:
        """Until each of these SuperNodes has been let in."""
        for name in names:
            wait_until(lambda name=name: "SuperNode ID" in self.says(name), START_SECONDS, f"{name} is connected")

    def run(self, name: str, *overrides: str) -> RunFolder:
        """Starts `flwr run` with an output folder of that name, and does not wait for it."""
        output = self.folder / name
        words = " ".join([*overrides, f"output_dir='{output}'"])
        settings = self.folder / f"{name}.toml"
        settings.write_text(f"overrides = {json.dumps(words)}\n")
        command = ["flwr", "run", str(REPOSITORY), CONNECTION, "--stream", "--run-config", str(settings)]
        self.start(f"run-{name}", command)
        return RunFolder(output)

    def finish(self, folder: RunFolder, *, seconds: float = RUN_SECONDS) -> None:
        """Until `flwr run` has seen the end of the run, and the run says so too."""
        process = self.processes[f"run-{folder.path.name}"]
        wait_until(lambda: process.poll() is not None, seconds, f"flwr run of {folder.path.name} is over")
        wait_until(lambda: state_of(folder) not in ("", "running"), START_SECONDS, f"{folder.path.name} has ended")

    def kill(self, name: str) -> None:
        """kill -9 for a process and everything that it has started itself; what that started ends when it notices."""
        process = self.processes.pop(name)
        children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
        for pid in (process.pid, *children):
            _signal(pid, signal.SIGKILL)
        process.wait()

    def end(self, name: str) -> None:
        """SIGTERM, and waits for the end."""
        process = self.processes.pop(name)
        process.terminate()
        wait_until(lambda: process.poll() is not None, START_SECONDS, f"{name} has ended")

    def stop(self) -> None:
        """Ends every process of this federation, whoever started it."""
        for process in self.started:
            process.terminate()
        for number in (signal.SIGTERM, signal.SIGKILL):
            deadline = time.monotonic() + 10
            while (left := self.leftovers()) and time.monotonic() < deadline:
                for pid in left:
                    _signal(pid, number)
                time.sleep(0.2)
        for process in self.started:
            process.wait(timeout=10)

    def leftovers(self) -> list[int]:
        """Processes whose FLWR_HOME is this federation's: Flower starts some in sessions of their own."""
        wanted = f"FLWR_HOME={self.home}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:
                continue
        return [pid for pid in found if pid != os.getpid()]


def state_of(folder: RunFolder) -> str:
    """The state of a run by its status file; empty before there is one."""
    status = read_status(folder)
    return status.state if status else ""


def _signal(pid: int, number: int) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
