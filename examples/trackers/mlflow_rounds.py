"""Logs the publishable values of a run's rounds to MLflow, and nothing else: `pip install
mlflow-skinny sqlalchemy`.

python examples/trackers/mlflow_rounds.py sqlite:///mlflow.db rounds=5 output_dir=outputs/first
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric

from discreet import simulate

# Not cohort, replies, seconds, or the epsilons that clients report: docs/privacy.md.
TOLD = ("loss", "accuracy", "auc", "r2", "mae", "clip_norm", "fraction_below", "epsilon_user")


def train(uri: str, *settings: str) -> Path:
    """Trains with these settings, and returns the run folder."""
    # One time for all rounds, as the duration of a round depends on its clients.
    begun = int(time.time() * 1000)
    client = MlflowClient(tracking_uri=uri)
    known = client.get_experiment_by_name("discreet")
    experiment = known.experiment_id if known else client.create_experiment("discreet")
    run = client.create_run(experiment, start_time=begun).info.run_id

    def on_round(row: Mapping[str, object]) -> None:
        told = {name: value for name in TOLD if isinstance(value := row.get(name), float)}
        metrics = [
            Metric(name, value, begun, int(str(row["round"]))) for name, value in told.items()
        ]
        client.log_batch(run, metrics=metrics)

    folder = simulate(*settings, on_round=on_round)
    client.set_terminated(run, end_time=begun)
    return folder


if __name__ == "__main__":
    print(train(*sys.argv[1:]))
