"""Another user of the machine starts nothing through a SuperLink's own port, and takes over no
ServerApp."""

from __future__ import annotations

import os
import ssl
import sys
from collections.abc import Callable
from http.client import HTTPConnection, HTTPSConnection
from pathlib import Path
from socket import create_connection, create_server

import pytest

from discreet.deployment.flower_fixes.local_callers import user_of
from discreet.deployment.flower_run import simulation_superlink
from discreet.deployment.local_federation import empty_federation

STRANGER = 54321
CALLS = (
    "/v1/control/start-run",
    "/v1/control/list-runs",
    "/v1/control/register-node",
    "/v1/runtime/acquire-task",
)
HEADERS = {
    "content-type": "application/protobuf",
    "x-forwarded-for": "127.0.0.1",
    "connection": "close",
}

needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can call as another user")
pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux says whose a connection is"),
]


def answers(
    connect: Callable[[], HTTPConnection], user: int, paths: tuple[str, ...] = CALLS
) -> list[int]:
    """The status codes of calls by a user, which a process of that user makes."""
    ours, theirs = os.pipe()
    if os.fork() == 0:
        os.setuid(user)
        for path in paths:
            connection = connect()
            connection.request("POST" if path.startswith("/v1") else "GET", path, b"", HEADERS)
            os.write(theirs, f"{connection.getresponse().status} ".encode())
        os._exit(0)
    os.close(theirs)
    os.wait()
    with open(ours, "rb") as codes:
        return [int(code) for code in codes.read().split()]


@needs_root
def test_another_user_of_the_machine_can_not_call_the_superlink_of_a_federation(
    tmp_path: Path,
) -> None:
    with empty_federation(tmp_path, []) as federation:
        trust = ssl.create_default_context(cadata=federation.authority.read_text())

        def connect() -> HTTPConnection:
            return HTTPSConnection("127.0.0.1", federation.port, context=trust, timeout=20)

        assert answers(connect, STRANGER) == [403] * len(CALLS)
        assert 403 not in answers(connect, os.getuid())
        # A node signs its calls.
        assert answers(connect, STRANGER, ("/health", "/v1/fleet/pull-messages")) == [200, 401]
    assert "refused '/v1/control/start-run' of another user" in federation.says("superlink")


@needs_root
def test_another_user_of_the_machine_can_not_call_the_superlink_of_a_simulation(
    tmp_path: Path,
) -> None:
    with simulation_superlink(tmp_path) as (address, _, _):

        def connect() -> HTTPConnection:
            return HTTPConnection(address, timeout=20)

        assert answers(connect, STRANGER, (*CALLS, "/v1/fleet/register-node")) == [403] * (
            len(CALLS) + 1
        )
        assert 403 not in answers(connect, os.getuid())


def test_a_connection_that_its_holder_has_closed_is_nobodys() -> None:
    with (
        create_server(("127.0.0.1", 0)) as listening,
        create_connection(listening.getsockname()) as calling,
    ):
        near, far = calling.getsockname(), calling.getpeername()
        assert user_of(near, far) == os.getuid()
        assert user_of((near[0], 1), far) is None
        calling.close()
        assert user_of(near, far) is None
