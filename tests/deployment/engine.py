"""A container engine for tests: the one that is there, or a private one that is started and ended
with the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

REPOSITORY = Path(__file__).resolve().parents[2]
OURS = (".git", ".venv", ".flwr", "__pycache__", ".*_cache", ".hypothesis")
IGNORED = shutil.ignore_patterns(*OURS, "outputs", "multirun", "wheels", "secrets", "approved")


@dataclass(frozen=True)
class Engine:
    """A caller of `docker`. `private`: started by these tests; its images are built without an
    image registry."""

    environment: Mapping[str, str]
    private: bool

    def docker(self, *words: str, folder: Path | None = None, **settings: str) -> str:
        """The output of `docker WORDS`; fails with everything that it said."""
        answer = self.try_docker(*words, folder=folder, **settings)
        if answer.returncode:
            raise AssertionError(
                f"docker {' '.join(words)}: {answer.returncode}\n{answer.stdout}\n{answer.stderr}"
            )
        return answer.stdout

    def try_docker(
        self, *words: str, folder: Path | None = None, **settings: str
    ) -> subprocess.CompletedProcess[str]:
        """`docker WORDS`, whatever comes of it."""
        environment = {**self.environment, **settings}
        return subprocess.run(
            ["docker", *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )


@contextmanager
def container_engine(folder: Path) -> Iterator[Engine]:
    """An engine with compose v2; skips where there is none and none can be started."""
    there = Engine(dict(os.environ), private=False)
    if shutil.which("docker") and not there.try_docker("info").returncode:
        if there.try_docker("compose", "version").returncode:
            pytest.skip("the container engine has no compose v2")
        yield there
        return
    scripts = Path(
        os.environ.get("DISCREET_CONTAINERS", REPOSITORY.parent / "shared" / "containers")
    )
    if not (scripts / "engine-up.sh").is_file():
        pytest.skip(
            "needs a container engine, or scripts that start one: name their folder in "
            "DISCREET_CONTAINERS"
        )
    if os.getuid() != 0:
        pytest.skip("needs a container engine: only root can start a private one")
    environment = {**os.environ, "LAB": str(folder / "engine")}
    # Two such engines on one machine share a bridge and its firewall rules: the first to end takes
    # the other's away.
    alone = FileLock(Path(tempfile.gettempdir()) / "discreet-container-engine.lock")
    with alone, _private_engine(scripts, environment, folder) as engine:
        yield engine


@contextmanager
def _private_engine(
    scripts: Path, environment: Mapping[str, str], folder: Path
) -> Iterator[Engine]:
    try:
        for name in ("engine-up.sh", "base-image.sh"):
            _call("bash", str(scripts / name), environment=environment)
        yield Engine(_sourced(folder / "engine" / "env", environment), private=True)
    finally:
        if (folder / "engine" / "env").exists():
            subprocess.run(
                ["bash", str(scripts / "engine-down.sh")],
                env=environment,
                capture_output=True,
                check=False,
            )


def _call(*command: str, environment: Mapping[str, str] | None = None) -> None:
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if answer.returncode:
        said = f"{answer.stdout[-3000:]}\n{answer.stderr[-3000:]}"
        raise AssertionError(f"{' '.join(command)}: {answer.returncode}\n{said}")


def _sourced(path: Path, environment: Mapping[str, str]) -> dict[str, str]:
    words = ["bash", "-c", '. "$1" && env -0', "bash", str(path)]
    text = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
    return dict(line.split("=", 1) for line in text.split("\0") if "=" in line)


def copy_of_the_tree(folder: Path) -> Path:
    """The repository as it is built and run from, so that a test leaves nothing in it."""
    return Path(shutil.copytree(REPOSITORY, folder, ignore=IGNORED))


def fetch_torch(engine: Engine, folder: Path) -> None:
    """Puts a CPU wheel of torch into a folder where the image build can't reach the index of CPU
    builds.

    A private engine reaches the package registry only. DISCREET_WHEELS names a folder that has the
    wheel already."""
    if kept := os.environ.get("DISCREET_WHEELS"):
        shutil.copytree(kept, folder)
    elif engine.private:
        pins = (REPOSITORY / "constraints.txt").read_text().splitlines()
        (pin,) = [line for line in pins if line.startswith("torch==")]
        _call(
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(folder),
            pin,
        )
