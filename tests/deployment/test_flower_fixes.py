"""Each replacement of Flower's behaviour is made, can be switched off, and steps aside if Flower is another one."""

from __future__ import annotations

import logging
import sys

import pytest
from flwr.supercore.object_store import sql_object_store
from flwr.supercore.state.schema import linkstate_models
from flwr.superlink.servicer.control import control_handlers
from flwr.supernode import start_client_internal
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from discreet.deployment.flower_fixes import (
    NAMES,
    SWITCH,
    VERSIONS,
    Fix,
    commands,
    failed_runs,
    refused_nodes,
    small_superlink,
    supernode_pauses,
    supernode_replies,
    unread_messages,
)
from tests.conftest import REPOSITORY

MODULES = (small_superlink, unread_messages, failed_runs, supernode_replies, supernode_pauses, refused_nodes)
FIXES = {fix.name: fix for module in MODULES for fix in module.FIXES}


@pytest.fixture(autouse=True)
def flower_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    for fix in FIXES.values():
        for owner, name, _ in fix.places:
            monkeypatch.setattr(owner, name, getattr(owner, name))


def state(fix: Fix) -> list[object]:
    """What is at the places of a replacement."""
    return [getattr(owner, name) for owner, name, _ in fix.places]


@pytest.mark.parametrize("name", FIXES)
def test_it_is_made_unless_it_is_switched_off_or_flowers_source_is_another(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fix = FIXES[name]
    before = state(fix)
    monkeypatch.setenv(SWITCH, f"-{name}")
    fix.make()
    assert state(fix) == before
    monkeypatch.delenv(SWITCH)
    assert caplog.records == []
    changes = {"inspect.getsource": "def another(): ...", "importlib.metadata.version": "1.43.0"}
    for place, other in changes.items():
        with monkeypatch.context() as another, caplog.at_level(logging.WARNING):
            another.setattr(place, lambda _, other=other: other)
            fix.make()
        assert state(fix) == before
        assert f"is not what {name} is for" in caplog.text
        caplog.clear()
    fix.make()
    assert all(now != then for now, then in zip(state(fix), before, strict=True))
    assert caplog.records == []


def test_the_page_tells_of_each() -> None:
    page = (REPOSITORY / "docs" / "flower_fixes.md").read_text()
    assert all(f"## {name}\n" in page for name in NAMES)
    assert all(version in page for version in VERSIONS)
    assert {*FIXES, "warm_clients"} == {*NAMES}


MISSING = {
    "small_superlink": (sql_object_store, "SqlObjectStore"),
    "unread_messages": (linkstate_models, "MessageIns"),
    "failed_runs": (control_handlers, "_stream_logs"),
    "refused_nodes": (NodeAuthHttpInterceptor, "intercept"),
    "supernode_replies": (start_client_internal, "_insert_message"),
}


@pytest.mark.parametrize("name", MISSING)
def test_a_name_that_flower_has_lost_costs_its_replacement_and_nothing_else(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(*MISSING[name])
    monkeypatch.delitem(sys.modules, f"discreet.deployment.flower_fixes.{name}")
    commands.make(name)
    (said,) = caplog.messages
    assert f"is not what {name} is for (" in said
    assert MISSING[name][1] in said
    assert "Flower's own behaviour stays" in said
