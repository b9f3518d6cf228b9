"""What `discreet new` writes, and where it refuses to. The project itself is tried in test_installed.py."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from discreet.cli.new import SETTINGS, main
from discreet.config import load_config
from discreet.tasks.datasets import load_task

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def project(tmp_path: Path) -> Path:
    assert main([str(tmp_path / "My-trial")]) == 0
    return tmp_path / "My-trial"


def test_its_settings_are_discreets_own_but_for_data_and_model(project: Path) -> None:
    ours, theirs = ((root / "conf" / "config.yaml").read_text().splitlines() for root in (ROOT, project))
    changed = [line for before, line in zip(ours, theirs, strict=True) if before != line]
    assert [line.split("#")[0].strip() for line in changed] == [
        f"{name}: {value}" for (_, name), value in SETTINGS.items()
    ]


def test_its_settings_are_taken_in_its_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    config = load_config(["experiment=quick"])
    assert (config.rounds, config.data.name, config.data.num_clients) == (2, "folder", 300)
    assert (config.model.name, config.data.partition) == ("model:build", "natural")


def test_it_has_the_folders_name_and_the_strategy_of_this_checkout(project: Path) -> None:
    assert tomllib.loads((project / "pyproject.toml").read_text())["project"]["name"] == "My-trial"
    strategy = "strategies/dp_fedavg.py"
    assert (project / strategy).read_bytes() == (ROOT / strategy).read_bytes()
    assert "outputs/" in (project / ".gitignore").read_text().splitlines()


def test_a_folder_that_holds_something_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "mine.txt").write_text("mine")
    assert main([str(folder)]) == 2
    assert capsys.readouterr().err == f"discreet: {folder} is not empty: name a folder that is not there yet\n"
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("name", ["my trial", "2nd", "a" * 33, "my_trial"])
def test_a_name_that_flower_takes_for_no_app_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(tmp_path / name)]) == 2
    assert capsys.readouterr().err.endswith(f"for Flower takes it as the app's name (got {name!r})\n")
    assert not (tmp_path / name).exists()


def test_a_folder_that_can_not_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "file")]) == 2
    assert capsys.readouterr().err.startswith(f"discreet: {tmp_path / 'file'} can't be made: ")


def test_its_sample_data_lie_in_the_ranges_that_it_gives(project: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert len(load_task("folder", path=str(project / "data")).test) > 0
    assert caplog.text == ""
