"""Calls to a SuperLink are answered as Flower answers them, with and without the replacements that shorten them."""

from __future__ import annotations

import asyncio
from datetime import timedelta
from pathlib import Path

import httpx
import pytest
from flwr.common.constant import Status, SubStatus
from flwr.supercore.corestate.sql_corestate import SqlCoreState
from flwr.supercore.date import now
from flwr.supercore.state.schema.corestate_models import Task
from flwr.superlink.main import _get_middleware
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from discreet.deployment.flower_fixes import short_calls
from discreet.deployment.flower_fixes.short_calls import CONCERNS, CONTROL, FLEET, PATHS, RUNTIME, shorten_calls
from tests.deployment.link_state import LinkState

pytestmark = pytest.mark.filterwarnings(
    "ignore:No path_separator found:DeprecationWarning"
)  # Flower's settings of alembic


def post(app: Starlette, path: str, root: str = "") -> httpx.Response:
    async def call() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False, root_path=root)
        async with httpx.AsyncClient(transport=transport, base_url="http://superlink") as client:
            return await client.post(path, headers={"content-type": "application/protobuf"})

    return asyncio.run(call())


@pytest.fixture(autouse=True)
def shortened(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SqlCoreState, "_cleanup_expired_task_tokens", SqlCoreState._cleanup_expired_task_tokens)
    for layer in CONCERNS:
        monkeypatch.setattr(layer, "__call__", layer.__call__)
    shorten_calls()


def test_every_middleware_is_one_that_the_superlink_has() -> None:
    assert set(CONCERNS) <= {layer.cls for layer in _get_middleware()}


@pytest.mark.parametrize("prefix", [*PATHS, "/health", "/v1/", "/v1/controls/", "/v1/fleetwood/"])
@pytest.mark.parametrize("root", ["", "/behind"])
def test_a_middleware_that_is_passed_by_has_nothing_to_do_with_the_call(
    prefix: str, root: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[type] = []
    for layer in CONCERNS:

        async def dispatch(self: object, request: Request, call_next: object, layer: type = layer) -> object:
            asked.append(layer)
            return await call_next(request)  # type: ignore[operator]

        monkeypatch.setattr(layer, "dispatch", dispatch)
    routes = [Route("/{path:path}", lambda request: PlainTextResponse("there"), methods=["POST"])]
    middlewares = [layer for layer in _get_middleware() if layer.cls in CONCERNS]
    app = Starlette(routes=routes, middleware=middlewares)
    assert post(app, f"{prefix}thing", root).text == "there"
    passed_by = {layer for layer, concern in CONCERNS.items() if prefix in PATHS and concern != prefix and not root}
    assert set(asked) == set(CONCERNS) - passed_by


@pytest.mark.parametrize(("path", "status"), [(f"{FLEET}pull-messages", 401), (f"{CONTROL}list-runs", 503)])
def test_who_calls_is_still_asked(path: str, status: int) -> None:
    # No signature, and no way to know accounts in this application: neither call may reach its handler.
    reached: list[str] = []

    def handler(request: Request) -> PlainTextResponse:
        reached.append(request.url.path)
        return PlainTextResponse("")

    app = Starlette(routes=[Route("/{path:path}", handler, methods=["POST"])], middleware=_get_middleware())
    assert post(app, path).status_code == status
    assert reached == []
    post(app, f"{RUNTIME}get-nodes")
    assert len(reached) == 1


class Link(LinkState):
    def start(self) -> None:
        task = self.state.get_run_info(run_ids=[self.run])[0].primary_task_id
        assert self.state.claim_task(task)
        assert self.state.activate_task(task)

    def let_time_pass(self) -> None:
        with self.state.session() as session:
            session.query(Task).update({Task.active_until: now() - timedelta(seconds=1)})

    def status(self) -> tuple[str, str]:
        found = self.state.get_run_status({self.run})[self.run]
        return found.status, found.sub_status


@pytest.mark.parametrize("within", [False, True])
def test_a_run_whose_server_app_is_lost_has_failed(within: bool, tmp_path: Path) -> None:
    link = Link(tmp_path / "state.db")
    link.start()
    assert link.status() == (Status.RUNNING, "")
    link.let_time_pass()
    if within:
        with link.state.session():
            assert link.status() == (Status.FINISHED, SubStatus.FAILED)
    assert link.status() == (Status.FINISHED, SubStatus.FAILED)


def test_asking_for_a_runs_state_writes_nothing_but_within_a_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[SqlCoreState] = []
    monkeypatch.setattr(short_calls, "mark_tasks", written.append)
    link = Link(tmp_path / "state.db")
    link.start()
    written.clear()
    link.status()
    assert written == []
    with link.state.session():
        link.status()
    assert written == [link.state]
