"""The node proxy passes on what a node may call, and nothing else."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from discreet.deployment.certificates import make_secrets
from discreet.deployment.flower_home import free_port, wait_until
from discreet.deployment.gate import AT_ONCE, CALLS, CONTENT, make_node_proxy
from discreet.deployment.local_federation import START_SECONDS


class SuperLink:
    """A SuperLink behind a node proxy, which notes each call; `go` lets answers to calls with
    content leave."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.at_work, self.most = 0, 0
        self.calls: list[httpx.Request] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        self.calls.append(request)
        if request.url.path.endswith(CONTENT):
            self.at_work += 1
            self.most = max(self.most, self.at_work)
            await self.go.wait()
            self.at_work -= 1
        headers = {"content-length": str(len(body)), "x-flower": "yes"}
        return httpx.Response(202, headers=headers, stream=httpx.ByteStream(body[::-1]))

    def caller(self) -> httpx.AsyncClient:
        """A caller through a node proxy of its own."""
        behind = httpx.AsyncClient(transport=httpx.MockTransport(self), base_url="http://superlink")
        proxy = make_node_proxy("http://superlink", verify=False, largest_body=1000)

        async def app(scope: Any, receive: Any, send: Any) -> None:
            scope["state"] = {"client": behind}
            await proxy(scope, receive, send)

        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gate")


def ask(method: str, path: str, **given: Any) -> tuple[httpx.Response, list[httpx.Request]]:
    """The answer to one call, and the calls that reached the SuperLink."""
    link = SuperLink()
    link.go.set()

    async def call() -> httpx.Response:
        async with link.caller() as caller:
            return await caller.request(method, path, **given)

    return asyncio.run(call()), link.calls


def test_the_calls_of_a_node_go_through_with_body_and_signature() -> None:
    for name in CALLS:
        answer, (call,) = ask(
            "POST", f"/v1/fleet/{name}", content=b"body", headers={"flwr-signature": "abc"}
        )
        assert (answer.status_code, answer.content, answer.headers["x-flower"]) == (
            202,
            b"ydob",
            "yes",
        )
        assert (call.method, call.url.path, call.content) == ("POST", f"/v1/fleet/{name}", b"body")
        assert call.headers["flwr-signature"] == "abc"


OTHERS = (
    "/v1/control/start-run",
    "/v1/runtime/acquire-task",
    "/v1/fleet/register-node",
    "/v1/fleet//pull-messages",
    "/v1/fleet/../runtime/acquire-task",
    "/v1/fleet/pull-messages/../../control/start-run",
    "/docs",
)


@pytest.mark.parametrize("path", OTHERS)
def test_everything_else_stops_at_the_node_proxy(path: str) -> None:
    for method in ("GET", "POST", "PUT"):
        answer, calls = ask(method, path, content=b"" if method == "POST" else None)
        assert answer.status_code == 404
        assert calls == []


async def pieces() -> AsyncIterator[bytes]:
    yield b"x"


@pytest.mark.parametrize(
    ("content", "status"), [(b"x" * 1001, 413), (b"x" * 1000, 202), (pieces(), 411)]
)
def test_a_body_that_is_too_large_or_of_unknown_length_stops_at_the_node_proxy(
    content: Any, status: int
) -> None:
    answer, calls = ask("POST", "/v1/fleet/push-object", content=content)
    assert answer.status_code == status
    assert bool(calls) is (status == 202)
    assert ask("GET", "/health")[1][0].url.path == "/health"


def test_few_calls_with_content_reach_the_superlink_at_once_and_others_overtake_them() -> None:
    async def go() -> None:
        link = SuperLink()
        async with link.caller() as caller:
            paths = [f"/v1/fleet/{name}" for name in CONTENT * 3 * AT_ONCE]
            waiting = [asyncio.create_task(caller.post(path, content=b"abc")) for path in paths]
            for _ in range(200):  # every task goes as far as it can
                await asyncio.sleep(0)
            assert link.at_work == AT_ONCE
            assert (
                await caller.post("/v1/fleet/pull-messages", content=b"look")
            ).content == b"kool"
            link.go.set()
            assert {answer.content for answer in await asyncio.gather(*waiting)} == {b"cba"}
        assert (link.most, len(link.calls)) == (AT_ONCE, len(paths) + 1)

    asyncio.run(go())


def test_what_a_caller_says_of_where_it_is_does_not_reach_the_superlink() -> None:
    names = ("x-forwarded-for", "forwarded", "x-real-ip", "x-forwarded-proto")
    _, calls = ask(
        "POST", "/v1/fleet/pull-messages", content=b"", headers=dict.fromkeys(names, "203.0.113.9")
    )
    assert not {*names} & {*calls[0].headers}


@dataclass(frozen=True)
class Open:
    """A node proxy as a process, which waits a second for the head of a call."""

    port: int
    authority: Path
    log: Path

    def connected(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=START_SECONDS / 4)

    def with_tls(self) -> socket.socket:
        context = ssl.create_default_context(cafile=self.authority)
        return context.wrap_socket(self.connected(), server_hostname="127.0.0.1")


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Open]:
    folder, port = tmp_path_factory.mktemp("gate"), free_port()
    secrets = make_secrets(folder / "secrets", [])
    words = ["--upstream", "https://127.0.0.1:9", "--secrets", str(secrets), "--port", str(port)]
    code = f"from discreet.deployment import gate; gate.HEAD_SECONDS = 1.0; gate.main({words})"
    command = [sys.executable, "-c", code]
    with (
        (folder / "log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        found = Open(port, secrets / "ca.crt", folder / "log")
        wait_until(lambda: answers(found), START_SECONDS, "the node proxy answers")
        yield found
        process.terminate()


def answers(proxy: Open) -> bool:
    try:
        with proxy.with_tls() as caller:
            return bool(asked(caller, "/"))
    except OSError:
        return False


def asked(caller: socket.socket, path: str, *headers: str) -> bytes:
    caller.sendall("\r\n".join([f"GET {path} HTTP/1.1", "host: gate", *headers, "", ""]).encode())
    said = b""
    while not said.endswith(b"not here"):
        said += caller.recv(4096)
    return said


def test_a_connection_on_which_no_tls_or_no_whole_head_comes_is_ended(opened: Open) -> None:
    first, second, third = opened.connected(), opened.with_tls(), opened.with_tls()
    assert asked(third, "/").startswith(b"HTTP/1.1 404")
    third.sendall(b"GET / HTTP/1.1\r\nhost: g")
    for caller in (first, second, third):
        with caller, suppress(ConnectionError):
            assert caller.recv(4096) == b""


def test_the_log_holds_no_escapes_of_a_path_and_the_address_that_really_called(
    opened: Open,
) -> None:
    with opened.with_tls() as caller:
        asked(caller, "/no%1b%5b2Jhere", "X-Forwarded-For: 203.0.113.9")
    (line,) = [line for line in opened.log.read_text().splitlines() if "/no" in line]
    assert line == r"refused GET '/no\x1b[2Jhere' from 127.0.0.1"
