"""Every refusal that a user can meet has its sentence in docs/guide/refusals.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from discreet.federated.strategy_settings import REFUSED

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "guide" / "refusals.md"
ANY = "…"  # what differs: on the page and in the messages as they are collected
ERRORS = {
    *("ConfigError", "FolderError", "LedgerError", "Refused", "BudgetSpentError", "BudgetSpent", "BatchError"),
    *("MalformedMessage", "MessagesTooLarge", "NodeError", "CertificateError", "OtherCodeError", "RunLostError"),
    *("MissingExtra", "NotImplementedError"),
}
# A ValueError reaches a user from these; elsewhere it is a mistake of the program, or was said by a setting before.
VALUE_ERRORS = (
    *("discreet/central/", "discreet/cli/", "discreet/client/policy.py", "discreet/client/local_privacy.py"),
    *("discreet/privacy/per_example.py", "discreet/privacy/rules/", "discreet/tasks/datasets.py"),
    "discreet/federated/round.py",
    *("discreet/tasks/examples.py", "discreet/tasks/images.py", "discreet/tasks/model", "discreet/tasks/partition.py"),
    *(
        "discreet/tasks/heart.py",
        "discreet/tasks/text.py",
        "discreet/training/group_norm.py",
        "discreet/training/losses.py",
        "discreet/training/named_losses.py",
    ),
    "discreet/deployment/compose_nodes.py",
)
NOT_FOR_A_USER = ("a part must have", "expected_cohort must be")  # of round.py: a program's mistakes
FOLDERS = ("discreet", "strategies", "client_app", "server_app", "scripts")


def template(node: ast.expr) -> str:
    """A message with ANY for what is put in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else ANY for part in node.values)
    if isinstance(node, ast.BinOp):
        return template(node.left) + template(node.right)
    return ANY


def messages(source: str, *, value_errors: bool) -> Iterator[str]:
    """What a source file raises of the errors that a user meets; what merely passes another message on is left out."""
    wanted = ERRORS | ({"ValueError"} if value_errors else set())
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
            name = node.exc.func.id if isinstance(node.exc.func, ast.Name) else ""
            said = template(node.exc.args[0]).replace("`", "")
            if name in wanted and re.search(r"\w", said) and said != f"{ANY} must be {ANY}":
                yield said


def collected() -> dict[str, str]:
    """Every message, with the file that says it. What is made of two parts is put together."""
    found = {f"{name} must be {rule}": "discreet/federated/strategy_settings.py" for name, rule in REFUSED.items()}
    for path in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        name = str(path.relative_to(ROOT))
        for said in messages(path.read_text(), value_errors=name.startswith(VALUE_ERRORS)):
            found |= {} if said.startswith(NOT_FOR_A_USER) else {said: name}
    return found


def rows(page: str) -> list[tuple[str, str]]:
    """The beginning of a message, and what the page says of it."""
    return re.findall(r"^\| `([^`]+)` \| (.+) \|$", page, flags=re.MULTILINE)


def begins_with(message: str, beginning: str) -> bool:
    return re.match(".*".join(map(re.escape, beginning.split(ANY))), message) is not None


FOUND = collected()
BEGINNINGS = [beginning for beginning, _ in rows(PAGE.read_text())]


@pytest.mark.parametrize("message", [pytest.param(said, id=f"{name}: {said[:60]}") for said, name in FOUND.items()])
def test_a_refusal_has_its_sentence(message: str) -> None:
    assert any(begins_with(message, beginning) for beginning in BEGINNINGS), message


@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_a_sentence_is_of_a_refusal_that_there_is(beginning: str) -> None:
    assert any(begins_with(message, beginning) for message in FOUND)


def test_a_row_says_more_than_any_message() -> None:
    # A beginning such as "… must" would let every message pass.
    assert [beginning for beginning in BEGINNINGS if len(re.sub(r"\W", "", beginning)) < 3] == []


def test_a_refusal_without_a_sentence_is_found() -> None:
    (said,) = messages('raise ConfigError(f"the moon is {phase}: wait")', value_errors=False)
    assert said == "the moon is …: wait"
    assert not any(begins_with(said, beginning) for beginning in BEGINNINGS)
