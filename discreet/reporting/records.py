"""Records of run folders, the settings in which runs differ, and text tables for the terminal, a
CSV file or the page. Every row of a table has the same columns."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from discreet.mechanisms.mechanism import Statement
from discreet.planning.constant_guess import FILE as CONSTANT
from discreet.planning.constant_guess import ConstantGuess, last_warning
from discreet.planning.plan import Plan
from discreet.reporting.epsilons import spent_epsilons
from discreet.run_files.final_results import FILE as TEST_SET
from discreet.run_files.metrics_table import ERROR, Rated, main_score, rated_in, score_columns
from discreet.run_files.run_folder import ASKED, RunFolder
from discreet.run_files.score_intervals import FILE as INTERVALS
from discreet.run_files.score_intervals import Interval, interval_words
from discreet.run_files.shapes import FILE as SHAPES
from discreet.run_files.shapes import check_shapes
from discreet.settings.adjacency import GUARANTEES
from discreet.settings.foreign_files import one_line, read_json_file
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings, described, flat

Pairs = list[tuple[float, float]]
Row = dict[str, str]
# Runs that differ only in these and in operations count as the same setting.
NOT_TRIED = ("seed", "engine", "privacy.user.account")
SCORE = "score"
NOT_PRIVATE = "not private"
SELECTION = "selection.json"  # in a run that `discreet tune` chose


def model_row(
    privacy: Mapping[str, Any] | None, rows: Sequence[Mapping[str, float | None]]
) -> Mapping[str, float | None]:
    """The row of metrics.csv for the round of a run's model: the last row, unless training
    diverged; empty for the untrained model. `privacy` is privacy.json, or None while the run goes
    on."""
    number = (privacy or {}).get("model_round", rows[-1]["round"] if rows else 0)
    return next((row for row in rows if row["round"] == number), {})


@dataclass(frozen=True, eq=False)
class RunRecord:
    """One run, read from its folder.

    Attributes:
      name: its name in the report.
      config: the resolved configuration.
      settings: values by dotted name, as the user set them: with the target epsilon if one chose
        the noise.
      rounds: the rows of metrics.csv; empty only in the second list of `runs_and_spenders`.
      privacy: privacy.json, or None while the run continues.
      selection: selection.json if discreet tune chose the run, otherwise None.
      constant, test_set: the results of a constant guess, and of the model, on the public test set
        (constant_guess.json, test_set.json); None if not known.
      shapes: shapes.json of a linear model of a table, otherwise None.
      scores: score_intervals.json, otherwise None.
    """

    name: str
    path: Path
    config: Settings
    settings: Mapping[str, Any]
    rounds: Sequence[Mapping[str, float | None]]
    privacy: Mapping[str, Any] | None
    selection: Mapping[str, Any] | None
    constant: Mapping[str, Any] | None = None
    test_set: Mapping[str, Any] | None = None
    shapes: Mapping[str, Any] | None = None
    scores: Mapping[str, Interval] | None = None

    @cached_property
    def plan(self) -> Plan:
        """The plan of the run."""
        return Plan(self.config)

    @property
    def guarantees(self) -> tuple[Statement, ...]:
        """All three guarantees, including those that are off."""
        return self.plan.guarantees

    @property
    def ratings(self) -> list[tuple[int, Rated]]:
        """(round, score) of every federated score of its models."""
        return [(int(row["round"] or 0), each) for row in self.rounds for each in rated_in(row)]

    @property
    def is_rated(self) -> bool:
        """True if its scores are from federated evaluation."""
        return self.config.evaluation.private and bool(self.ratings)

    @property
    def score_name(self) -> str:
        """The column by which its models are compared. The methods below accept "score" for it."""
        return main_score(self.rounds[0])

    def series(self, name: str) -> Pairs:
        """(round, value) of a column of metrics.csv, without values that are missing or not
        finite."""
        if name == SCORE:
            name = self.score_name
        pairs = [(row["round"], row.get(name)) for row in self.rounds]
        return [
            (number, value)
            for number, value in pairs
            if number and value is not None and math.isfinite(value)
        ]

    def of_model(self, name: str) -> float | None:
        """The value of a column for the run's model; None for the untrained model."""
        return self._model_row.get(self.score_name if name == SCORE else name)

    @cached_property
    def _model_row(self) -> dict[str, float | None]:
        """The row of metrics.csv of the run's model. A model whose shapes were made to rise or fall
        when it left has other scores than after its round: those that left are meant."""
        left = {name: value for name, (value, _, _) in self.intervals.items()}
        return {**model_row(self.privacy, self.rounds), **left}

    @property
    def model_round(self) -> int:
        """The round of the run's model."""
        return int((self.privacy or {}).get("model_round", self.rounds[-1]["round"]))

    @property
    def is_best_round(self) -> bool:
        """True if the model is that of the round with the lowest loss of several on the public test
        set."""
        ended = self.privacy is not None and self.model_round > 0
        return self.config.evaluation.keep == "best" and ended and len(self.rounds) > 1

    @property
    def no_better(self) -> str | None:
        """The warning about a model that does not beat a constant guess; None if it does, and for
        one that clients rated: their answers are noised, and about other data than the guess."""
        if self.is_rated:
            return None
        guess = None if self.constant is None else ConstantGuess(**self.constant)
        return last_warning(guess, [self._model_row])

    @property
    def intervals(self) -> dict[str, Interval]:
        """The scores of the model that left on the public test set, with 95 % intervals: those that
        its rounds have, too."""
        if self.scores is None or self.config.evaluation.private:
            return {}
        named = [*score_columns(self.rounds)]
        if self.config.task.class_weights is None:
            named.append("loss")
        return {name: self.scores[name] for name in named if name in self.scores}

    def epsilon(self, guarantee: str) -> float:
        """Epsilon after the last round, by the run's own accountant (`spent_epsilons`); infinity if
        the guarantee is off."""
        if all(row.get(f"epsilon_{guarantee}") is None for row in self.rounds):
            return math.inf
        return self._spent.get(guarantee, math.inf)

    @cached_property
    def _spent(self) -> Mapping[str, float]:
        return spent_epsilons(RunFolder(self.path), self.plan, self.rounds)


def score_word(records: Iterable[RunRecord]) -> str:
    """The name of the score of these runs: accuracy, r2, or score if it is not the same for all."""
    names = {record.score_name for record in records}
    if len(names) == 1:
        return names.pop()
    return SCORE


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The run folders among `paths` and below them, each once, in order of their names. Raises
    ConfigError: a path does not exist, no run is found, or one has lost its ledger."""
    found: dict[Path, None] = {}
    for path in paths:
        if not path.is_dir():
            raise ConfigError(f"{path} is not a folder")
        for config in sorted(path.rglob("config.yaml"), key=_natural):
            files = RunFolder(config.parent)
            if files.ledger_path.exists():
                found[files.path.resolve()] = None
            elif files.metrics_path.exists():
                raise ConfigError(
                    f"{files.path} has lost its {files.ledger_path.name}, so what it has spent is "
                    "not known: give the other folders"
                )
    if not found:
        raise ConfigError(
            f"no run folder in {', '.join(map(str, paths))}: one holds config.yaml and ledger.db"
        )
    return list(found)


def _natural(path: Path) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in path.parts]


def read_runs(folders: Sequence[Path]) -> list[RunRecord]:
    """The runs that have finished a round, named by their path below their common folder. Raises
    ConfigError: a file of a run is missing or damaged, or no run has finished a round."""
    return runs_and_spenders(folders)[0]


def runs_and_spenders(folders: Sequence[Path]) -> tuple[list[RunRecord], list[RunRecord]]:
    """The runs of `read_runs`, and those that have finished no round: one was killed in its first,
    or asked for statistics alone. Their ledgers say what they have spent."""
    shared = os.path.commonpath([folder.parent for folder in folders])
    found = [_read(folder, folder.relative_to(shared).as_posix()) for folder in folders]
    runs = [record for record in found if record.rounds]
    if not runs:
        first = RunFolder(folders[0]).metrics_path
        raise ConfigError(f"none of the runs has finished a round: {first} has no row")
    return runs, [record for record in found if not record.rounds]


def _read(folder: Path, name: str) -> RunRecord:
    files = RunFolder(folder)
    config = files.read_config()
    done = files.done()
    rounds = files.read_metrics()
    if fault := files.metrics_fault(rounds, done):
        raise ConfigError(fault)
    if (folder / ASKED).exists():
        asked = files.read_config(name=ASKED)
    else:
        asked = config
    privacy = _json(folder / "privacy.json")
    selection = _json(folder / SELECTION)
    public = [_json(folder / file) for file in (CONSTANT, TEST_SET, SHAPES, INTERVALS)]
    if public[2] is not None:
        with one_line(folder / SHAPES, ConfigError, "is damaged"):
            check_shapes(public[2])
    return RunRecord(
        name, folder, config, flat(described(asked)), rounds, privacy, selection, *public
    )


def _json(path: Path) -> dict[str, Any] | None:
    if not path.exists():
        return None
    value = read_json_file(path, ConfigError, "is damaged")
    if isinstance(value, dict):
        return value
    return None


def tried_settings(records: Sequence[RunRecord]) -> list[str]:
    """The settings in which the runs differ and that have an effect, in the order of the
    configuration."""

    def values(name: str) -> set[str]:
        return {repr(record.settings.get(name)) for record in records if matters(record, name)}

    names = [name for name in records[0].settings if not name.startswith("operations.")]
    return [name for name in names if name not in NOT_TRIED and len(values(name)) > 1]


def matters(record: RunRecord, name: str) -> bool:
    """True if a setting has an effect in a run; the clip norm of a guarantee that is off has
    none."""
    group, *rest = name.removeprefix("privacy.").split(".")
    if group in GUARANTEES and rest not in (["enabled"], ["kind"]):
        fixed = rest[0] == "clip" and record.config.privacy.user.clip.kind == "fixed"
        unused = fixed and rest[-1] in ("target_quantile", "learning_rate", "count_stddev")
        return group in record.plan.mechanisms and not unused
    return name != "data.alpha" or record.config.data.partition == "dirichlet"


def tried_values(record: RunRecord, tried: Sequence[str]) -> dict[str, str]:
    """The value of each tried setting in a run, formatted for readers, by the last two parts of its
    name; empty if it has no effect there."""
    return {
        ".".join(name.split(".")[-2:]): _text(record.settings.get(name))
        if matters(record, name)
        else ""
        for name in tried
    }


def _text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "-", True: "true", False: "false"}[value]
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


@dataclass(frozen=True, eq=False)
class Group:
    """Runs with the same settings, apart from `NOT_TRIED` and operations: repetitions of a run."""

    label: str
    records: tuple[RunRecord, ...]

    @property
    def scores(self) -> list[float]:
        """The score of the model of each run that has one."""
        found = (record.of_model(SCORE) for record in self.records)
        return [score for score in found if score is not None and math.isfinite(score)]

    @property
    def score(self) -> float:
        """The mean of the scores; NaN if no run has one."""
        if self.scores:
            return statistics.fmean(self.scores)
        return math.nan

    def epsilon(self, guarantee: str) -> float:
        """The largest epsilon of the runs."""
        return max(record.epsilon(guarantee) for record in self.records)

    def mean_series(self, column: str) -> Pairs:
        """(round, mean over the runs), for the rounds that every run has."""
        runs = [dict(record.series(column)) for record in self.records]
        rounds = sorted(set.intersection(*(set(run) for run in runs)))
        return [(number, statistics.fmean(run[number] for run in runs)) for number in rounds]


def group_runs(records: Sequence[RunRecord]) -> list[Group]:
    """The runs grouped by settings, in order. A group's label lists its differences from the
    others."""
    tried = tried_settings(records)
    if not tried and len(records) > 1:
        return [Group("all runs", tuple(records))]
    groups: dict[str, list[RunRecord]] = {}
    for record in records:
        label = ", ".join(
            f"{name} {value}" for name, value in tried_values(record, tried).items() if value
        )
        if record.plan.is_private:
            mark = ""
        else:
            mark = f"{NOT_PRIVATE}: "
        groups.setdefault(f"{mark}{label or record.name}", []).append(record)
    return [Group(label, tuple(members)) for label, members in groups.items()]


def split_same(rows: Sequence[Row]) -> tuple[Row, list[Row]]:
    """The cells that are the same in every row, and the rows without them. With a single row that
    is all cells."""
    same = {name: cell for name, cell in rows[0].items() if all(row[name] == cell for row in rows)}
    return same, [{name: cell for name, cell in row.items() if name not in same} for row in rows]


def runs_table(records: Sequence[RunRecord]) -> list[Row]:
    """A row for each run: scores and loss of its model, its epsilons, the tried settings, and the
    rest. A score that is federated in one of the runs is followed by its standard error."""
    tried = tried_settings(records)
    scores = list[str]()
    rated = dict.fromkeys(each.name for record in records for _, each in record.ratings)
    for score in dict.fromkeys([*score_columns(record.rounds[-1] for record in records), *rated]):
        scores.append(score)
        if score in rated:
            scores.append(f"{score}{ERROR}")
    return [_row(record, scores, tried) for record in records]


def _row(record: RunRecord, scores: Sequence[str], tried: Sequence[str]) -> Row:
    privacy = record.config.privacy
    rounds = record.rounds
    seed = record.config.seed
    if not record.plan.is_private:
        noise = "none"
    elif seed is None:
        noise = "secure"
    else:
        noise = f"seed {seed}"
    clip_norm = rounds[-1].get("clip_norm")
    if clip_norm == math.inf:  # the server clips nothing
        clip_norm = None
    return {
        "run": record.name,
        **{name: _number(record.of_model(name), ".4f") for name in scores},
        **{f"epsilon {name}": f"{record.epsilon(name):.4g}" for name in GUARANTEES},
        **tried_values(record, tried),
        "loss": _number(record.of_model("loss"), ".4f"),
        "rounds": f"{len(rounds)}/{record.config.rounds}",
        "delta": f"{privacy.delta:g}",
        "accountant": privacy.accountant,
        "clip norm": _number(clip_norm, ".4g"),
        "replies": f"{statistics.fmean(row.get('replies') or 0.0 for row in rounds):.1f}",
        "seconds": f"{sum(row.get('seconds') or 0.0 for row in rounds):.1f}",
        "noise": noise,
    }


def _number(value: float | None, form: str) -> str:
    if value is None:
        return ""
    return format(value, form)


def repetitions_table(records: Sequence[RunRecord]) -> list[Row]:
    """A row for each setting that was run more than once, with the spread."""
    mean = f"{score_word(records)}, mean"
    rows = []
    for group in group_runs(records):
        if len(scores := group.scores) > 1:
            numbers = {mean: group.score, "standard deviation": statistics.stdev(scores)}
            numbers |= {"lowest": min(scores), "highest": max(scores)}
            written = {name: f"{value:.4f}" for name, value in numbers.items()}
            rows.append({"setting": group.label, "runs": str(len(scores)), **written})
    return rows


def intervals_table(record: RunRecord) -> list[Row]:
    """A row for each score of a run's model on the public test set."""
    return [
        {"score": name.replace("_", " "), "value": f"{each[0]:.4f}", "95 %": interval_words(each)}
        for name, each in record.intervals.items()
    ]


def ratings_table(record: RunRecord) -> list[Row]:
    """Every federated score of a run with its standard errors; empty if there are none."""
    return [
        {
            "round": str(number),
            "number": rated.name,
            "value": f"{rated.value:.4f}"
            if rated.known
            else "not known: the noise leaves nothing to read",
            "standard error": f"{rated.error:.4f}" if rated.known else "",
            "standard error by noise alone": _number(rated.by_noise, ".4f") if rated.known else "",
        }
        for number, rated in record.ratings
    ]
