"""The examples of trackers: TensorBoard, MLflow and Prometheus read what may be published of a run, and no more."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest

from discreet.deployment.flower_home import free_port
from discreet.server.run_folder import RunFolder
from examples.trackers import mlflow_rounds, prometheus_rounds, tensorboard_rounds

FEW = (
    *("rounds=2", "data.num_clients=40", "model.name=logistic_regression", "training.epochs=1"),
    "privacy.user.noise_multiplier=1",
)
TOLD = {"loss", "accuracy", "clip_norm", "fraction_below", "epsilon_user"}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[tuple[int, float, float]]]:
    """(round, value, time) of everything that TensorBoard has of a run, after the values are those of metrics.csv."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = tmp_path_factory.mktemp("tracked")
    run = tensorboard_rounds.train(str(folder / "logs"), *FEW, f"output_dir={folder / 'run'}")
    rows = RunFolder(run).read_metrics()
    events = EventAccumulator(str(folder / "logs"))
    events.Reload()
    found = {name: [(e.step, e.value, e.wall_time) for e in events.Scalars(name)] for name in events.Tags()["scalars"]}
    for name, points in found.items():
        assert [value for _, value, _ in points] == pytest.approx([row[name] for row in rows])
    return found


def test_what_is_not_covered_by_the_guarantee_does_not_go_out(told: dict[str, list[tuple[int, float, float]]]) -> None:
    assert {*told} == TOLD


def test_a_round_bears_no_time_of_its_own(told: dict[str, list[tuple[int, float, float]]]) -> None:
    assert len({time for points in told.values() for _, _, time in points}) == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # of SQLAlchemy, which MLflow uses
def test_mlflow_has_the_same_rounds(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path / 'mlflow.db'}"
    rows = RunFolder(mlflow_rounds.train(uri, *FEW, f"output_dir={tmp_path / 'run'}")).read_metrics()
    client = mlflow.MlflowClient(tracking_uri=uri)
    (tracked,) = client.search_runs([client.get_experiment_by_name("discreet").experiment_id])
    assert {*tracked.data.metrics} == TOLD
    for name in TOLD:
        history = sorted(client.get_metric_history(tracked.info.run_id, name), key=lambda each: each.step)
        assert [each.value for each in history] == pytest.approx([row[name] for row in rows])
        assert len({each.timestamp for each in history}) == 1


def test_prometheus_reads_the_last_round(tmp_path: Path) -> None:
    port = free_port()
    run = prometheus_rounds.train(str(port), *FEW, f"output_dir={tmp_path / 'run'}")
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        found = dict(re.findall(r"(?m)^discreet_(\w+) (\S+)$", answer.read().decode()))
    row = RunFolder(run).read_metrics()[-1]
    assert {*found} == {*TOLD, "round"}
    assert {name: float(value) for name, value in found.items()} == pytest.approx({name: row[name] for name in found})
