"""Each replacement of Flower's behaviour is made, can be switched off, and is not made in another Flower."""

from __future__ import annotations

import logging

import pytest

from discreet.deployment.flower_fixes import superlink_fixes, supernode_fixes
from discreet.deployment.flower_fixes.commands import NAMES, SWITCH, VERSIONS, make
from tests.conftest import REPOSITORY

FIXES = superlink_fixes.FIXES | supernode_fixes.FIXES


@pytest.fixture(autouse=True)
def flower_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    for places in FIXES.values():
        for owner, name, _ in places:
            monkeypatch.setattr(owner, name, getattr(owner, name))


def made() -> set[str]:
    """The replacements that are in their places after the commands of SuperLink and SuperNode have made theirs."""
    make("superlink_fixes")
    make("supernode_fixes")
    return {name for name, places in FIXES.items() if all(getattr(*place[:2]) is place[2] for place in places)}


def test_all_are_made_but_those_that_are_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "-database -failed_runs -warm_clients")
    assert made() == {*FIXES} - {"database", "failed_runs"}
    monkeypatch.setenv(SWITCH, "-databas")
    with pytest.raises(ValueError, match=r"takes -all, or some of -database .* \(got -databas\)"):
        made()


def test_in_another_flower_none_is_made_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("importlib.metadata.version", lambda _: "1.43.0")
    with caplog.at_level(logging.WARNING):
        assert made() == set()
    said, _ = caplog.messages  # of either
    assert "flwr 1.43.0 is not 1.41.0 or 1.42.0: Flower's own behaviour stays" in said


def test_the_page_tells_of_each() -> None:
    page = (REPOSITORY / "docs" / "flower_fixes.md").read_text()
    assert all(f"## {name}\n" in page for name in NAMES)
    assert all(version in page for version in VERSIONS)
    assert {*FIXES, "warm_clients"} == {*NAMES}
