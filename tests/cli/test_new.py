"""What `discreet new` writes, and where it refuses to. The project itself is tried in test_installed.py."""

from __future__ import annotations

import ast
import sys
import tomllib
from pathlib import Path

import pytest

from discreet.cli.new import SETTINGS
from discreet.data.datasets import load_task
from discreet.settings.compose import load_config
from tests.command import new as main
from tests.test_readme import commands

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


def test_it_has_the_folders_name_and_the_strategy_of_this_checkout(project: Path) -> None:
    assert tomllib.loads((project / "pyproject.toml").read_text())["project"]["name"] == "My-trial"
    for name in ("strategies/dp_fedavg.py", "constraints.txt"):  # the versions that were tested
        assert (project / name).read_bytes() == (ROOT / name).read_bytes()
    assert "outputs/" in (project / ".gitignore").read_text().splitlines()


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


def installs(page: Path) -> list[list[str]]:
    """The words of each `pip install` of a page."""
    words = [line for line in commands(page) if "install" in line]
    return [line[line.index("install") + 1 :] for line in words]


def test_its_page_installs_what_its_tests_import(project: Path) -> None:
    tree = ast.parse((project / "tests" / "test_project.py").read_text())
    wanted = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    given = {word for line in installs(project / "README.md") for word in line}
    assert wanted - sys.stdlib_module_names - {"discreet"} == {"pytest", "torch"} <= given
    assert "${DISCREET_WHEEL}[simulation]" in given
    assert "pip install discreet" not in (project / "README.md").read_text()  # it is on no index


@pytest.mark.parametrize("page", ["README.md", "examples/project/README.md"])
def test_pytorch_is_installed_first_for_a_cpu_or_a_gpu_and_all_with_the_versions_that_were_tested(page: str) -> None:
    cpu, gpu, *rest = installs(ROOT / page)
    tested = ["--constraint", "constraints.txt"]
    assert (cpu, gpu) == ([*tested, "torch", "--extra-index-url", "$TORCH_INDEX"], [*tested, "torch"])
    assert rest
    assert all("--constraint constraints.txt" in " ".join(line) for line in rest)
