"""What the tests share. No verdict depends on what was drawn today, nor on the clock.

Hypothesis tries the same examples each time; `--hypothesis-profile=search` looks for others.
"""

from __future__ import annotations

import copy
import gc
import io
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import torch
from hypothesis import settings
from omegaconf import DictConfig, ListConfig, OmegaConf

from discreet.ledger.rollback_guard import STATE_VARIABLE
from discreet.run_files import resuming
from discreet.settings import compose

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile("same")

REPOSITORY = Path(__file__).resolve().parent.parent


def pytest_collection_finish() -> None:
    """What the imports have made stays until the end: the garbage collector need not look at it
    again and again, which takes a twentieth of the time."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What this machine knows of its ledgers is kept apart from what the tests make it know."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STATE_VARIABLE, str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def _composed_once() -> Iterator[None]:
    """Hydra takes a third of the time of a small run: what it makes of the same words and the same
    files is kept. Runs that differ in their folder alone have the same words."""
    composed = compose.composed
    kept: dict[object, tuple[DictConfig, bool]] = {}

    def once(words: Sequence[str], *, conf: Path | None = None) -> tuple[DictConfig, bool]:
        folders = [word for word in words if re.fullmatch(r"output_dir=/[\w/.-]+", word)]
        if len(folders) > 1:
            return composed(words, conf=conf)
        others = tuple(word for word in words if word not in folders)
        found = compose.conf_for(words, conf or compose.conf_folder())
        files = tuple((path, path.stat().st_mtime_ns) for path in sorted(found.rglob("*.yaml")))
        if (others, files) not in kept:
            kept[others, files] = composed(others, conf=conf)
        settings, is_sweep = copy.deepcopy(kept[others, files])
        if folders:
            settings["output_dir"] = folders[0].removeprefix("output_dir=")
        return settings, is_sweep

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "composed", once)
        patch.setattr(resuming, "composed", once)
        yield


@pytest.fixture(scope="session", autouse=True)
def _files_of_conf_read_once() -> Iterator[None]:
    """Hydra reads the files of conf/ for each composition, in pure Python: a third of its time.
    What a text holds is kept."""
    load = OmegaConf.load
    kept: dict[str, ListConfig | DictConfig] = {}

    def once(file: str | Path | IO[Any]) -> ListConfig | DictConfig:
        if isinstance(file, str | Path):
            return load(file)
        text = file.read()
        if text not in kept:
            kept[text] = load(io.StringIO(text))
        return copy.deepcopy(kept[text])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "load", once)
        yield


@pytest.fixture
def quick_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for the replies of a grid takes no time, so the machine's pace is no failure."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += max(seconds, 0.001)  # as on every real clock, time goes on

    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    monkeypatch.setattr("discreet.flower.grid_transport.time", clock)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with MNIST, Shakespeare and hospitals, which the project does not ship; skips
    where it is missing."""
    folder = Path(os.environ.get("DISCREET_TEST_DATA", REPOSITORY.parent / "shared" / "data"))
    if not folder.is_dir():
        pytest.skip("needs MNIST in IDX files: name their parent folder in DISCREET_TEST_DATA")
    return folder


@pytest.fixture(scope="session")
def fetched_texts() -> Path:
    """The folder with MiniLM and graded tweets, which the project does not ship; skips where it is
    missing."""
    folder = Path(os.environ.get("DISCREET_TEST_TEXTS", "~/.cache/discreet")).expanduser()
    if not ((folder / "minilm").is_dir() and (folder / "tweets").is_dir()):
        pytest.skip(
            f"needs minilm and tweets in {folder}: python examples/text/fetch.py fetches them"
        )
    return folder


@pytest.fixture(autouse=True)
def _the_same_first_weights() -> None:
    """Layers that a test makes start alike, whichever tests ran before it."""
    torch.manual_seed(52813)


@pytest.fixture(autouse=True)
def _the_log_as_it_is_at_the_start() -> None:
    """A command that a test calls sends the log elsewhere: the next test finds it as Python makes
    it."""
    for name in ("discreet", "discreet.client"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
        logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def _task_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Flower is loaded: what its Message takes from the process that it runs in."""
    if flower := sys.modules.get("flwr.supercore.task_identity"):
        for name in ("_run_id", "_node_id", "_task_id"):
            monkeypatch.setattr(flower.TaskIdentity, name, 1)
