"""Clients' ratings of a run's models, on held-out data of their own: their schedule and price, and
their results in metrics.csv and roc.csv."""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from discreet.mechanisms.mechanism_table import own_noise
from discreet.mechanisms.sums import AnswerMechanism, AnswerRelease, rating_release
from discreet.planning.plan import Plan
from discreet.queries.query import Query, Sums
from discreet.run_files.csv_text import csv_text
from discreet.run_files.metrics_table import BY_NOISE, ERROR, Rated
from discreet.run_files.run_folder import RunFolder
from discreet.run_files.whole_files import replace_file
from discreet.server.roc import RocPoint, roc_points
from discreet.settings.data import EvaluationConfig

if TYPE_CHECKING:
    from dp_accounting import DpEvent

LARGEST_ERROR = 0.02  # of an accuracy: with more, differences between models drown

logger = logging.getLogger("discreet")


@dataclass(frozen=True)
class RatingPlan:
    """The plan by which clients rate the models of a run.

    Attributes:
      config: the schedule.
      query: the query that clients answer.
      answers: the release of their answers.
      mechanism: the release for a cohort that is asked for nothing else, as after the last
    round.
    """

    config: EvaluationConfig
    query: Query
    answers: AnswerRelease
    mechanism: AnswerMechanism

    @property
    def event(self) -> DpEvent | None:
        """The cost of asking a cohort for nothing else; None if each client noises its own answer
        and accounts for it itself."""
        return self.mechanism.event

    def is_due(self, number: int, *, last: bool) -> bool:
        """True if a separate cohort rates the model after a round."""
        return last or (
            self.config.cohort == "own" and number > 0 and number % self.config.every == 0
        )

    def left(self, done: int, *, rounds: int) -> int:
        """The number of ratings by separate cohorts that remain after `done` of all rounds."""
        _, planned = self.config.ratings(rounds)
        return planned - (done // self.config.every if self.config.cohort == "own" else 0)

    def announce(self) -> None:
        """Logs the expected error of the estimates if it is known before they are read. Warns if
        the population is too small for them."""
        how = self.answers
        zeros = [0.0] * self.query.length
        asked, everybody = (
            self.query.read(Sums(zeros, how.expected_cohort, how.stddev, probability))
            for probability in (1.0, how.probability)
        )
        known = {
            name: x.standard_error for name, x in asked.items() if math.isfinite(x.standard_error)
        }
        if how.own is not None and how.own.of_examples:
            each = "; ".join(f"{name} {error:.4g} / m" for name, error in known.items())
            logger.info(
                (
                    "clients rate the model; standard errors due to noise, if each holds "
                    "out m examples: %s"
                ),
                each,
            )
            return
        in_all = {name: everybody[name].standard_error for name in known}
        said = "; ".join(
            f"{name} {error:.4g} due to noise, {in_all[name]:.4g} in total"
            for name, error in known.items()
        )
        poor = known.get("accuracy", 0.0) > LARGEST_ERROR
        if poor:
            said += (
                ". The population is too small for a useful number: the standard "
                f"error due to noise is above {LARGEST_ERROR:g}"
            )
        if poor:
            level = logging.WARNING
        else:
            level = logging.INFO
        logger.log(level, "clients rate the model; standard errors: %s", said)

    def has_rated(self, folder: RunFolder, number: int) -> bool:
        """True if the row of a round holds a rating of the model after it. The untrained model has
        none."""
        rows = [row for row in folder.read_metrics() if row["round"] == number]
        return not rows or any(
            rows[-1].get(f"{name}{ERROR}") is not None for name in self.query.names()
        )

    def write(
        self,
        folder: RunFolder,
        number: int,
        sums: Sums,
        *,
        answered: tuple[int, int],
        spent: Mapping[str, float] | None = None,
    ) -> dict[str, object]:
        """Adds the rating of the model after round `number` to that round's row, logs it, and
        returns its numbers. `answered`: the numbers of clients that answered and that were asked.
        `spent`: the epsilons, if the row should include the cost of the rating."""
        rated = self._rated(sums)
        added = dict[str, float | None]()
        for each in rated:
            added |= {
                each.name: each.value,
                each.name + ERROR: each.error,
                each.name + BY_NOISE: each.by_noise,
            }
        added |= spent or {}
        auc = [part for part in self.query.noised(sums) if part.block.name == "auc"]
        write_roc(
            folder.path / "roc.csv", number, [point for part in auc for point in roc_points(part)]
        )
        folder.replace_metrics(
            [row | added if row["round"] == number else row for row in folder.read_metrics()]
        )
        said = ", ".join(map(str, rated))
        level = logging.INFO
        if not answered[0]:
            level = logging.WARNING
            said += ". No client gave a usable answer: these numbers are noise alone"
        logger.log(
            level,
            "the model after round %d, rated by %d of %d clients: %s",
            number,
            *answered,
            said,
            extra={"fields": {"event": "evaluation", "round": number, **added}},
        )
        return {"round": number, **added}

    def _rated(self, sums: Sums) -> list[Rated]:
        """The metrics, each with its error from sampling and noise, and from noise alone."""
        noise_alone = self.query.read(replace(sums, probability=1.0))
        return [
            Rated(name, found.value, found.standard_error, noise_alone[name].standard_error)
            for name, found in self.query.read(sums).items()
        ]


def answers_of(plan: Plan, query: Query) -> AnswerRelease:
    """The release of the answers to a query, noised at the server or by each client."""
    return rating_release(plan.run, plan.sizes, own=own_noise(plan.run, query.l1_norm))


def rating_plan(plan: Plan) -> RatingPlan | None:
    """The plan for clients' ratings of models; None if they rate none."""
    if plan.query is None:
        return None
    mechanism = plan.mechanism.answers
    assert mechanism is not None
    return RatingPlan(plan.run.evaluation, plan.query, answers_of(plan, plan.query), mechanism)


def write_roc(path: Path, number: int, points: Sequence[RocPoint]) -> None:
    """Replaces the curves of the model after a round with these. Writes no file without points."""
    if path.exists():
        rows = list(csv.reader(path.open(encoding="utf-8", newline="")))[1:]
    else:
        rows = []
    kept = [row for row in rows if row[0] != str(number)]
    if kept or points:
        table = [("round", *RocPoint._fields), *kept, *((number, *point) for point in points)]
        replace_file(path, csv_text(table, end="\r\n").encode())
