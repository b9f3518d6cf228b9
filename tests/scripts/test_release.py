"""What a release needs: one version, metadata that an index takes, a short changelog, and pages
that can be read."""

from __future__ import annotations

import itertools
import re
import tomllib
from pathlib import Path

import yaml
from trove_classifiers import classifiers

import discreet
from hatch_build import PAGES, RELATIVE, with_addresses
from tests.conftest import REPOSITORY

PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
README = (REPOSITORY / "README.md").read_text()
CHANGELOG = (REPOSITORY / "CHANGELOG.md").read_text()


def test_the_version_is_the_same_everywhere() -> None:
    cited = yaml.safe_load((REPOSITORY / "CITATION.cff").read_text())["version"]
    assert PROJECT["version"] == discreet.__version__ == cited
    assert f"## {discreet.__version__}" in CHANGELOG


def test_every_classifier_is_one_that_an_index_knows() -> None:
    assert set(PROJECT["classifiers"]) <= classifiers


def test_the_readme_of_an_index_links_to_files_that_there_are() -> None:
    paths = [path.split("#")[0] for _, _, path in RELATIVE.findall(README)]
    assert len(paths) > 20
    assert [path for path in paths if not (REPOSITORY / path).exists()] == []
    assert all(
        (REPOSITORY / path.removeprefix("blob/main/")).exists()
        for path in PAGES.values()
        if "/" in path
    )
    assert not RELATIVE.search(with_addresses(README, "https://forge.example/discreet"))
    assert with_addresses("![b](docs/b.svg)", "https://forge.example/x") == (
        "![b](https://forge.example/x/raw/main/docs/b.svg)"
    )


def test_the_changelog_has_at_most_120_lines() -> None:
    assert len(CHANGELOG.splitlines()) <= 120


def test_a_list_keeps_its_items_apart() -> None:
    # An item that begins within the line before it, or a table's row without its end, shows as
    # broken text.
    for path in (REPOSITORY / "docs").rglob("*.md"):
        lines = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL).splitlines()
        items = [line for line in lines if re.search(r"[.:!?] - \S", line)]
        rows = [line for line in lines if line.startswith("|") and not line.rstrip().endswith("|")]
        assert (items, rows) == ([], []), Path(path).name


def test_a_list_and_a_table_begin_after_an_empty_line() -> None:
    # Without it, Python-Markdown shows them as a part of the paragraph before.
    begun = re.compile(r"(- |\d+\. |\|)")
    broken = []
    for path in (REPOSITORY / "docs").rglob("*.md"):
        text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        for before, line in itertools.pairwise(text.splitlines()):
            if begun.match(line) and before and not begun.match(before) and before[0] != " ":
                broken.append((path.name, line))
    assert broken == []
