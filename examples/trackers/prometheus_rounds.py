"""Serves the publishable values of a run's last round to Prometheus: `pip install
prometheus-client`.

python examples/trackers/prometheus_rounds.py 9100 rounds=5 output_dir=outputs/first
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from discreet import simulate

# Not cohort, replies, seconds, or the epsilons that clients report: docs/privacy.md.
TOLD = (
    "round",
    "loss",
    "accuracy",
    "auc",
    "r2",
    "mae",
    "clip_norm",
    "fraction_below",
    "epsilon_user",
)


def gauges(port: int) -> Callable[[Mapping[str, object]], None]:
    """An `on_round` whose numbers this process serves on the loopback interface."""
    registry, shown = CollectorRegistry(), dict[str, Gauge]()
    start_http_server(port, addr="127.0.0.1", registry=registry)

    def on_round(row: Mapping[str, object]) -> None:
        for name in TOLD:
            if isinstance(value := row.get(name), int | float):
                if name not in shown:
                    shown[name] = Gauge(f"discreet_{name}", "of the last round", registry=registry)
                shown[name].set(value)

    return on_round


def train(port: str, *settings: str) -> Path:
    """Trains with these settings, and returns the run folder."""
    return simulate(*settings, on_round=gauges(int(port)))


if __name__ == "__main__":
    print(train(*sys.argv[1:]))
