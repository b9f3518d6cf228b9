"""Which conf/ a command composes, and which app it starts: in a project, in a checkout, and with a wheel elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from discreet.settings.compose import load_config
from discreet.settings.places import app_folder, conf_folder, own_files
from discreet.settings.rules import ConfigError

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose conf/ differs from Discreet's own in the number of rounds."""
    (tmp_path / "project" / "conf" / "experiment").mkdir(parents=True)
    (tmp_path / "project" / "pyproject.toml").write_text("[tool.discreet]\n")
    text = (ROOT / "conf" / "config.yaml").read_text()
    (tmp_path / "project" / "conf" / "config.yaml").write_text(text.replace("rounds: 30 ", "rounds: 17 "))
    return tmp_path / "project"


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """The package as a wheel installs it, as far as places are concerned."""
    (tmp_path / "site-packages" / "discreet" / "app" / "conf").mkdir(parents=True)
    return tmp_path / "site-packages" / "discreet"


def test_a_project_has_its_own_conf_wherever_discreet_lies(
    project: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    assert load_config().rounds == 17
    assert conf_folder(installed) == project / "conf"
    assert app_folder(installed) == app_folder() == project


def test_elsewhere_conf_is_that_of_the_checkout_or_what_the_wheel_brought(
    tmp_path: Path, installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert (conf_folder(), app_folder()) == (ROOT / "conf", ROOT)
    assert conf_folder(installed) == installed / "app" / "conf"
    assert own_files(installed) == installed / "app"
    with pytest.raises(ConfigError, match=r"is no project: go to a checkout of Discreet, or to a folder that"):
        app_folder(installed)


def test_in_a_project_an_experiment_of_discreet_is_what_it_is_elsewhere_unless_there_is_an_own_one(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["silos", "organisations", "laplace_local_sweep"]
    elsewhere = [load_config([f"experiment={name}"], of_sweep=True) for name in names]
    monkeypatch.chdir(project)
    assert [load_config([f"experiment={name}"], of_sweep=True) for name in names] == elsewhere
    assert load_config(["experiment=silos"], conf=project / "conf").rounds == 30  # as a ServerApp composes
    (project / "conf" / "experiment" / "silos.yaml").write_text("# @package _global_\ndata: {num_clients: 11}\n")
    own = load_config(["experiment=silos"])
    assert (own.rounds, own.data.num_clients) == (17, 11)
