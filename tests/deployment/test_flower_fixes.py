"""Each replacement of Flower's behaviour is made, can be switched off, and steps aside if Flower is another one."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from flwr.server.superlink.linkstate.sql_linkstate import SqlLinkState
from flwr.supercore import sql_mixin
from flwr.supercore.object_store import sql_object_store
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.supercore.state.schema import linkstate_models
from flwr.superlink.servicer.control import control_handlers
from flwr.supernode import start_client_internal
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor
from flwr.supernode.runtime import run_clientapp

from discreet.deployment.flower_fixes import (
    commands,
    failed_runs,
    patient_superlink,
    patient_supernode,
    refused_nodes,
    small_superlink,
)
from discreet.deployment.flower_fixes.commands import NAMES, SWITCH, VERSIONS, switched_off
from discreet.deployment.flower_fixes.unread_messages import forget_unread_messages

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Fix:
    make: Callable[[], object]
    state: Callable[[], object]


FIXES = {
    "database_patience": Fix(patient_superlink.be_patient, lambda: dict(sql_mixin.SQLITE_PRAGMAS)["busy_timeout"]),
    "unread_messages": Fix(forget_unread_messages, lambda: (SqlLinkState.delete_messages, SqlLinkState.start_session)),
    "content_garbage": Fix(small_superlink.be_small, lambda: (SqlObjectStore.put, SqlObjectStore.get)),
    "database_memory": Fix(patient_superlink.be_patient, lambda: dict(sql_mixin.SQLITE_PRAGMAS)["cache_size"]),
    "supernode_replies": Fix(patient_supernode.be_patient, lambda: start_client_internal._push_messages),
    "supernode_pauses": Fix(patient_supernode.be_patient, lambda: start_client_internal.__dict__["time"]),
    "failed_runs": Fix(failed_runs.say_how_runs_fail, lambda: control_handlers._stream_logs),
    "refused_nodes": Fix(refused_nodes.say_why, lambda: NodeAuthHttpInterceptor.intercept),
}


@pytest.fixture(autouse=True)
def flower_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", sql_mixin.SQLITE_PRAGMAS)  # type: ignore[attr-defined]
    for name in ("_push_messages", "time"):
        monkeypatch.setattr(start_client_internal, name, getattr(start_client_internal, name))
    for name in ("delete_messages", "start_session"):
        monkeypatch.setattr(SqlLinkState, name, getattr(SqlLinkState, name))
    for name in ("put", "get"):
        monkeypatch.setattr(SqlObjectStore, name, getattr(SqlObjectStore, name))
    monkeypatch.setattr(control_handlers, "_stream_logs", control_handlers._stream_logs)
    monkeypatch.setattr(NodeAuthHttpInterceptor, "intercept", NodeAuthHttpInterceptor.intercept)


@pytest.mark.parametrize("name", FIXES)
def test_it_is_made_unless_it_is_switched_off(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    # The shorter pauses wrap whatever sends replies: without them Flower's own function is there again.
    monkeypatch.setenv(SWITCH, f"-{name}" if name != "supernode_replies" else "-supernode_replies -supernode_pauses")
    before = FIXES[name].state()
    FIXES[name].make()
    assert FIXES[name].state() == before
    monkeypatch.delenv(SWITCH)
    FIXES[name].make()
    assert FIXES[name].state() != before
    assert caplog.records == []


@pytest.mark.parametrize("name", FIXES)
@pytest.mark.parametrize("version", ["1.43.0", None])
def test_it_steps_aside_with_a_warning_if_version_or_source_differ(
    name: str, version: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if version:
        monkeypatch.setattr("importlib.metadata.version", lambda _: version)
    else:
        monkeypatch.setattr("inspect.getsource", lambda _: "def another(): ...")
        monkeypatch.setattr(patient_superlink, "REPLACED", ((("busy_timeout", "1"),),))
    before = FIXES[name].state()
    with caplog.at_level(logging.WARNING):
        FIXES[name].make()
    assert FIXES[name].state() == before
    assert any(name in record.getMessage() for record in caplog.records)


MISSING = {
    "patient_superlink.be_patient": (sql_mixin, "_set_sqlite_pragmas"),
    "small_superlink.be_small": (sql_object_store, "SqlObjectStore"),
    "unread_messages.forget_unread_messages": (linkstate_models, "MessageIns"),
    "failed_runs.say_how_runs_fail": (control_handlers, "_stream_logs"),
    "refused_nodes.say_why": (NodeAuthHttpInterceptor, "intercept"),
    "patient_supernode.be_patient": (start_client_internal, "_insert_message"),
    "warm_clients.main": (run_clientapp, "run_clientapp"),
}


@pytest.mark.parametrize("replacement", MISSING)
def test_a_name_that_flower_has_lost_costs_its_replacement_and_nothing_else(
    replacement: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module, name = replacement.split(".")[0], MISSING[replacement][1]
    monkeypatch.delattr(*MISSING[replacement])
    monkeypatch.delitem(sys.modules, f"{commands.__package__}.{module}")
    commands.make(replacement)
    (said,) = caplog.messages
    assert f"is not what {module} is for (" in said
    assert name in said
    assert "Flower's own behaviour stays" in said


def test_a_word_that_is_no_replacement_is_refused() -> None:
    with pytest.raises(ValueError, match=f"{SWITCH} takes -all or some of .*got warm_clients"):
        switched_off("warm_clients")


def test_the_page_tells_of_each_and_names_the_versions() -> None:
    page = (ROOT / "docs" / "flower_fixes.md").read_text()
    assert all(f"## {name}\n" in page for name in NAMES)
    assert all(version in page for version in VERSIONS)
