"""A hostile app's first attempts. `discreet site check` runs them to test the sandbox."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

NEW_USER_SPACE = 0x10000000
LEFT = "left-by-a-block"


def reached(facts: Mapping[str, str]) -> list[str]:
    """The resources that can be reached from inside a block and must not be; empty if the walls
    hold. `facts` give the site's folder and account, a listening TCP port and UNIX socket, and the
    guard's process."""
    site = facts["site"]
    guard = int(facts["guard"])
    tries: dict[str, Callable[[], object]] = {
        "the site's folder": lambda: os.listdir(site),
        "the site's key": lambda: Path(site, "key").read_bytes(),
        "the account": lambda: Path(facts["ledger"]).read_bytes(),
        "a TCP port": lambda: _connects(socket.AF_INET, ("127.0.0.1", int(facts["port"]))),
        "a UNIX socket": lambda: _connects(socket.AF_UNIX, facts["socket"]),
        "a name server": lambda: socket.getaddrinfo("example.org", 80),
        "the guard's process": lambda: os.kill(guard, 0),
        "the guard's command line": lambda: Path(f"/proc/{guard}/environ").read_bytes(),
        "a namespace": _new_space,
        "the root's rights": lambda: os.setresuid(0, 0, 0),
        "a folder that others see": lambda: Path("/", LEFT).write_text(""),
        "what a block left": lambda: Path("/var/tmp", LEFT).write_text(""),
    }
    return [name for name, attempt in tries.items() if _succeeds(attempt)]


def _succeeds(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except OSError:
        return False
    return True


def _connects(family: int, address: object) -> None:
    with socket.socket(family, socket.SOCK_STREAM) as channel:
        channel.settimeout(2)
        channel.connect(address)  # type: ignore[arg-type]


def _new_space() -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(NEW_USER_SPACE) != 0:
        raise OSError(ctypes.get_errno(), "unshare")
