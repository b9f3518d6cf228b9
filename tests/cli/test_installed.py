"""The wheel, installed, and a new project: what lies on the top level, and what the command does
without a checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from discreet.cli.new import SETTINGS
from discreet.data.datasets import load_task
from discreet.run_files.compose import load_asked, load_config
from discreet.simulation.in_process import simulate
from tests.command import new
from tests.tables.made_tables import make_project, write_table

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = (
    "rounds=1",
    "data.num_clients=10",
    "model.name=logistic_regression",
    "training.epochs=1",
    "seed=4211",
)
Command = Callable[..., subprocess.CompletedProcess[str]]
# Several commands in one process: its start takes as long as most of them.
IN_TURN = """
import json, sys
from discreet.cli.main import main
sys.exit(max(main(words) for words in json.loads(sys.argv[1])))
"""


def run(
    *line: object, folder: Path, limit: float = 550, **more: str
) -> subprocess.CompletedProcess[str]:
    """A command that sees nothing of this checkout."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more
    words = [str(word) for word in line]
    return subprocess.run(
        words,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this checkout, built without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    built = run(
        sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, folder=ROOT
    )
    assert built.returncode == 0, built.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, which sees the other packages of this one but not this
    checkout."""
    folder = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", "--without-pip", folder, folder=folder)
    install = (
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
        "--disable-pip-version-check",
        wheel,
    )
    installed = run(
        sys.executable, "-m", "pip", "--python", folder / "bin" / "python", *install, folder=folder
    )
    assert installed.returncode == 0, installed.stderr
    # A path that is named in a .pth file: its own .pth files, and with them the editable install,
    # are not read.
    (site_of(folder) / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for script in (
        *Path(sys.executable).parent.glob("flwr*"),
        *Path(sys.executable).parent.glob("flower*"),
    ):
        _, _, code = script.read_text().partition("\n")
        (folder / "bin" / script.name).write_text(f"#!{folder / 'bin' / 'python'}\n{code}")
        (folder / "bin" / script.name).chmod(0o755)
    return folder


def site_of(environment: Path) -> Path:
    return next(environment.glob("lib/python*/site-packages"))


@pytest.fixture
def discreet(environment: Path, tmp_path: Path) -> Command:
    """The installed command, in an empty folder."""
    (tmp_path / "empty").mkdir()
    return lambda *words, folder=tmp_path / "empty": run(
        environment / "bin" / "discreet", *words, folder=folder
    )


@pytest.fixture
def in_turn(environment: Path, tmp_path: Path) -> Command:
    """Installed commands, one after the other in one process. Its folder is not on the path, as
    with the command itself."""
    (tmp_path / "beside").mkdir()
    python = environment / "bin" / "python"

    def commands(
        *lines: Sequence[object], folder: Path = tmp_path / "beside"
    ) -> subprocess.CompletedProcess[str]:
        words = json.dumps([[str(word) for word in line] for line in lines])
        return run(python, "-P", "-c", IN_TURN, words, folder=folder)

    return commands


def test_the_wheel_puts_one_package_on_the_top_level(environment: Path) -> None:
    names = {path.name for path in site_of(environment).iterdir()} - {"others.pth"}
    assert {name for name in names if not name.endswith(".dist-info")} == {"discreet"}
    assert len(names) == 2
    said = run(
        environment / "bin" / "python",
        "-c",
        "import discreet; print(discreet.__file__)",
        folder=environment,
    )
    assert said.stdout == f"{site_of(environment) / 'discreet' / '__init__.py'}\n"


def test_what_concerns_runs_works_in_an_empty_folder(in_turn: Command, tmp_path: Path) -> None:
    simulate(*load_asked([*SMALL, f"output_dir={tmp_path / 'made'}"]))
    made = tmp_path / "made"
    asked = ("user", "--population", 3383, "--cohort", 120, "--rounds", 100, "--noise", 1.2)
    of_run = (("status",), ("report",), ("ledger", "verify"), ("predict",))
    done = in_turn(*((*verb, made) for verb in of_run), ("calibrate", *asked))
    assert (done.returncode, done.stderr) == (0, "")
    assert (made / "report.html").exists()
    assert (made / "predictions.csv").exists()


@pytest.fixture(scope="module")
def project(environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `discreet new` makes."""
    folder = tmp_path_factory.mktemp("new") / "my-trial"
    made = run(environment / "bin" / "discreet", "new", folder, folder=folder.parent)
    assert (made.returncode, made.stderr) == (0, "")
    return folder


def test_a_new_project_trains_and_is_reported_on(project: Path, in_turn: Command) -> None:
    trains = ("simulate", "experiment=quick", "output_dir=outputs/first")
    done = in_turn(trains, ("report", "outputs/first"), folder=project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "round 2/2" in done.stdout
    assert (project / "outputs" / "first" / "report.html").exists()


def test_a_table_leads_to_an_exported_model_by_the_wheel_alone(
    discreet: Command, in_turn: Command, tmp_path: Path
) -> None:
    table = write_table(tmp_path / "hospital.csv", 40)
    folder = tmp_path / "my-ward"
    assert discreet("new", folder, "--table", table).returncode == 0
    make_project(folder / "data", people=40)
    assert (folder / "conf" / "experiment" / "hospitals_secure.yaml").is_file()
    words = ("experiment=table", "data.num_clients=40", "rounds=2", "output_dir=outputs/first")
    exports = ("export", "outputs/first", "exported")
    done = in_turn(("simulate", *words), exports, folder=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {"README.md", "classifier.py", "encoding.py", "model.pt2"} <= {
        path.name for path in (folder / "exported").iterdir()
    }


@pytest.mark.slow
def test_a_new_projects_own_tests_pass(project: Path, environment: Path) -> None:
    done = run(
        environment / "bin" / "python",
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        folder=project,
    )
    assert done.returncode == 0, done.stdout
    assert "3 passed" in done.stdout


def test_the_bundle_of_a_new_project_holds_its_own_files_and_no_data(
    project: Path, environment: Path, tmp_path: Path
) -> None:
    words = ("build", "--app", project)
    built = run(
        environment / "bin" / "flwr", *words, folder=tmp_path, FLWR_HOME=str(tmp_path / "home")
    )
    assert built.returncode == 0, built.stdout + built.stderr
    with zipfile.ZipFile(next(tmp_path.glob("*.fab"))) as bundle:
        names = {name for name in bundle.namelist() if not name.startswith(".info")}
    code = {
        "client_app.py",
        "server_app.py",
        "model.py",
        "strategies/__init__.py",
        "strategies/dp_fedavg.py",
    }
    assert names == code | {
        "LICENSE",
        "pyproject.toml",
        "conf/config.yaml",
        "conf/experiment/quick.yaml",
    }


@pytest.mark.slow
def test_a_new_project_runs_on_flowers_simulation_and_is_tuned(
    project: Path, discreet: Command
) -> None:
    done = discreet("run", "experiment=quick", "output_dir=outputs/flower", folder=project)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "round 2/2" in done.stdout
    words = (
        "experiment=quick",
        "privacy.user.clip.norm=0.1,0.3",
        "--mean",
        "2",
        "--output",
        "outputs/tuned",
    )
    tuned = discreet("tune", *words, folder=project)
    assert tuned.returncode == 0, tuned.stdout + tuned.stderr


@pytest.mark.parametrize(
    "words", [("run",), ("simulate", "rounds=1"), ("tune", "rounds=1,2"), ("benchmark", "ledger")]
)
def test_what_needs_a_project_says_so_in_one_line(
    words: tuple[str, ...], discreet: Command, tmp_path: Path
) -> None:
    done = discreet(*words)
    where = "change to a checkout of Discreet, or to a folder that `discreet new FOLDER` made"
    said = f"discreet: {tmp_path / 'empty'} is not a project: {where}\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    assert new([str(tmp_path / "My-trial")]) == 0
    return tmp_path / "My-trial"


def test_its_settings_are_discreets_own_but_for_data_and_model(
    written: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = (
        (root / "conf" / "config.yaml").read_text().splitlines() for root in (ROOT, written)
    )
    changed = [line for before, line in zip(ours, theirs, strict=True) if before != line]
    assert [line.split("#")[0].strip() for line in changed] == [
        f"{name}: {value}" for (_, name), value in SETTINGS.items()
    ]
    monkeypatch.chdir(written)
    config = load_config(["experiment=quick"])
    assert (config.rounds, config.data.name, config.data.num_clients) == (2, "folder", 300)
    assert (config.model.name, config.data.partition) == ("model:build", "natural")
    assert len(load_task("folder", path=str(written / "data")).test) > 0
    assert caplog.text == ""  # its sample data lie in the ranges that it gives


def test_a_folder_that_is_not_empty_and_an_invalid_app_name_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.txt").write_text("mine")
    assert new([str(tmp_path / "mine")]) == 2
    assert capsys.readouterr().err.endswith(
        "mine is not empty: name a folder that is not there yet\n"
    )
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["mine.txt"]
    for name in ("2nd", "my_trial"):
        assert new([str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.endswith(
            f"for Flower takes it as the app's name (got {name!r})\n"
        )
        assert not (tmp_path / name).exists()
