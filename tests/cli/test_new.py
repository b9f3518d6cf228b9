"""What `discreet new` writes, and where it refuses to. The project itself is tried in test_installed.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from discreet.cli.new import SETTINGS
from discreet.data.datasets import load_task
from discreet.settings.compose import load_config
from tests.command import new as main

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture
def project(tmp_path: Path) -> Path:
    assert main([str(tmp_path / "My-trial")]) == 0
    return tmp_path / "My-trial"


def test_its_settings_are_discreets_own_but_for_data_and_model(
    project: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ours, theirs = ((root / "conf" / "config.yaml").read_text().splitlines() for root in (ROOT, project))
    changed = [line for before, line in zip(ours, theirs, strict=True) if before != line]
    assert [line.split("#")[0].strip() for line in changed] == [
        f"{name}: {value}" for (_, name), value in SETTINGS.items()
    ]
    monkeypatch.chdir(project)
    config = load_config(["experiment=quick"])
    assert (config.rounds, config.data.name, config.data.num_clients) == (2, "folder", 300)
    assert (config.model.name, config.data.partition) == ("model:build", "natural")
    assert len(load_task("folder", path=str(project / "data")).test) > 0
    assert caplog.text == ""  # its sample data lie in the ranges that it gives


def test_a_folder_that_holds_something_and_a_name_that_flower_takes_for_no_app_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "mine.txt").write_text("mine")
    assert main([str(tmp_path / "mine")]) == 2
    assert capsys.readouterr().err.endswith("mine is not empty: name a folder that is not there yet\n")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["mine.txt"]
    for name in ("2nd", "my_trial"):
        assert main([str(tmp_path / name)]) == 2
        assert capsys.readouterr().err.endswith(f"for Flower takes it as the app's name (got {name!r})\n")
        assert not (tmp_path / name).exists()
