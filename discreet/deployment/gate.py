"""The only door that nodes of other organisations reach: `python -m discreet.deployment.gate`.

A SuperLink serves everything on one port: what nodes need, but also starting runs, registering nodes and taking over a
run's ServerApp, none of which asks who is calling. The gate stands in front with the server's certificate and passes on
the calls of a registered node, and nothing else. Who calls is still decided by the SuperLink, from the signature that
each call of a node carries.
"""

from __future__ import annotations

import argparse
import logging
import ssl
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

try:
    import httpx
    import uvicorn
    from starlette.applications import Starlette
    from starlette.background import BackgroundTask
    from starlette.requests import Request
    from starlette.responses import PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route
except ModuleNotFoundError as error:
    raise SystemExit(f'discreet: the gate needs {error.name}: pip install "discreet[deployment]"') from None

from discreet.logs import log_to

logger = logging.getLogger("discreet.gate")

# Neither register-node nor unregister-node: a node's key is made known by a person, on the server's side.
CALLS = (
    "activate-node",
    "deactivate-node",
    "send-node-heartbeat",
    "pull-messages",
    "push-messages",
    "get-run",
    "get-fab",
    "push-object",
    "pull-object",
    "confirm-message-received",
)
EVERY_METHOD = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
HOP_BY_HOP = frozenset({"connection", "keep-alive", "transfer-encoding", "upgrade", "te", "trailer", "host"})
MEBIBYTE = 2**20
DEFAULT_MEBIBYTES = 256
TIMEOUT = httpx.Timeout(60.0, connect=5.0)


def make_gate(upstream: str, *, verify: ssl.SSLContext | bool, largest_body: int) -> Starlette:
    """The gate as an ASGI application.

    Args:
      upstream: the SuperLink, for instance `https://superlink:8000`.
      verify: how its certificate is checked.
      largest_body: of a call, in bytes; a larger one is refused with 413, one without a length with 411.
    """

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[dict[str, httpx.AsyncClient]]:
        async with httpx.AsyncClient(base_url=upstream, verify=verify, timeout=TIMEOUT) as client:
            yield {"client": client}

    call = partial(_pass_on, largest_body=largest_body)
    routes = [Route(f"/v1/fleet/{name}", call, methods=["POST"]) for name in CALLS]
    routes.append(Route("/health", partial(_pass_on, largest_body=0), methods=["GET"]))
    routes.append(Route("/{path:path}", _refuse, methods=EVERY_METHOD))
    return Starlette(routes=routes, lifespan=lifespan)


async def _pass_on(request: Request, *, largest_body: int) -> Response:
    length = request.headers.get("content-length", "0" if request.method == "GET" else "")
    if not length.isdigit():
        return PlainTextResponse("a call needs its length", status_code=411)
    if int(length) > largest_body:
        logger.warning("refused a call of %s bytes from %s", length, _caller(request))
        return PlainTextResponse(f"a call has at most {largest_body} bytes", status_code=413)
    headers = {name: value for name, value in request.headers.items() if name not in HOP_BY_HOP}
    client: httpx.AsyncClient = request.state.client
    content = request.stream() if int(length) else None
    outgoing = client.build_request(request.method, request.url.path, headers=headers, content=content)
    try:
        answer = await client.send(outgoing, stream=True)
    except httpx.TransportError as error:
        # 503 is what a node tries again after; the SuperLink may be starting anew.
        logger.warning("the SuperLink can't be reached: %s", error)
        return PlainTextResponse("the SuperLink can't be reached", status_code=503)
    returned = {name: value for name, value in answer.headers.items() if name not in HOP_BY_HOP}
    return StreamingResponse(
        answer.aiter_raw(), status_code=answer.status_code, headers=returned, background=BackgroundTask(answer.aclose)
    )


async def _refuse(request: Request) -> Response:
    logger.warning("refused %s %s from %s", request.method, request.url.path[:200], _caller(request))
    return PlainTextResponse("not here", status_code=404)


def _caller(request: Request) -> str:
    return request.client.host if request.client else "an unknown caller"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m discreet.deployment.gate", description="Passes on what nodes may call."
    )
    parser.add_argument("--upstream", required=True, help="the SuperLink, for instance https://superlink:8000")
    parser.add_argument("--secrets", type=Path, default=Path("secrets"), help="holds ca.crt, server.crt, server.key")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=9092)
    parser.add_argument("--largest-mebibytes", type=int, default=DEFAULT_MEBIBYTES, help="of one call")
    return parser


def main(words: Sequence[str]) -> int:
    """Serves until it is told to end."""
    arguments = _parser().parse_args(words)
    log_to(sys.stdout)
    verify = ssl.create_default_context(cafile=arguments.secrets / "ca.crt")
    gate = make_gate(arguments.upstream, verify=verify, largest_body=arguments.largest_mebibytes * MEBIBYTE)
    logger.info("the gate to %s is on %s:%d", arguments.upstream, arguments.host, arguments.port)
    uvicorn.run(
        gate,
        host=arguments.host,
        port=arguments.port,
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
