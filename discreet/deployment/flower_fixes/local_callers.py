"""Checks local callers of a SuperLink. Flower authenticates no one who starts runs, registers nodes
or takes over a ServerApp, so any user of the machine could run code as the SuperLink's user. The
operating system tells which user a caller is."""

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

from discreet.deployment.flower_fixes.told_processes import OPERATORS

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
    """The id of the user who owns the end `near` of a TCP connection on this machine; None if no
    user here does.

    The system's table lists a closed connection as root's; here it counts as nobody's."""
    ends = _ends(*near), _ends(*far)
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


def _ends(host: str, port: int) -> set[str]:
    """An end of a connection in the format of the system's tables: words of 4 bytes in this
    machine's byte order. An IPv4 address inside an IPv6 one may be there in either form."""
    address: IPv4Address | IPv6Address = ip_address(host)
    found = set()
    for each in filter(None, (address, getattr(address, "ipv4_mapped", None))):
        words = [each.packed[start : start + 4] for start in range(0, len(each.packed), 4)]
        found.add("".join(word[::-1].hex().upper() for word in words) + f":{port:04X}")
    return found


class OwnCallers:
    """A layer around a SuperLink that accepts calls from this machine only by some users.

    If nodes sign their calls, these are accepted from any user who can sign them. A caller on
    another machine or in another container is not known to this system; its calls are accepted if
    the SuperLink listens beyond the loopback interface.
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


# Proxy headers are ignored: in these any caller could claim another address.
SERVER = SimpleNamespace(run=partial(uvicorn.run, proxy_headers=False))


def middleware() -> tuple[Middleware, ...]:
    """The layer, as the outermost one; none on a system that does not tell the owner of a
    connection."""
    if not all(table.exists() for table in TABLES):
        logger.warning(
            "this system cannot identify the user of a connection: any user of this machine can "
            "start runs here"
        )
        return ()
    return (Middleware(OwnCallers),)
