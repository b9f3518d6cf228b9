"""A SuperLink lets go of what a call brought, and its connections to the database keep little of it."""

from __future__ import annotations

import asyncio
import gc
import os
import weakref
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from flwr.app.message.arraychunk import ArrayChunk
from flwr.supercore import sql_mixin
from flwr.supercore.inflatable.inflatable_object import get_object_tree
from flwr.supercore.object_store.sql_object_store import SqlObjectStore
from flwr.superlink.main import _get_middleware
from flwr.superlink.routers.fleet.middlewares import FleetEventLogMiddleware
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from discreet.deployment.flower_fixes import small_superlink
from discreet.deployment.flower_fixes.patient_superlink import be_patient
from discreet.deployment.flower_fixes.small_superlink import be_small
from tests.deployment.link_state import LinkState

pytestmark = pytest.mark.filterwarnings(
    "ignore:No path_separator found:DeprecationWarning"
)  # Flower's settings of alembic

CALLS = 6
ENOUGH = 2**18  # bytes of contents after which garbage is collected, in these tests


class Cycle:
    """Something that is garbage as soon as it is made, and that counting references does not find."""

    def __init__(self) -> None:
        self.itself = self


class Content:
    """The content of a call."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Both replacements are made for one test, in which Python does not look for garbage by itself."""
    monkeypatch.setattr(sql_mixin, "SQLITE_PRAGMAS", sql_mixin.SQLITE_PRAGMAS)  # type: ignore[attr-defined]
    for name in ("put", "get"):
        monkeypatch.setattr(SqlObjectStore, name, getattr(SqlObjectStore, name))
    monkeypatch.setattr(small_superlink, "EVERY", ENOUGH)
    monkeypatch.setattr(small_superlink, "since_collection", [0])
    be_small()
    be_patient()
    gc.disable()
    yield
    gc.enable()


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> SqlObjectStore:
    """One for all tests: making one takes a second."""
    return LinkState(tmp_path_factory.mktemp("link") / "superlink.db").store


def known(store: SqlObjectStore, size: int) -> tuple[str, bytes]:
    """The name and the content of so many bytes that the store expects."""
    chunk = ArrayChunk(memoryview(os.urandom(size)))
    store.preregister(1, get_object_tree(chunk))
    return chunk.object_id, chunk.deflate()


@pytest.mark.parametrize(("size", "kept"), [(ENOUGH // 4, True), (ENOUGH, False)])
@pytest.mark.parametrize("call", ["put", "get"])
def test_enough_content_ends_what_earlier_calls_have_left(
    call: str, size: int, kept: bool, store: SqlObjectStore
) -> None:
    name, content = known(store, size)
    if call == "get":
        store.put(name, content)
    left = weakref.ref(Cycle())
    if call == "put":
        store.put(name, content)
    else:
        assert store.get(name) == content
    assert (left() is not None) is kept
    gc.collect()
    assert left() is None
    assert store.get(name) == content


def contents_kept(store: SqlObjectStore) -> int:
    """Of how many large calls the content is in memory when all of them have been answered."""
    name, content = known(store, ENOUGH)

    def handler(request: Request) -> PlainTextResponse:
        request.state.protobuf_request = Content()
        brought.append(weakref.ref(request.state.protobuf_request))
        store.put(name, content)
        return PlainTextResponse("")

    brought: list[weakref.ref[Content]] = []
    layers = [layer for layer in _get_middleware() if layer.cls is FleetEventLogMiddleware]
    app = Starlette(routes=[Route("/{path:path}", handler, methods=["POST"])], middleware=layers)

    async def calls() -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://superlink") as client:
            for _ in range(CALLS):
                assert (await client.post("/v1/runtime/push-object")).status_code == 200

    asyncio.run(calls())
    return sum(one() is not None for one in brought)


def test_a_call_that_was_answered_is_gone_when_the_next_one_brings_something(store: SqlObjectStore) -> None:
    assert contents_kept(store) <= 1


def test_a_connection_keeps_two_megabytes_of_the_database_and_maps_none(tmp_path: Path) -> None:
    with LinkState(tmp_path / "superlink.db").store.session() as session:
        connection = session.connection()
        found = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("cache_size", "mmap_size")]
    assert found == [-2000, 0]
