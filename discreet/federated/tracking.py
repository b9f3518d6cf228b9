"""What a run tells MLflow or TensorBoard if `tracking` asks for it: no more than docs/privacy.md says may be published.

Of a round: loss and scores on the public test set (accuracy, AUC, R2, mean absolute error, as the task has them), the
clip norm, the noised share of norms below it, and the user-level epsilon. Of a run: its settings, without the seed and
without where things lie, and at its end the guarantees in words. Not told are who or how many took part, what clients
report of themselves, and seconds: all that is written of a run bears the time of its start, for how long a round takes
depends on who takes part.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from discreet.config import ConfigError, RunConfig
from discreet.extras import require
from discreet.federated.guarantees import USER, guarantees_of
from discreet.federated.run_folder import RunFolder, replace_file
from discreet.json_numbers import json_ready
from discreet.privacy.privacy_ledger import PrivacyLedger
from discreet.tasks.scores import SCORES

NONE, MLFLOW, TENSORBOARD = "none", "mlflow", "tensorboard"
KINDS = (NONE, MLFLOW, TENSORBOARD)
TOLD_OF_A_ROUND = ("loss", *SCORES, "accuracy_error", "clip_norm", "fraction_below", "epsilon_user")
NOT_TOLD_OF_A_RUN = (
    *("seed", "output_dir", "resume", "device", "engine", "tracking", "tracking_uri"),
    *("data.path", "operations.", "privacy.user.account"),
)
FILE = "tracking.json"  # in the run folder: which tracking run a resumed run goes on with
EXPERIMENT, REPORT = "discreet", "privacy.txt"
# MLflow waits minutes for a server that is away, and reports its own use to its makers, unless it is told otherwise.
QUIET = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}

logger = logging.getLogger("discreet")


class Tracker(Protocol):
    """Where numbers and texts of one run go. Each method raises OSError if they can't be written."""

    def settings(self, values: Mapping[str, str]) -> None:
        """Once, before the first round."""

    def metrics(self, number: int, values: Mapping[str, float]) -> None:
        """After a round."""

    def report(self, text: str, number: int) -> None:
        """Once, when the run has ended after a round."""

    def close(self) -> None:
        """Whether the run has ended or not."""


@dataclass(frozen=True)
class Place:
    """Which tracking run this is.

    Attributes:
      uri: of the MLflow server or database, or the folder for TensorBoard.
      run: MLflow's number of the run; TensorBoard's folder.
      begun: milliseconds since 1970: the time that all that is written bears.
    """

    kind: str
    uri: str
    run: str
    begun: int


@dataclass(frozen=True)
class MlflowTracker:
    """One run of an MLflow server, or of a local database."""

    client: Any
    place: Place

    def settings(self, values: Mapping[str, str]) -> None:
        param = import_module("mlflow.entities").Param
        with _mlflow_errors():
            self.client.log_batch(self.place.run, params=[param(name, value) for name, value in values.items()])

    def metrics(self, number: int, values: Mapping[str, float]) -> None:
        metric = import_module("mlflow.entities").Metric
        told = [metric(name, value, self.place.begun, number) for name, value in values.items()]
        with _mlflow_errors():
            self.client.log_batch(self.place.run, metrics=told)

    def report(self, text: str, number: int) -> None:
        with _mlflow_errors():
            self.client.log_text(self.place.run, text, REPORT)
            self.client.set_terminated(self.place.run, "FINISHED", end_time=self.place.begun)

    def close(self) -> None:
        with _mlflow_errors():
            if self.client.get_run(self.place.run).info.status == "RUNNING":
                self.client.set_terminated(self.place.run, "KILLED", end_time=self.place.begun)


@dataclass(frozen=True)
class TensorboardTracker:
    """A folder of event files."""

    writer: Any
    begun: int

    def settings(self, values: Mapping[str, str]) -> None:
        rows = "\n".join(f"| {name} | {value} |" for name, value in values.items())
        self.writer.add_text("settings", f"| setting | value |\n|---|---|\n{rows}", 0, walltime=self.begun / 1000)
        self.writer.flush()

    def metrics(self, number: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, number, walltime=self.begun / 1000)
        self.writer.flush()

    def report(self, text: str, number: int) -> None:
        self.writer.add_text("privacy", text, number, walltime=self.begun / 1000)

    def close(self) -> None:
        self.writer.close()


@dataclass(frozen=True)
class Tracking:
    """The tracking of a run: nothing, unless a tracker is given. What fails once a run has begun is said, and no more:
    a run is not lost because nobody can be told of it."""

    tracker: Tracker | None = None

    def round_done(self, row: Mapping[str, object]) -> None:
        """Tells of a round what may be told of the row of metrics.csv; what is missing or not finite is left out."""
        told = {name: value for name in TOLD_OF_A_ROUND if _finite(value := row.get(name))}
        if self.tracker is not None:
            with _said():
                self.tracker.metrics(int(str(row["round"])), {name: float(str(value)) for name, value in told.items()})

    def ended(self, config: RunConfig, spent: PrivacyLedger, number: int) -> None:
        """Tells which guarantees the run gave, and what the user level has cost."""
        if self.tracker is not None:
            with _said():
                self.tracker.report(report_text(config, spent, number), number)

    def close(self) -> None:
        """Ends the tracking run, if it has not ended by itself."""
        if self.tracker is not None:
            with _said():
                self.tracker.close()


def require_extra(config: RunConfig) -> None:
    """Raises MissingExtra if the package that `tracking` needs is not installed."""
    if config.tracking != NONE:
        require(config.tracking, extra=config.tracking, why=f"tracking={config.tracking}")


def begin(config: RunConfig, folder: RunFolder, *, held: ExitStack) -> Tracking:
    """The tracking of a run that begins, or goes on: then it is the same tracking run. `held` ends it.

    Raises:
      ConfigError: nothing can be written to tracking_uri.
    """
    if config.tracking == NONE:
        return Tracking()
    try:
        before = _place_before(config, folder) if config.resume else None
        tracker = _mlflow(config, folder, before) if config.tracking == MLFLOW else _tensorboard(config, folder, before)
        if before is None:
            tracker.settings(told_settings(config))
    except OSError as error:
        raise ConfigError(f"tracking_uri={config.tracking_uri} can't be written to: {error}") from error
    tracking = Tracking(tracker)
    held.callback(tracking.close)
    return tracking


def told_settings(config: RunConfig) -> dict[str, str]:
    """The settings that are told, by their dotted names."""

    def walk(node: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
        for name, value in node.items():
            if isinstance(value, dict):
                yield from walk(value, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", str(value)

    settings = walk(dataclasses.asdict(config), "")
    return {name: value for name, value in settings if not name.startswith(NOT_TOLD_OF_A_RUN)}


def report_text(config: RunConfig, spent: PrivacyLedger, number: int) -> str:
    """The guarantees of a run in words. An epsilon that clients report of themselves is not in it."""
    lines = [f"rounds: {number}"]
    for guarantee in guarantees_of(config):
        if not guarantee.enabled:
            lines.append(f"\n{guarantee.name}-level: none (epsilon = inf)")
            continue
        lines += [f"\n{guarantee.name}-level: {guarantee.unit}; {guarantee.adjacency}"]
        lines += [
            f"  {name}: {getattr(guarantee, name)}" for name in ("trusted", "observer", "mechanism", "accounting")
        ]
        lines += [f"  not covered: {each}" for each in guarantee.not_covered]
        if guarantee.name == USER:
            delta, accountant = config.privacy.delta, config.privacy.accountant
            lines.append(f"  epsilon {spent.epsilon(delta, accountant):.4g} by {accountant} at delta {delta:g}")
    if config.seed is not None:
        lines.append("\nThe noise was drawn from a seed: it can be drawn again, and protects nobody.")
    return "\n".join(lines) + "\n"


def _mlflow(config: RunConfig, folder: RunFolder, before: Place | None) -> MlflowTracker:
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    uri = config.tracking_uri or f"sqlite:///{folder.path.parent / 'mlflow.db'}"
    with _mlflow_errors():
        client = import_module("mlflow").MlflowClient(tracking_uri=uri)
        if before is not None:
            client.update_run(before.run, "RUNNING")
            return MlflowTracker(client, before)
        known = client.get_experiment_by_name(EXPERIMENT)
        experiment = known.experiment_id if known else client.create_experiment(EXPERIMENT, _artifacts(uri))
        begun = _now()
        run = client.create_run(experiment, start_time=begun, run_name=folder.path.name)
    place = Place(MLFLOW, uri, run.info.run_id, begun)
    _keep(folder, place, config)
    return MlflowTracker(client, place)


def _artifacts(uri: str) -> str | None:
    """Where the texts of a local database lie: beside it. A server knows itself."""
    kind, _, path = uri.partition(":///")
    return (Path(path).resolve().parent / "mlflow_artifacts").as_uri() if kind == "sqlite" else None


def _tensorboard(config: RunConfig, folder: RunFolder, before: Place | None) -> TensorboardTracker:
    from torch.utils.tensorboard import SummaryWriter

    at = folder.path / TENSORBOARD if config.tracking_uri is None else Path(config.tracking_uri) / folder.path.name
    place = before or Place(TENSORBOARD, str(at.parent), str(at.resolve()), _now())
    _keep(folder, place, config)
    checkpoint = folder.load_checkpoint() if before else None
    # Rounds that are done again replace what was told of them.
    purge = None if checkpoint is None else checkpoint.round + 1
    return TensorboardTracker(SummaryWriter(place.run, purge_step=purge), place.begun)


def _place_before(config: RunConfig, folder: RunFolder) -> Place | None:
    """The tracking run that a resumed run goes on with; None if it was tracked elsewhere, or not at all."""
    path = folder.path / FILE
    if not path.exists():
        return None
    try:
        kept = json.loads(path.read_text())
        place = Place(**kept["place"])
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged: remove it, and the run goes on in a new tracking run") from error
    return place if (place.kind, kept["asked"]) == (config.tracking, config.tracking_uri) else None


def _keep(folder: RunFolder, place: Place, config: RunConfig) -> None:
    facts = {"asked": config.tracking_uri, "place": dataclasses.asdict(place)}
    replace_file(folder.path / FILE, json.dumps(json_ready(facts)).encode())


def _now() -> int:
    return int(time.time() * 1000)


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


@contextmanager
def _mlflow_errors() -> Iterator[None]:
    failure: type[Exception] = import_module("mlflow.exceptions").MlflowException
    try:
        yield
    except failure as error:
        raise OSError(str(error).splitlines()[0]) from error


@contextmanager
def _said() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        logger.warning("the tracking server was not told: %s", error)
