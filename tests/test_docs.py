"""What docs/privacy.md says is tested, is."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
NAMED = re.compile(r"(tests/[\w/]+\.py)::(\w+)")


def named_tests(text: str) -> list[tuple[str, str]]:
    return NAMED.findall(text)


@cache
def defined_in(path: Path) -> set[str]:
    return {node.name for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)}


def test_a_test_that_is_named_exists() -> None:
    named = named_tests((DOCS / "privacy.md").read_text())
    assert [(file, name) for file, name in named if name not in defined_in(ROOT / file)] == []


def test_every_guarantee_names_its_tests() -> None:
    sections = re.split(r"^## ", (DOCS / "privacy.md").read_text(), flags=re.MULTILINE)
    of_clients = ("Example level", "Local", "What a client can do")
    for title in ("User level", "Clients who take turns", "Another Flower app", *of_clients, "The account", "Noise"):
        (section,) = (text for text in sections if text.startswith(title))
        assert len(named_tests(section)) >= 5, title


def test_every_page_is_in_the_nav_of_the_site() -> None:
    named = set(re.findall(r"[\w/]+\.md\b", (ROOT / "mkdocs.yml").read_text()))
    pages = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    assert pages - named == set(), "add these pages to the nav in mkdocs.yml"
    assert named - pages == set(), "the nav in mkdocs.yml names pages that are not there"
