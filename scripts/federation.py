"""`flwr run . --stream` on a SuperLink of its own: what `scripts/run` starts.

The SuperLink listens on a free port of the loopback interface, with a FLWR_HOME of its own (`.flwr/`), and ends with
the run: nothing that another project left running can answer instead.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from discreet.config import ConfigError, RunConfig, load_config

REPOSITORY = Path(__file__).resolve().parent.parent
MOST_NODES = 200  # a simulation with more clients has several on each node
START_SECONDS = 60

USAGE = """usage: scripts/run [OVERRIDE ...]

Trains the default experiment over Flower's simulation, and shows accuracy and epsilon at every round.
Each OVERRIDE is a Hydra override of conf/config.yaml, for instance:

  scripts/run rounds=5 privacy.user.noise_multiplier=0.8
  scripts/run experiment=silos
"""


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def flower_environment(home: Path) -> dict[str, str]:
    """The environment of Flower's processes: own home, no installation at run time, no calling home."""
    return os.environ | {
        "FLWR_HOME": str(home),
        "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # without it Ray warns of its own future
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }


@contextmanager
def simulation_superlink(home: Path, *, folder: Path) -> Iterator[str]:
    """A SuperLink for simulations, started in `folder` and ended afterwards; gives its address.

    Raises:
      RuntimeError: it did not start; the message names its log.
    """
    home.mkdir(parents=True, exist_ok=True)
    port, log = free_port(), home / "superlink.log"
    address = f"127.0.0.1:{port}"
    command = ["flower-superlink", "--insecure", "--simulation", "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=folder, env=flower_environment(home), stdout=output, stderr=output, start_new_session=True
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _healthy(address):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the SuperLink did not start; see {log}")
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()


def _healthy(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/health", timeout=1) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def nodes_of(config: RunConfig) -> int:
    """How many nodes a simulation of a configuration has; with more clients than that, each is several."""
    return min(config.data.num_clients, MOST_NODES)


def flwr_run(config: RunConfig, overrides: Sequence[str], *, home: Path, folder: Path) -> int:
    """Runs the app of this repository on a SuperLink of its own; streams its log. Gives `flwr`'s exit code."""
    nodes = nodes_of(config)
    with simulation_superlink(home, folder=folder) as address, tempfile.TemporaryDirectory() as scratch:
        connection = (
            f'[superlink]\ndefault = "discreet"\n\n[superlink.discreet]\naddress = "{address}"\ninsecure = true\n'
        )
        (home / "config.toml").write_text(connection)
        # A file, not an argument: overrides may hold quotes and brackets. A JSON string is a TOML string.
        run_config = Path(scratch) / "run.toml"
        run_config.write_text(f"overrides = {json.dumps(' '.join(overrides))}\n")
        command = ["flwr", "run", str(REPOSITORY), "discreet", "--stream", "--run-config", str(run_config)]
        command += ["--federation-config", f"num-supernodes={nodes} client-resources-num-cpus=1"]
        return subprocess.run(command, cwd=folder, env=flower_environment(home), check=False).returncode


def main(words: Sequence[str]) -> int:
    """Checks the overrides and runs. Exit code 0: the run folder is complete; 2: a setting is wrong."""
    if any(word in ("-h", "--help") for word in words):
        print(USAGE)
        return 0
    try:
        config = load_config(words)
    except ConfigError as error:
        print(f"discreet: {error}", file=sys.stderr)
        return 2
    stamp = datetime.now(UTC).strftime("%Y-%m-%d_%H-%M-%S")
    output = Path(config.output_dir or f"outputs/{stamp}").expanduser().resolve()
    overrides = [*words, f"output_dir='{output}'"]
    code = flwr_run(config, overrides, home=REPOSITORY / ".flwr", folder=Path.cwd())
    return code or (0 if (output / "privacy.json").exists() else 1)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
