"""All sentences of the package stand in tests/messages.txt, so that a changed word shows in one diff.

Tests of a message look for its setting and its numbers. After a change of a sentence:
`python -m tests.test_messages` writes the file anew.
"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator

import pytest

from tests.conftest import REPOSITORY

SENTENCES = REPOSITORY / "tests" / "messages.txt"
FEWEST_WORDS = 4  # shorter texts are names, and parts of what is put together


def text_of(node: ast.expr) -> str:
    """A text in one line, with braces for what is filled in; "" for other expressions."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return " ".join(node.value.split())
    if isinstance(node, ast.JoinedStr):
        parts = [
            str(each.value) if isinstance(each, ast.Constant) else "{}" for each in node.values
        ]
        return " ".join("".join(parts).split())
    return ""


def texts_in(node: ast.AST) -> Iterator[str]:
    """The texts below a node, without those that stand alone, which are docstrings."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue
        if isinstance(child, ast.expr) and (text := text_of(child)):
            yield text
        if not isinstance(child, ast.JoinedStr):
            yield from texts_in(child)


def sentences(source: str) -> set[str]:
    """The texts of some words in a module."""
    return {text for text in texts_in(ast.parse(source)) if len(text.split()) >= FEWEST_WORDS}


def sentences_of_the_package() -> list[str]:
    paths = sorted((REPOSITORY / "discreet").rglob("*.py"))
    found = set[str]().union(*(sentences(path.read_text()) for path in paths))
    return sorted(found)


def test_each_changed_sentence_shows_in_the_diff_of_one_file() -> None:
    noted = SENTENCES.read_text().splitlines()
    changed = [*difflib.unified_diff(noted, sentences_of_the_package(), lineterm="", n=0)]
    if changed:
        pytest.fail("\n".join([*changed[2:], "To note it: python -m tests.test_messages"]))


def test_a_sentence_is_found_wherever_it_is_said_and_a_docstring_is_none() -> None:
    source = '''"""A docstring of some words."""
RULE = "a share of all clients"
def refuse(number):
    """Another docstring of some words."""
    raise ValueError(f"at least {number + 1} clients " "are to be asked")
'''
    assert sentences(source) == {
        "a share of all clients",
        "at least {} clients are to be asked",
    }


if __name__ == "__main__":
    SENTENCES.write_text("\n".join(sentences_of_the_package()) + "\n")
