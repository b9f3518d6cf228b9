"""A node that the server refuses ends with exit code 1, and says why."""

from __future__ import annotations

import re
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from discreet.deployment.flower_fixes.commands import command
from discreet.deployment.flower_home import free_port
from discreet.deployment.local_federation import START_SECONDS


@contextmanager
def refusing(server_ahead: float) -> Iterator[int]:
    """The port of a server that answers every call with 401, and whose clock is so many seconds before this one's."""

    class Refuse(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.send_response(401)
            self.send_header("content-length", "0")
            self.end_headers()

        def date_time_string(self, timestamp: float | None = None) -> str:
            return format_datetime(datetime.now(UTC) + timedelta(seconds=server_ahead), usegmt=True)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Refuse) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("server_ahead", "said"),
    [
        (3600, r"refused this node's time: its clock is 3[56]\d\d s behind the server's"),
        (0, "refused this node's signature: its key is not registered there"),
    ],
)
def test_a_node_that_is_refused_says_why_and_ends_with_1(server_ahead: float, said: str, tmp_path: Path) -> None:
    with refusing(server_ahead) as port, (tmp_path / "log").open("w") as log:
        words = ("--insecure", "--superlink", f"127.0.0.1:{port}", "--host", "127.0.0.1", "--port", str(free_port()))
        node = subprocess.Popen(command("supernode", *words), stdout=log, stderr=log)
        assert node.wait(START_SECONDS) == 1
    (line,) = [line for line in (tmp_path / "log").read_text().splitlines() if "discreet: " in line]
    assert re.search(said, line)
