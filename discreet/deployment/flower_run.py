"""`flwr run . --stream`, for `discreet run` and `scripts/run`, on a new SuperLink that ends with
the run, so that a left-over one can't answer instead. It listens on the loopback interface, like
Ray, which has a token too."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from discreet.deployment import flower_home
from discreet.deployment.flower_fixes.commands import command as superlink_command
from discreet.deployment.healthy import healthy
from discreet.deployment.interruption import override, resumable
from discreet.deployment.run_watch import RunWatch, follow
from discreet.logs import log_to
from discreet.run_files.opening import check_output
from discreet.run_files.resuming import asked_settings
from discreet.run_files.run_folder import OVER, RunFolder, RunStatus, read_status, state_of
from discreet.run_files.run_ledgers import check_ledgers
from discreet.server.resolve import resolve
from discreet.settings.rules import require_extra
from discreet.simulation.processes import RunLostError, ray_environment, scratch_folder

MOST_NODES = 200  # a simulation with more clients has several on each node
START_SECONDS = 120


@contextmanager
def simulation_superlink(folder: Path) -> Iterator[tuple[str, Path, subprocess.Popen[bytes]]]:
    """A SuperLink for simulations, started in `folder`; yields its address, its FLWR_HOME and its
    process. All processes that it started end with the block, or with this process, however that
    ends. Raises RunLostError if it does not start."""
    port = flower_home.free_port()
    command = superlink_command(
        "superlink", "--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)
    )
    with (
        scratch_folder() as home,
        _started(command, home / "superlink.log", folder=folder) as process,
    ):
        url = f"http://127.0.0.1:{port}/health"
        with suppress(TimeoutError):
            flower_home.wait_until(
                lambda: process.poll() is not None or healthy(url, authority=None),
                START_SECONDS,
                "it answers",
            )
        if process.poll() is not None or not healthy(url, authority=None):
            lines = (home / "superlink.log").read_text(errors="replace").strip().splitlines()
            raise RunLostError(": ".join(["the SuperLink did not start", *lines[-1:]]))
        yield f"127.0.0.1:{port}", home, process


@contextmanager
def _started(
    command: Sequence[str], log: Path, *, folder: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """A Flower process that ends with the block. FLWR_HOME is the folder of its log."""
    environment = flower_home.flower_environment(log.parent) | ray_environment(log.parent)
    process = flower_home.start(command, log, folder=folder, environment=environment)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def exit_code(run: RunFolder, before: RunStatus | None) -> int:
    """The exit code after `flwr run` has ended: 0 if the run is complete, and was not `before`.
    Raises RunLostError if its files say that it is still running."""
    if state_of(run) == "running":
        raise RunLostError("flwr run has ended before the run")
    if state_of(run) in OVER and read_status(run) != before:
        return 0
    return 1


def run_app(words: Sequence[str], *, program: str) -> int:
    """Checks Hydra overrides, and runs the app of `app_folder()`. Exit code 0: the run folder is
    complete. `program` is the command to run it again.

    Raises:
      ConfigError, LedgerError: a setting is wrong, or a ledger of the resumed run.
    """
    log_to(sys.stderr)
    require_extra("ray", why="Flower's simulation")
    config, call = asked_settings(words)
    run = check_output(call)
    plan, _ = resolve(config, resumed=call.resume)
    if call.resume:
        check_ledgers(run, plan, simulated=True)
    print(
        f"discreet: starting Flower and Ray takes up to a minute; the run folder is {run.path}",
        file=sys.stderr,
    )
    before = read_status(run)
    folder = Path.cwd()
    nodes = min(config.data.num_clients, MOST_NODES)
    with resumable(run, *program.split()):
        with simulation_superlink(folder) as (address, home, superlink):
            flower_home.write_connection(home, address=address, authority=None)
            command = flower_home.flwr_run_command(
                home / "run.toml", [*words, override("output_dir", run.path)]
            )
            command += [
                "--federation-config",
                f"num-supernodes={nodes} client-resources-num-cpus=1",
            ]
            with _started(command, home / "run.log", folder=folder) as process:
                follow(process, home / "run.log", RunWatch(run, superlink))
        return exit_code(run, before)
