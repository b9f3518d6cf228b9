"""The gate passes on what a node may call, and nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from discreet.deployment.gate import CALLS, make_gate

Calls = list[tuple[str, str, bytes, dict[str, str]]]


async def through_the_gate(
    calls: Calls, ask: Callable[[httpx.AsyncClient], object], *, largest_body: int = 1000
) -> httpx.Response:
    """What a caller gets when the SuperLink behind the gate writes down each call."""

    async def note(request: Request) -> Response:
        calls.append((request.method, request.url.path, await request.body(), dict(request.headers)))
        return Response(b"answer", status_code=202, headers={"x-flower": "yes"})

    upstream = Starlette(routes=[Route("/{path:path}", note, methods=["GET", "POST", "PUT", "DELETE"])])
    gate = make_gate("http://superlink", verify=False, largest_body=largest_body)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(upstream), base_url="http://superlink") as behind:
        inside = _with_state(gate, behind)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(inside), base_url="http://gate") as caller:
            answer = await ask(caller)  # type: ignore[misc]
    assert isinstance(answer, httpx.Response)
    return answer


def _with_state(gate: Starlette, client: httpx.AsyncClient) -> Callable[..., object]:
    async def app(scope: dict[str, object], receive: object, send: object) -> None:
        scope["state"] = {"client": client}
        await gate(scope, receive, send)  # type: ignore[arg-type]

    return app


def ask(
    method: str, path: str, *, content: bytes | None = None, headers: dict[str, str] | None = None, size: int = 1000
):  # type: ignore[no-untyped-def]
    calls: Calls = []
    answer = asyncio.run(
        through_the_gate(
            calls, lambda caller: caller.request(method, path, content=content, headers=headers), largest_body=size
        )
    )
    return answer, calls


@pytest.mark.parametrize("name", CALLS)
def test_a_call_of_a_node_goes_through_with_body_and_signature(name: str) -> None:
    answer, calls = ask("POST", f"/v1/fleet/{name}", content=b"body", headers={"flwr-signature": "abc"})
    assert (answer.status_code, answer.content, answer.headers["x-flower"]) == (202, b"answer", "yes")
    method, path, body, headers = calls[0]
    assert (method, path, body) == ("POST", f"/v1/fleet/{name}", b"body")
    assert headers["flwr-signature"] == "abc"


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/control/register-node",
        "/v1/runtime/acquire-task",
        "/v1/fleet/register-node",
        "/v1/fleet/unregister-node",
        "/v1/fleet/../runtime/acquire-task",
        "/v1/fleet/%2e%2e/runtime/acquire-task",
        "/v1/fleet/pull-messages/../../control/start-run",
        "/v1/fleet//pull-messages",
        "/V1/FLEET/pull-messages",
        "/docs",
        "/openapi.json",
        "/",
    ],
)
def test_everything_else_stops_at_the_gate(path: str) -> None:
    for method in ("GET", "POST"):
        answer, calls = ask(method, path, content=b"" if method == "POST" else None)
        assert answer.status_code == 404
        assert calls == []


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE"])
def test_a_call_with_another_method_stops_at_the_gate(method: str) -> None:
    answer, calls = ask(method, "/v1/fleet/pull-messages")
    assert answer.status_code == 404
    assert calls == []


def test_a_body_that_is_too_large_stops_at_the_gate() -> None:
    answer, calls = ask("POST", "/v1/fleet/push-object", content=b"x" * 1001)
    assert (answer.status_code, calls) == (413, [])
    answer, calls = ask("POST", "/v1/fleet/push-object", content=b"x" * 1000)
    assert answer.status_code == 202


def test_a_body_of_unknown_length_stops_at_the_gate() -> None:
    async def pieces():  # type: ignore[no-untyped-def]
        yield b"x"

    answer, calls = ask("POST", "/v1/fleet/push-object", content=pieces())
    assert (answer.status_code, calls) == (411, [])


def test_health_is_the_superlinks() -> None:
    answer, calls = ask("GET", "/health")
    assert answer.status_code == 202
    assert calls[0][:2] == ("GET", "/health")


def test_a_superlink_that_is_away_is_something_to_try_again() -> None:
    def broken(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    async def go() -> httpx.Response:
        gate = make_gate("http://superlink", verify=False, largest_body=10)
        async with httpx.AsyncClient(transport=httpx.MockTransport(broken), base_url="http://superlink") as behind:
            inside = httpx.ASGITransport(_with_state(gate, behind))
            async with httpx.AsyncClient(transport=inside, base_url="http://gate") as caller:
                return await caller.post("/v1/fleet/pull-messages", content=b"x")

    assert asyncio.run(go()).status_code == 503
