"""The node proxy, the only endpoint for nodes of other organisations: `python -m
discreet.deployment.gate`.

A SuperLink serves everything on one port: the calls of nodes, but also starting runs, registering
nodes and taking over a run's ServerApp, all without authentication. The node proxy stands in front
with the server's certificate and passes on the calls of a registered node, and nothing else. The
SuperLink still authenticates the caller by the signature of each call.

It reads a whole call before it passes it on, and a whole answer before it returns it, in an unnamed
file if it is large. So a SuperLink does not wait for a node's connection, and holds only a few
calls with content at a time. TLS, the head of each call and its body have deadlines, so that idle
connections do not use up its file descriptors."""

from __future__ import annotations

import argparse
import asyncio
import logging
import resource
import ssl
import sys
from collections.abc import AsyncIterable, AsyncIterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    ExitStack,
    aclosing,
    asynccontextmanager,
    nullcontext,
    suppress,
)
from functools import partial
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any

try:
    import httpx
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route
    from uvicorn.protocols.http.auto import AutoHTTPProtocol
except ModuleNotFoundError as error:
    from discreet.settings.extras import not_installed

    raise SystemExit(f"discreet: {not_installed(str(error.name), 'the node proxy')}") from None

from discreet.logs import log_to

logger = logging.getLogger("discreet.gate")

# Not register-node or unregister-node: a person on the server's side registers a node's key.
CONTENT = ("push-object", "pull-object")
CALLS = (
    "activate-node",
    "deactivate-node",
    "send-node-heartbeat",
    "pull-messages",
    "push-messages",
    "get-run",
    "get-fab",
    "confirm-message-received",
    *CONTENT,
)
AT_ONCE = 4  # most calls with content that are passed on at a time: a SuperLink is one process
EVERY_METHOD = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "host"}
)
# Headers in which a caller states its address. A server that trusts the node proxy would believe
# it.
FORWARDED = frozenset(
    {"forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip"}
)
# deadlines: for TLS and the head of a call; for a body, to which the time at `SLOWEST` is added
HEAD_SECONDS = 10.0
BODY_SECONDS = 30.0
SLOWEST = 2**14  # bytes a second
MOST_FILES = 2**16
LARGEST_BODY = 2**28  # bytes of one call
LARGE = PIECE = 2**16  # bytes
TIMEOUT = httpx.Timeout(60.0, connect=5.0)
Held = SpooledTemporaryFile[bytes]


def make_node_proxy(
    upstream: str, *, verify: ssl.SSLContext | bool, largest_body: int
) -> Starlette:
    """The node proxy of the SuperLink `upstream` as an ASGI application. `verify`: the check of its
    certificate. A call of more than `largest_body` bytes is refused with 413, a call without a
    length with 411."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[dict[str, httpx.AsyncClient]]:
        # uvicorn starts to listen only now, and has no setting for TLS's deadline of 60 s.
        loop = asyncio.get_running_loop()
        loop.__dict__["create_server"] = partial(
            loop.create_server, ssl_handshake_timeout=HEAD_SECONDS
        )
        async with httpx.AsyncClient(base_url=upstream, verify=verify, timeout=TIMEOUT) as client:
            yield {"client": client}

    places = asyncio.Semaphore(AT_ONCE)
    routes = []
    for name in CALLS:
        call = partial(
            _pass_on, largest_body=largest_body, places=places if name in CONTENT else nullcontext()
        )
        routes.append(Route(f"/v1/fleet/{name}", call, methods=["POST"]))
    routes.append(
        Route("/health", partial(_pass_on, largest_body=0, places=nullcontext()), methods=["GET"])
    )
    routes.append(Route("/{path:path}", _refuse, methods=EVERY_METHOD))
    return Starlette(routes=routes, lifespan=lifespan)


async def _pass_on(
    request: Request, *, largest_body: int, places: AbstractAsyncContextManager[None]
) -> Response:
    length = request.headers.get("content-length", "0" if request.method == "GET" else "")
    if not length.isdigit():
        return PlainTextResponse("a call needs its length", status_code=411)
    if int(length) > largest_body:
        logger.warning("refused a call of %s bytes from %s", length, _caller(request))
        return PlainTextResponse(f"a call has at most {largest_body} bytes", status_code=413)
    try:
        with Held(LARGE) as body:
            sent = await _fill(body, request.stream(), slowest=SLOWEST)
            async with places:
                if await request.is_disconnected():  # a node waits 30 s, then retries
                    raise ClientDisconnect
                return await _answer(request, body, sent)
    except ClientDisconnect:
        return PlainTextResponse("the caller has gone", status_code=400)
    except TimeoutError:
        return PlainTextResponse(
            "the call came too slowly", status_code=408, headers={"connection": "close"}
        )
    # After 503 a node retries; the SuperLink may be restarting.
    except httpx.TransportError as error:
        logger.warning("the SuperLink can't be reached: %s", error)
        return PlainTextResponse("the SuperLink can't be reached", status_code=503)
    except OSError as error:
        logger.error("no room for a call of %s bytes, see TMPDIR: %s", length, error)
        return PlainTextResponse("the node proxy has no room for this call", status_code=503)


async def _answer(request: Request, body: Held, sent: int) -> Response:
    """The SuperLink's complete answer to a body of `sent` bytes."""
    client: httpx.AsyncClient = request.state.client
    if request.method == "POST":
        content = _pieces(body)
    else:
        content = None
    headers = _end_to_end(request.headers)
    outgoing = client.build_request(
        request.method, request.url.path, headers=headers, content=content
    )
    answer = await client.send(outgoing, stream=True)
    with ExitStack() as until_filled:
        held = until_filled.enter_context(Held(LARGE))
        async with aclosing(answer):
            received = await _fill(held, answer.aiter_raw())
        until_filled.pop_all()  # the reader closes it
    returned = _end_to_end(answer.headers)
    if max(sent, received) > LARGE:
        # An open connection would keep TLS's memory for this call, 0.9 MiB, while its node is idle.
        returned["connection"] = "close"
    return StreamingResponse(_pieces(held), status_code=answer.status_code, headers=returned)


def _end_to_end(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name not in HOP_BY_HOP | FORWARDED}


async def _fill(held: Held, pieces: AsyncIterable[bytes], *, slowest: int | None = None) -> int:
    """Writes pieces to a file. Raises TimeoutError if they arrive at less than `slowest` bytes a
    second."""
    size = 0
    if slowest is None:
        until = None
    else:
        until = asyncio.get_running_loop().time() + BODY_SECONDS
    async with asyncio.timeout_at(until) as limit:
        async for piece in pieces:
            size += held.write(piece)
            if until is not None and slowest is not None:
                limit.reschedule(until + size / slowest)
    held.seek(0)
    return size


async def _pieces(held: Held) -> AsyncIterator[bytes]:
    with held:
        while piece := held.read(PIECE):
            yield piece


async def _refuse(request: Request) -> Response:
    # The path is logged with repr, so that control characters do not reach a terminal.
    logger.warning(
        "refused %s %s from %s", request.method, ascii(request.url.path[:200]), _caller(request)
    )
    return PlainTextResponse("not here", status_code=404)


def _caller(request: Request) -> str:
    if request.client:
        return request.client.host
    return "an unknown caller"


def protocol_with_deadline(**settings: Any) -> asyncio.Protocol:
    """uvicorn's protocol of a connection, which closes it if the head of a call does not arrive in
    time."""
    protocol: Any = AutoHTTPProtocol(**settings)
    made = protocol.connection_made
    received = protocol.data_received
    waiting = list[asyncio.TimerHandle]()

    def wait() -> None:
        waiting.append(
            asyncio.get_running_loop().call_later(HEAD_SECONDS, lambda: protocol.transport.abort())
        )

    def connection_made(transport: asyncio.Transport) -> None:
        made(transport)
        wait()

    def data_received(data: bytes) -> None:
        received(data)
        if protocol.cycle is not None and not protocol.cycle.response_complete:
            while waiting:
                waiting.pop().cancel()
        elif not waiting:
            wait()

    vars(protocol).update(connection_made=connection_made, data_received=data_received)
    return protocol  # type: ignore[no-any-return]


def main(words: Sequence[str]) -> int:
    """Serves until it is told to end."""
    parser = argparse.ArgumentParser(prog="python -m discreet.deployment.gate", description=__doc__)
    parser.add_argument(
        "--upstream", required=True, help="the SuperLink, for instance https://superlink:8000"
    )
    parser.add_argument(
        "--secrets", type=Path, default=Path("secrets"), help="holds ca.crt, server.crt, server.key"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9092)
    arguments = parser.parse_args(words)
    log_to(sys.stdout)
    verify = ssl.create_default_context(cafile=arguments.secrets / "ca.crt")
    proxy = make_node_proxy(arguments.upstream, verify=verify, largest_body=LARGEST_BODY)
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # some systems allow less than they state
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, min(most, MOST_FILES)), most))
    logger.info(
        "the node proxy to %s is on %s:%d", arguments.upstream, arguments.host, arguments.port
    )
    uvicorn.run(
        proxy,
        host=arguments.host,
        port=arguments.port,
        http=protocol_with_deadline,  # type: ignore[arg-type]
        proxy_headers=False,
        ssl_certfile=str(arguments.secrets / "server.crt"),
        ssl_keyfile=str(arguments.secrets / "server.key"),
        access_log=False,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=5,
    )
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
