"""Prometheus metrics of a run, read from its run folder at each look.

Off by default and bound to the loopback interface: cohort sizes, replies and failures are not covered by any guarantee.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import BaseServer

from discreet.runs import RunFolder
from discreet.status import read_status

logger = logging.getLogger("discreet")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
GAUGES = {
    "round": "rounds that are done",
    "loss": "on the public test set, after the last round",
    "accuracy": "on the public test set, after the last round",
    "clip_norm": "the clip norm of the last round",
    "fraction_below": "the noised share of updates within the clip norm",
    "cohort": "clients that were asked in the last round",
    "replies": "updates that counted in the last round",
    "seconds": "how long the last round took",
}
GUARANTEES = ("user", "example", "local")


def prometheus_text(folder: RunFolder, *, budget: float | None = None) -> str:
    """The metrics of a run folder in Prometheus' text format.

    Before the first round only what is known by then is there. A guarantee that is off has an epsilon of +Inf.

    Args:
      folder: of a run, live or done.
      budget: the user-level budget; None for none.
    """
    rows = folder.read_metrics()
    row: dict[str, float | None] = rows[-1] if rows else {"round": 0.0}
    lines = [
        line
        for name, about in GAUGES.items()
        if row.get(name) is not None
        for line in _metric(f"discreet_{name}", about, {"": row[name]})
    ]
    spent = {f'{{guarantee="{name}"}}': row.get(f"epsilon_{name}") for name in GUARANTEES}
    lines += _metric("discreet_epsilon", "spent, by guarantee; +Inf where it is off", spent)
    if budget is not None:
        lines += _metric("discreet_epsilon_budget", "the budget", {'{guarantee="user"}': budget})
    return "\n".join([*lines, *_status_lines(folder)]) + "\n"


def _status_lines(folder: RunFolder) -> list[str]:
    status = read_status(folder)
    if status is None:
        return []
    lines = _metric("discreet_rounds_planned", "of this run", {"": float(status.rounds)})
    lines += _metric("discreet_running", "1 while the run goes on", {"": float(status.state == "running")})
    if status.nodes is not None:
        lines += _metric("discreet_nodes", "connected when the last cohort was drawn", {"": float(status.nodes)})
    failures = {f'{{kind="{kind}"}}': float(count) for kind, count in status.failures.items()}
    lines += _metric("discreet_failures_total", "clients that were asked in vain", failures, kind="counter")
    updated = datetime.fromisoformat(status.updated).timestamp()
    return lines + _metric("discreet_updated_timestamp_seconds", "when the run last said something", {"": updated})


def _metric(name: str, about: str, values: Mapping[str, float | None], *, kind: str = "gauge") -> list[str]:
    known = [f"{name}{labels} {_number(value)}" for labels, value in values.items() if value is not None]
    return [f"# HELP {name} {about}", f"# TYPE {name} {kind}", *known] if known else []


def _number(value: float) -> str:
    return {float("inf"): "+Inf", float("-inf"): "-Inf"}.get(value, repr(value))


class _Handler(BaseHTTPRequestHandler):
    def __init__(self, folder: RunFolder, budget: float | None, *arguments: object) -> None:
        self._folder, self._budget = folder, budget
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        if self.path != "/metrics":
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        body = prometheus_text(self._folder, budget=self._budget).encode()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing: a scrape is not news."""


@contextmanager
def serving_metrics(path: Path, *, port: int | None, host: str, budget: float | None = None) -> Iterator[int | None]:
    """Serves `/metrics` of a run folder while the block runs; gives the port. Does nothing without a port.

    A port that can't be bound costs the metrics, not the run: it is logged.
    """
    if port is None:
        yield None
        return
    try:
        server = ThreadingHTTPServer((host, port), partial(_Handler, RunFolder(path), budget))
    except OSError as error:
        logger.warning("no metrics: operations.metrics_port=%d on %s can't be used: %s", port, host, error.strerror)
        yield None
        return
    server.daemon_threads = True
    threading.Thread(target=BaseServer.serve_forever, args=(server, 0.1), name="metrics", daemon=True).start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
