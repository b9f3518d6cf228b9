"""Callers of a SuperLink on its own machine: Flower asks nobody who starts runs, registers nodes or
takes over a ServerApp, so that any user of the machine could run code as the SuperLink's user. The
system says whose a caller is."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import uvicorn
from starlette.middleware import Middleware
from starlette.responses import JSONResponse

from discreet.deployment.flower_fixes.commands import OPERATORS

HEALTH = "/health"
OF_NODES = "/v1/fleet/"
TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
ESTABLISHED = "01"
NO_FILE = "0"
ROOT = 0
REFUSED = (
    "only the user who started this SuperLink, and each --operator USER, may call it from this "
    "machine"
)

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Any, Any], Awaitable[None]]

logger = logging.getLogger("discreet.superlink")


def user_of(near: tuple[str, int], far: tuple[str, int]) -> int | None:
    """The number of the user who holds the end `near` of a TCP connection of this machine; None if
    it is not held here.

    A connection that its holder has closed counts as root's in the system's table, and is not held
    by anybody here."""
    ends = {_end(*near), _plain(*near)}, {_end(*far), _plain(*far)}
    for table in TABLES:
        for line in table.read_text().splitlines()[1:]:
            row = line.split()
            if (
                row[1] in ends[0]
                and row[2] in ends[1]
                and row[3] == ESTABLISHED
                and row[9] != NO_FILE
            ):
                return int(row[7])
    return None


def _plain(host: str, port: int) -> str:
    """As `_end`, of the IPv4 address that an IPv6 one stands for."""
    address = ip_address(host)
    if isinstance(address, IPv6Address):
        mapped = address.ipv4_mapped
    else:
        mapped = None
    return _end(str(mapped or address), port)


def _end(host: str, port: int) -> str:
    """An end of a connection as the system's tables have it: words of 4 bytes in this machine's
    order."""
    address: IPv4Address | IPv6Address = ip_address(host)
    words = [address.packed[start : start + 4] for start in range(0, len(address.packed), 4)]
    return "".join(word[::-1].hex().upper() for word in words) + f":{port:04X}"


class OwnCallers:
    """A layer around a SuperLink that takes calls from this machine by some users alone.

    The calls of nodes are for whoever can sign them, where nodes sign. A caller on another machine
    or in another container is not known to this system: it is taken if the SuperLink listens beyond
    the loopback interface.
    """

    def __init__(self, app: App) -> None:
        self.app = app
        self.users = {ROOT, os.getuid(), *map(int, os.environ.get(OPERATORS, "").split())}

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or self._may_call(scope):
            await self.app(scope, receive, send)
            return
        logger.warning("refused %s of another user of this machine", ascii(scope["path"][:200]))
        await JSONResponse({"detail": REFUSED}, status_code=403)(scope, receive, send)

    def _may_call(self, scope: Scope) -> bool:
        path = scope["path"]
        signed = scope["app"].state.enable_supernode_auth
        if path == HEALTH or (signed and path.startswith(OF_NODES)):
            return True
        near = tuple(scope["client"])
        far = tuple(scope["server"])
        user = user_of(near, far)
        if user is None:
            return not ip_address(near[0]).is_loopback
        return user in self.users


# Without headers of proxies: in these any caller could say that it is another one.
SERVER = SimpleNamespace(run=partial(uvicorn.run, proxy_headers=False))


def middleware() -> tuple[Middleware, ...]:
    """The layer, outermost; none on a system that does not say whose a connection is."""
    if not all(table.exists() for table in TABLES):
        logger.warning(
            "this system cannot identify the user of a connection: any user of this machine can "
            "start runs here"
        )
        return ()
    return (Middleware(OwnCallers),)
