"""Tracking: MLflow and TensorBoard read back what may be published of a run, and nothing else."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from discreet.config import ConfigError, load_config
from discreet.federated.resuming import run_config
from discreet.federated.run_folder import RunFolder
from discreet.federated.strategy import DPFedAvg
from discreet.federated.tracking import Tracking, begin, told_settings
from discreet.simulation.in_process import simulate

FEW = (
    *("rounds=2", "data.num_clients=40", "model.name=logistic_regression", "training.epochs=1"),
    "privacy.user.noise_multiplier=1",
)
TOLD_OF_CLASSES = {"loss", "accuracy", "clip_norm", "fraction_below", "epsilon_user"}
NOT_FOR_OTHERS = {"cohort", "replies", "seconds", "epsilon_example", "epsilon_local", "round"}


def run(folder: Path, kind: str, *words: str) -> RunFolder:
    simulate(load_config([*FEW, f"tracking={kind}", f"output_dir={folder}", *words]))
    return RunFolder(folder)


def tensorboard_scalars(logs: Path) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(logs))
    events.Reload()
    return {name: [(each.step, each.value) for each in events.Scalars(name)] for name in events.Tags()["scalars"]}


def tensorboard_text(logs: Path, name: str) -> str:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(logs))
    events.Reload()
    return str(events.Tensors(f"{name}/text_summary")[-1].tensor_proto.string_val[0].decode())


def mlflow_client(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


@pytest.fixture(scope="module")
def in_tensorboard(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Two rounds, and a third after the run was resumed."""
    folder = tmp_path_factory.mktemp("tracked") / "run"
    run(folder, "tensorboard")
    simulate(run_config([f"output_dir={folder}", "resume=true", "rounds=3"]))
    return RunFolder(folder)


def test_tensorboard_reads_back_the_rounds_as_metrics_csv_has_them(in_tensorboard: RunFolder) -> None:
    told, rows = tensorboard_scalars(in_tensorboard.path / "tensorboard"), in_tensorboard.read_metrics()
    assert set(told) == TOLD_OF_CLASSES
    for name in TOLD_OF_CLASSES:
        assert [step for step, _ in told[name]] == [1, 2, 3]
        assert [value for _, value in told[name]] == pytest.approx([row[name] for row in rows])


@pytest.mark.parametrize(
    ("data", "scores"), [("diabetes", {"r2", "mae"}), ("multilabel", {"accuracy", "auc"})], ids=["numbers", "labels"]
)
def test_the_scores_of_a_task_are_told_as_metrics_csv_has_them(data: str, scores: set[str], tmp_path: Path) -> None:
    folder = run(tmp_path / "run", "tensorboard", f"data.name={data}", "model.name=linear")
    told, rows = tensorboard_scalars(folder.path / "tensorboard"), folder.read_metrics()
    assert {*told} == scores | TOLD_OF_CLASSES - {"accuracy"}
    for name in scores:
        assert [value for _, value in told[name]] == pytest.approx([row[name] for row in rows])


def test_what_is_not_covered_by_the_guarantee_does_not_go_out(in_tensorboard: RunFolder) -> None:
    assert not set(tensorboard_scalars(in_tensorboard.path / "tensorboard")) & NOT_FOR_OTHERS
    config = load_config([*FEW, "seed=31013", "data.path=/srv/me/data"])
    assert not {name for name, value in told_settings(config).items() if "31013" in value or "/srv/me" in value}


def test_a_round_bears_no_time_of_its_own(in_tensorboard: RunFolder) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(in_tensorboard.path / "tensorboard"))
    events.Reload()
    assert len({each.wall_time for each in events.Scalars("loss")}) == 1


def test_the_report_names_the_guarantee_and_its_price(in_tensorboard: RunFolder) -> None:
    report = tensorboard_text(in_tensorboard.path / "tensorboard", "privacy")
    epsilon = in_tensorboard.read_metrics()[-1]["epsilon_user"]
    assert "user-level: all data of one client" in report
    assert f"epsilon {epsilon:.4g} by pld at delta 0.001" in report
    assert "example-level: none" in report


def test_settings_are_told(in_tensorboard: RunFolder) -> None:
    assert "| model.name | logistic_regression |" in tensorboard_text(in_tensorboard.path / "tensorboard", "settings")


def test_where_the_account_of_a_population_lies_is_not_told() -> None:
    words = ["privacy.user.account=/secret/people.db", "sampling.population_name=people"]
    told = told_settings(load_config(words))
    assert told["sampling.population_name"] == "people"
    assert not any("/secret" in value for value in told.values())


@pytest.fixture
def no_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)


@pytest.mark.usefixtures("no_mlflow")
def test_a_package_that_is_missing_is_said_before_a_folder_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tracking=mlflow needs mlflow, .*discreet\[mlflow\]"):
        run(tmp_path / "run", "mlflow")
    assert not (tmp_path / "run").exists()


class Away:
    """A server that can't be reached."""

    def settings(self, values: Mapping[str, str]) -> None:
        raise OSError("away")

    def metrics(self, number: int, values: Mapping[str, float]) -> None:
        raise OSError("away")

    def report(self, text: str, number: int) -> None:
        raise OSError("away")

    def close(self) -> None:
        raise OSError("away")


def test_a_server_that_is_away_during_a_run_does_not_end_it(caplog: pytest.LogCaptureFixture) -> None:
    tracking = Tracking(Away())
    tracking.round_done({"round": 1, "loss": 0.5})
    tracking.close()
    assert caplog.messages == ["the tracking server was not told: away"] * 2


def test_dp_fedavg_takes_the_same_words() -> None:
    words = {"tracking": "tensorboard", "tracking_uri": "logs"}
    strategy = DPFedAvg(population_size=10, noise_multiplier=1.0, delta=0.01, **words)  # type: ignore[arg-type]
    config = strategy.app.config  # type: ignore[attr-defined]
    assert (config.tracking, config.tracking_uri) == ("tensorboard", "logs")


def test_a_run_is_not_tracked_unless_it_is_asked_for(tmp_path: Path) -> None:
    with ExitStack() as held:
        assert begin(load_config(FEW), RunFolder(tmp_path), held=held) == Tracking()
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def in_mlflow(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Two rounds, and a third after the run was resumed."""
    folder = tmp_path_factory.mktemp("tracked") / "run"
    run(folder, "mlflow")
    simulate(run_config([f"output_dir={folder}", "resume=true", "rounds=3"]))
    return RunFolder(folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # of SQLAlchemy, which MLflow uses
def test_mlflow_reads_back_one_run_with_rounds_settings_and_report(in_mlflow: RunFolder) -> None:
    client = mlflow_client(f"sqlite:///{in_mlflow.path.parent / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("discreet")
    (tracked,) = client.search_runs([experiment.experiment_id])
    assert tracked.info.status == "FINISHED"
    assert tracked.data.params["model.name"] == "logistic_regression"
    assert set(tracked.data.metrics) == TOLD_OF_CLASSES
    for name in TOLD_OF_CLASSES:
        history = sorted(client.get_metric_history(tracked.info.run_id, name), key=lambda each: each.step)
        assert [each.value for each in history] == pytest.approx([row[name] for row in in_mlflow.read_metrics()])
    kept = json.loads((in_mlflow.path / "tracking.json").read_text())
    assert kept["place"]["run"] == tracked.info.run_id
    (report,) = (in_mlflow.path.parent / "mlflow_artifacts").rglob("privacy.txt")
    assert "user-level: all data of one client" in report.read_text()


@pytest.mark.slow
def test_a_database_that_can_not_be_written_is_said_by_its_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="tracking_uri=nowhere://x can't be written to"):
        run(tmp_path / "run", "mlflow", "tracking_uri=nowhere://x")
