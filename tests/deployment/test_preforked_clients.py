"""Preforked clients do what Flower's command does, and that command runs if they are not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from discreet.deployment.flower_fixes.commands import clients_command
from discreet.deployment.flower_fixes.hand_over import COMMAND, SOCKET_VARIABLE
from discreet.deployment.flower_home import wait_until
from discreet.simulation.processes import SCRATCH, carrying
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.processes

SHIM = REPOSITORY / "discreet" / "deployment" / "flower_fixes" / COMMAND
START_SECONDS = 120.0
OF_THE_APP = ("client_app", "discreet", "strategies", "server_app")


@pytest.fixture(scope="module")
def listening(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    """The number and the socket of a process that serves, started as a node does, by people who
    name no threads."""
    path = tmp_path_factory.mktemp("preforked") / "clients"
    silent = {
        name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")
    }
    with subprocess.Popen(clients_command(path), cwd=REPOSITORY, env=silent) as process:
        wait_until(path.exists, START_SECONDS, "it listens")
        yield process.pid, path
        process.kill()


def run(path: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Flower's way to start a ClientApp, with the shim first on the PATH."""
    search = os.pathsep.join(
        [str(SHIM.parent), str(folder), str(Path(sys.executable).parent), os.environ["PATH"]]
    )
    environment = {"PATH": search, SOCKET_VARIABLE: str(path)}
    return subprocess.run(
        [COMMAND, *words], capture_output=True, text=True, cwd=folder, env=environment, check=False
    )


def test_words_output_and_exit_code_are_those_of_flowers_command(
    listening: tuple[int, Path], tmp_path: Path
) -> None:
    number, path = listening
    helped, refused = (run(path, tmp_path, word) for word in ("--help", "--no-such-word"))
    assert helped.returncode == 0
    assert "Run a Flower ClientApp" in helped.stdout
    assert refused.returncode == 2
    assert "flwr-clientapp: error:" in refused.stderr
    assert len(os.listdir(f"/proc/{number}/task")) == 1  # what forks has one thread


def test_no_module_of_the_app_is_loaded_beforehand_and_all_that_it_imports_is() -> None:
    code = (
        "import sys; from discreet.deployment.flower_fixes.preforked_clients import import_libraries; "
        f"import_libraries(); print([name for name in sys.modules if name.split('.')[0] in {OF_THE_APP}]); "
        "loaded = {name.split('.')[0] for name in sys.modules}; import client_app.client_app; "
        f"print({{name.split('.')[0] for name in sys.modules}} - loaded - {{*{OF_THE_APP}}} - "
        "sys.stdlib_module_names)"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    assert ran.stdout == "[]\nset()\n"


NODE = (
    "import os, sys; from discreet.deployment.supernode import start_preforked_clients as start; "
    "start(); "
)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_clients_keep_of_examples_is_erased_when_the_supernode_ends(
    number: signal.Signals,
) -> None:
    code = f"{NODE}print(os.environ['{SOCKET_VARIABLE}'], flush=True); sys.stdin.read()"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], cwd=REPOSITORY, text=True, **pipes) as node:
        folder = Path(node.stdout.readline().strip()).parent
        (folder / "features").mkdir()
        (folder / "features" / "key.npy").write_bytes(b"as private as the examples")
        node.send_signal(number)
    wait_until(lambda: not folder.exists(), START_SECONDS, "it is erased")
    assert carrying(SCRATCH, str(folder)) == []
