"""The fixtures that tests of several folders share."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import pickle
import re
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
import torch
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.rdp import rdp_privacy_accountant
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from discreet.layers.draws import seed_draws
from discreet.ledger.rollback_guard import STATE_VARIABLE
from discreet.reporting import model_export
from discreet.run_files import compose, resuming
from discreet.settings.rules import ConfigError
from discreet.simulation import cohort
from tests.conftest import REPOSITORY

PLAIN = re.compile(r"(?!hydra\b)\w+(\.\w+)*=.*")  # the word of a value, and of nothing else
Compose = Callable[..., tuple[DictConfig, bool]]


@pytest.fixture(scope="session", autouse=True)
def _own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What this machine knows of its ledgers is kept apart from what the tests make it know."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(STATE_VARIABLE, str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session", autouse=True)
def composed_by_hydra() -> Iterator[Compose]:
    """Composition as users have it. Hydra takes a third of the time of a small run: in tests what
    it makes of an experiment is kept, and only the values of a call are put into it, by Hydra's own
    code. Words that are no plain NAME=VALUE, or that it refuses, are composed as a whole."""
    composed = compose.composed
    kept: dict[object, bytes] = {}  # pickled: it is copied in a sixth of the time of deepcopy

    def once(words: Sequence[str], *, conf: Path | None = None) -> tuple[DictConfig, bool]:
        if not all(map(PLAIN.fullmatch, words)):
            return composed(words, conf=conf)
        found = compose.conf_for(words, conf or compose.conf_folder())
        chosen = tuple(word for word in words if (found / word.partition("=")[0]).is_dir())
        values = [word for word in words if word not in chosen]
        files = tuple((path, path.stat().st_mtime_ns) for path in sorted(found.rglob("*.yaml")))
        try:
            if (chosen, files) not in kept:
                kept[chosen, files] = pickle.dumps(composed(chosen, conf=conf))
            settings, is_sweep = pickle.loads(kept[chosen, files])
            put_into(settings, values)
        except (ConfigError, HydraException, OmegaConfBaseException):
            return composed(words, conf=conf)  # for what it says
        return settings, is_sweep

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "composed", once)
        patch.setattr(resuming, "composed", once)
        yield composed


@pytest.fixture(scope="session", autouse=True)
def _files_of_conf_read_once() -> Iterator[None]:
    """Hydra reads the files of conf/ for each composition, in pure Python: a third of its time.
    What a text holds is kept."""
    load = OmegaConf.load
    kept: dict[str, bytes] = {}

    def once(file: str | Path | IO[Any]) -> ListConfig | DictConfig:
        if isinstance(file, str | Path):
            return load(file)
        text = file.read()
        if text not in kept:
            kept[text] = pickle.dumps(load(io.StringIO(text)))
        found: ListConfig | DictConfig = pickle.loads(kept[text])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "load", once)
        yield


@pytest.fixture(scope="session", autouse=True)
def _numbers_of_dp_accounting_once() -> Iterator[None]:
    """An accountant of dp_accounting computes the loss distribution of a mechanism anew for each
    sum, which takes up to a second, and the same binomial coefficients for each Renyi divergence,
    which take a third of its time. They never change: those of equal arguments are kept."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("from_gaussian_mechanism", "from_laplace_mechanism"):
            once = lru_cache(maxsize=32)(getattr(privacy_loss_distribution, name))
            patch.setattr(privacy_loss_distribution, name, once)
        binomial = lru_cache(maxsize=2**17)(rdp_privacy_accountant._log_comb)
        patch.setattr(rdp_privacy_accountant, "_log_comb", binomial)
        yield


@pytest.fixture(scope="session", autouse=True)
def written_by_omegaconf() -> Iterator[Callable[[Any], str]]:
    """Settings as a text, as users have it. OmegaConf writes it in pure Python, which takes longer
    than a round of a small run: in tests the text of each group is kept, for most are alike."""
    to_yaml = OmegaConf.to_yaml
    kept: dict[str, str] = {}

    def once(settings: Any, **options: bool) -> str:
        if type(settings) is not dict or options:
            return to_yaml(settings, **options)
        groups = [{name: values} for name, values in settings.items()]
        for group in groups:
            if repr(group) not in kept:
                kept[repr(group)] = to_yaml(group)
        return "".join(kept[repr(group)] for group in groups)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "to_yaml", once)
        yield to_yaml


def put_into(settings: DictConfig, words: Sequence[str]) -> None:
    """Puts the values of words NAME=VALUE into composed settings, as Hydra does last."""
    given = OverridesParser.create().parse_overrides([*map(compose.quoted, words)])
    if any(each.is_sweep_override() for each in given):
        raise HydraException("a list of values is not for one run")
    OmegaConf.set_struct(settings, True)
    ConfigLoaderImpl._apply_overrides_to_config(given, settings)
    OmegaConf.set_struct(settings, False)


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
    seed_draws(52813, torch.device("cuda" if torch.cuda.is_initialized() else "cpu"))


@pytest.fixture
def no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports without the program of the model, which takes most of the time, for tests of what
    stands beside it."""
    monkeypatch.setattr(model_export, "_save_program", lambda _, path: path.write_bytes(b"net"))
    monkeypatch.setattr(model_export, "_run_example", lambda _: "done\n")


@pytest.fixture
def example_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exports whose example runs in this process: another one would first load PyTorch, for some
    seconds."""

    def run_here(folder: Path) -> str:
        before, said = {*sys.modules}, io.StringIO()
        monkeypatch.syspath_prepend(folder)
        quiet = warnings.catch_warnings(action="ignore")  # as in a process of its own
        with quiet, contextlib.chdir(folder), contextlib.redirect_stdout(said):
            runpy.run_path("example.py", run_name="__main__")
        for path in folder.glob("*.py"):  # another export has files of the same names
            if path.stem not in before:
                sys.modules.pop(path.stem, None)
        return said.getvalue()

    monkeypatch.setattr(model_export, "_run_example", run_here)


@pytest.fixture
def with_workers() -> None:
    """Runs have workers, as users' runs have: for tests of what depends on them."""


@pytest.fixture(autouse=True)
def _without_workers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """In other tests a small run trains in one process: to fork this large one for each core takes
    longer than the run."""
    if "with_workers" not in request.fixturenames and not request.node.get_closest_marker("slow"):
        monkeypatch.setattr(cohort, "_workers_here", lambda engine: None)


@pytest.fixture(autouse=True)
def _the_log_as_it_is_at_the_start() -> None:
    """A command that a test calls sends the log elsewhere: the next test finds it as Python makes
    it."""
    for name in ("discreet", "discreet.client"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [], True
        if logger.level:  # setting it, even to what it is, empties what each logger remembers
            logger.setLevel(logging.NOTSET)


@pytest.fixture(autouse=True)
def _task_identity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Flower is loaded: what its Message takes from the process that it runs in."""
    if flower := sys.modules.get("flwr.supercore.task_identity"):
        for name in ("_run_id", "_node_id", "_task_id"):
            monkeypatch.setattr(flower.TaskIdentity, name, 1)
