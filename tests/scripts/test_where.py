"""docs/where.md is right: what it says to touch is enough, in a copy of Discreet."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

PAGE = REPOSITORY / "docs" / "where.md"
ROWS = {
    what: sorted(re.findall(r"`([^`]+)`", files))
    for what, files in re.findall(r"^\| (an? [^|]+?) \| ([^|]+) \|", PAGE.read_text(), re.M)
}
SIMULATED = """
from discreet import simulate
simulate({words}, "rounds=1", "seed=31091", "data.num_clients=20", "output_dir=run",
         "privacy.user.noise_multiplier=2")
"""
METRIC = """    "hello": ((CLASSES,), lambda _: _scalar("hello", 1.0, _rights)),
"""
OWN_METRIC = """def right(outputs, targets):
    return outputs.argmax(1) == targets
"""
VERB = '''"""Says hello."""

def command() -> None:
    print("hello")
'''


def put(folder: Path, name: str, text: str, *, after: str = "") -> None:
    """Writes a new file, or puts the text behind a line that is there once."""
    path = folder / name
    if after:
        before = path.read_text()
        assert before.count(after) == 1
        text = before.replace(after, after + text)
    path.write_text(text)


def experiment(folder: Path) -> str:
    put(folder, "conf/experiment/hello.yaml", "# @package _global_\n# Shows.\nrounds: 77\n")
    return (
        "from discreet.run_files.compose import load_config\n"
        "assert load_config(['experiment=hello']).rounds == 77"
    )


def setting(folder: Path) -> str:
    epochs = "    epochs: rules.Count = 5\n"
    put(folder, "discreet/settings/training.py", "    hello: rules.Count = 3\n", after=epochs)
    put(folder, "conf/config.yaml", "  hello: 3  # a number\n", after="in each round\n")
    return (
        "from discreet.run_files.compose import load_config\n"
        "assert load_config(['training.hello=4']).training.hello == 4\n"
        "assert load_config([]).training.hello == 3"
    )


def verb(folder: Path) -> str:
    put(folder, "discreet/cli/hello.py", VERB)
    table = "VERBS = {\n"
    put(folder, "discreet/cli/verbs.py", '    "hello": Verb("says hello"),\n', after=table)
    return "from discreet.cli.main import main\nassert main(['hello']) == 0"


def metric(folder: Path) -> str:
    table = "_METRICS: Mapping[str, tuple[Sequence[str], Callable[[TaskShape], AnswerPart]]] = {\n"
    put(folder, "discreet/queries/metrics.py", METRIC, after=table)
    put(folder, "discreet/settings/data.py", '"hello", ', after="METRICS = (")
    private = "'evaluation.kind=private', 'evaluation.every=1', 'evaluation.metrics=[hello]'"
    return SIMULATED.format(words=private) + (
        "from discreet.run_files.run_folder import RunFolder\n"
        "from pathlib import Path\n"
        "assert 'hello' in RunFolder(Path('run')).read_metrics()[-1]"
    )


def own_metric(folder: Path) -> str:
    put(folder, "hello.py", OWN_METRIC)
    asked = "'evaluation.metrics=[hello:right]'"
    private = f"'evaluation.kind=private', 'evaluation.every=1', {asked}"
    return SIMULATED.format(words=private) + (
        "from discreet.run_files.run_folder import RunFolder\n"
        "from pathlib import Path\n"
        "assert 'hello:right' in RunFolder(Path('run')).read_metrics()[-1]"
    )


def mechanism(folder: Path) -> str:
    signs = (REPOSITORY / "tests" / "mechanisms" / "signs.py").read_text()
    put(folder, "hello.py", signs.replace("class Signs", "class Hello"))
    return SIMULATED.format(
        words="'privacy.user.mechanism=hello:Hello', 'privacy.user.clip.norm=1'"
    )


def optimizer(folder: Path) -> str:
    nesterov = (REPOSITORY / "tests" / "planning" / "nesterov.py").read_text()
    put(folder, "hello.py", nesterov.replace("class Nesterov", "class Hello"))
    return SIMULATED.format(words="'server.optimizer=hello:Hello'")


ADDITIONS = {
    "an experiment": experiment,
    "a setting": setting,
    "a verb": verb,
    "a metric": metric,
    "a metric of your own": own_metric,
    "a mechanism of your own": mechanism,
    "a server optimizer of your own": optimizer,
}


def texts(folder: Path) -> dict[str, str]:
    paths = [path for path in folder.rglob("*") if path.suffix in (".py", ".yaml")]
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


@pytest.fixture(scope="module")
def copied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copies") / "copy"
    folder.mkdir()
    for name in ("discreet", "conf", "client_app", "server_app", "strategies"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / name, folder / name, ignore=ignored)
    shutil.copy(REPOSITORY / "pyproject.toml", folder)
    return folder


def test_the_page_has_a_row_for_each_addition() -> None:
    assert [*ROWS] == [*ADDITIONS]


@pytest.mark.processes
@pytest.mark.parametrize("what", ADDITIONS)
def test_what_the_page_says_to_touch_is_enough(what: str, copied: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(copied, folder)
    before = texts(folder)
    check = ADDITIONS[what](folder)
    changed = [name for name, text in texts(folder).items() if before.get(name) != text]
    assert sorted(changed) == ROWS[what]
    alone = os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", check], cwd=folder, env=alone, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
