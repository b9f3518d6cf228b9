"""Prometheus metrics of a run, read from its run folder at each look.

Off by default and bound to the loopback interface: cohort sizes, replies and failures are not covered by any guarantee.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from discreet.server.run_folder import RunFolder, RunStatus, read_status

logger = logging.getLogger("discreet")

GAUGES = {
    "round": "rounds that are done",
    "loss": "on the public test set, after the last round",
    "accuracy": "on the public test set, after the last round",
    "auc": "on the public test set, after the last round",
    "r2": "on the public test set, after the last round",
    "mae": "on the public test set, after the last round",
    "clip_norm": "the clip norm of the last round",
    "fraction_below": "the noised share of updates within the clip norm",
    "cohort": "clients that were asked in the last round",
    "replies": "updates that counted in the last round",
    "seconds": "how long the last round took",
}
GUARANTEES = ("user", "example", "local")


@dataclass(frozen=True)
class RunCollector:
    """The metrics of a run folder, live or done, for Prometheus.

    Before the first round only what is known by then is there. A guarantee that is off has an epsilon of +Inf.

    Attributes:
      budget: the user-level budget; None for none.
    """

    folder: RunFolder
    budget: float | None = None

    def collect(self) -> Iterator[Metric]:
        """The metrics as they are now."""
        rows = self.folder.read_metrics()
        row: Mapping[str, float | None] = rows[-1] if rows else {"round": 0.0}
        for name, about in GAUGES.items():
            if (value := row.get(name)) is not None:
                yield GaugeMetricFamily(f"discreet_{name}", about, value=value)
        spent = {name: row.get(f"epsilon_{name}") for name in GUARANTEES}
        yield from _by_guarantee("discreet_epsilon", "spent, by guarantee; +Inf if it is off", spent)
        yield from _by_guarantee("discreet_epsilon_budget", "the budget", {"user": self.budget})
        status = read_status(self.folder)
        if status is not None:
            yield from _of_status(status)


def _by_guarantee(name: str, about: str, values: Mapping[str, float | None]) -> Iterator[Metric]:
    family = GaugeMetricFamily(name, about, labels=["guarantee"])
    for guarantee, value in values.items():
        if value is not None:
            family.add_metric([guarantee], value)
    if family.samples:
        yield family


def _of_status(status: RunStatus) -> Iterator[Metric]:
    yield GaugeMetricFamily("discreet_rounds_planned", "of this run", value=status.rounds)
    yield GaugeMetricFamily("discreet_running", "1 while the run goes on", value=status.state == "running")
    if status.nodes is not None:
        yield GaugeMetricFamily("discreet_nodes", "connected when the last cohort was drawn", value=status.nodes)
    failures = CounterMetricFamily("discreet_failures", "clients that were asked in vain", labels=["kind"])
    for kind, count in status.failures.items():
        failures.add_metric([kind], count)
    yield failures
    updated = datetime.fromisoformat(status.updated).timestamp()
    yield GaugeMetricFamily("discreet_updated_timestamp_seconds", "when the run last said something", value=updated)


@contextmanager
def serving_metrics(path: Path, *, port: int | None, host: str, budget: float | None = None) -> Iterator[int | None]:
    """Serves the metrics of a run folder over HTTP while the block runs; gives the port. Does nothing without a port.

    A port that can't be bound costs the metrics, not the run: it is logged.
    """
    if port is None:
        yield None
        return
    registry = CollectorRegistry()
    registry.register(RunCollector(RunFolder(path), budget))
    try:
        server, thread = start_http_server(port, addr=host, registry=registry)
    except OSError as error:
        logger.warning("no metrics: operations.metrics_port=%d on %s can't be used: %s", port, host, error.strerror)
        yield None
        return
    try:
        yield server.server_port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
