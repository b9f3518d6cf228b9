"""The node proxy, the only door that nodes of other organisations reach: `python -m
discreet.deployment.gate`.

A SuperLink serves everything on one port: what nodes need, but also starting runs, registering
nodes and taking over a run's ServerApp, none of which asks who is calling. The node proxy stands in
front with the server's certificate and passes on the calls of a registered node, and nothing else.
Who calls is still decided by the SuperLink, from the signature that each call of a node carries.

It takes the whole of a call before it passes it on, and the whole of an answer before it gives it
back, in a file without a name if it is large. So a SuperLink waits for no node's line, and holds a
few calls with content at a time. TLS, the head of each call and its body have deadlines:
connections on which nothing comes do not use up its files."""

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
    raise SystemExit(
        f'discreet: the node proxy needs {error.name}: pip install "discreet[deployment]"'
    ) from None

from discreet.logs import log_to

logger = logging.getLogger("discreet.gate")

# Neither register-node nor unregister-node: a node's key is made known by a person, on the server's
# side.
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
AT_ONCE = 4  # calls with content that the SuperLink is given: it is one process
EVERY_METHOD = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
HOP_BY_HOP = frozenset(
    {"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "host"}
)
# A caller says in these who it is. A server that trusts the node proxy would believe it.
FORWARDED = frozenset(
    {"forwarded", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip"}
)
# for TLS, and for the head of a call; for its body, beside its share of
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
    """The node proxy of the SuperLink `upstream` as an ASGI application. `verify`: how its
    certificate is checked. A call of more than `largest_body` bytes is refused with 413, one
    without a length with 411."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[dict[str, httpx.AsyncClient]]:
        # uvicorn listens only now, and names no deadline for TLS: 60 s
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
                if await request.is_disconnected():  # a node waits 30 s, and tries again
                    raise ClientDisconnect
                return await _answer(request, body, sent)
    except ClientDisconnect:
        return PlainTextResponse("the caller has gone", status_code=400)
    except TimeoutError:
        return PlainTextResponse(
            "the call came too slowly", status_code=408, headers={"connection": "close"}
        )
    # 503 is what a node tries again after; the SuperLink may be starting anew.
    except httpx.TransportError as error:
        logger.warning("the SuperLink can't be reached: %s", error)
        return PlainTextResponse("the SuperLink can't be reached", status_code=503)
    except OSError as error:
        logger.error("no room for a call of %s bytes, see TMPDIR: %s", length, error)
        return PlainTextResponse("the node proxy has no room for this call", status_code=503)


async def _answer(request: Request, body: Held, sent: int) -> Response:
    """The SuperLink's answer to a body of `sent` bytes, when all of it is there."""
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
        until_filled.pop_all()  # whoever reads it closes it
    returned = _end_to_end(answer.headers)
    if max(sent, received) > LARGE:
        returned["connection"] = (
            "close"  # it would keep what TLS took for this call, 0.9 MiB, while its node is idle
        )
    return StreamingResponse(_pieces(held), status_code=answer.status_code, headers=returned)


def _end_to_end(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name not in HOP_BY_HOP | FORWARDED}


async def _fill(held: Held, pieces: AsyncIterable[bytes], *, slowest: int | None = None) -> int:
    """Writes pieces down; raises TimeoutError if they come with less than `slowest` bytes a
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
    # As Python writes a string: what a path holds is otherwise for the terminal that shows this
    # log.
    logger.warning(
        "refused %s %s from %s", request.method, ascii(request.url.path[:200]), _caller(request)
    )
    return PlainTextResponse("not here", status_code=404)


def _caller(request: Request) -> str:
    if request.client:
        return request.client.host
    return "an unknown caller"


def protocol_with_deadline(**settings: Any) -> asyncio.Protocol:
    """uvicorn's protocol of a connection, which ends if the head of its first or of a further call
    does not come."""
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
    with suppress(ValueError, OSError):  # a system that allows less than it says
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
