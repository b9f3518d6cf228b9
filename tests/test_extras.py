"""What an extra brings is named in one line if it is missing."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from discreet.data.folder import open_table
from discreet.data.images import load_mnist
from discreet.deployment import local_federation
from discreet.settings import extras
from discreet.settings.rules import ConfigError
from tests.command import run

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without any extra."""
    monkeypatch.setattr(extras, "find_spec", lambda module: None)


@pytest.mark.usefixtures("bare")
def test_a_table_and_a_data_set_of_the_hub_name_the_extra(tmp_path: Path) -> None:
    install = r'which is not installed: pip install "discreet\[simulation\]"$'
    with pytest.raises(ConfigError, match=f"^train.csv needs pyarrow, {install}"):
        open_table(tmp_path / "train.csv", "csv")
    with pytest.raises(ConfigError, match=f"^data.name=mnist without data.path needs flwr_datasets, {install}"):
        load_mnist(None)


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(("command", "extra"), [(run, "simulation"), (local_federation.main, "deployment")])
def test_a_command_ends_with_one_line(command: object, extra: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(command)
    assert command(["rounds=1"]) == 2
    said = capsys.readouterr().err
    assert said.endswith(f'which is not installed: pip install "discreet[{extra}]"\n')
    assert said.count("\n") == 1
    assert extra in EXTRAS
