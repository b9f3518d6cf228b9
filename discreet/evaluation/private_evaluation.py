"""Models rated by clients, on data that each holds out of its own: when, at which price, and what is written of it: the
numbers in metrics.csv, and roc.csv, with a row a point, from the histograms that AUC is read from."""

from __future__ import annotations

import csv
import io
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from discreet.evaluation.answer_sum import AnswerNoise, NoisedByClients
from discreet.queries.answers import NoisedBlock, rising
from discreet.queries.metric_answers import LARGEST_LOGIT, SCORE_BINS, both_kinds
from discreet.queries.query import Query, Sums
from discreet.queries.scores import BY_NOISE, ERROR, Rated
from discreet.server.round import RoundSettings
from discreet.server.run_folder import RunFolder, replace_file
from discreet.settings.data import EvaluationConfig
from discreet.settings.rules import ConfigError

if TYPE_CHECKING:
    from dp_accounting import DpEvent

ROC_FILE = "roc.csv"
LARGEST_ERROR = 0.02  # of an accuracy: with more, differences between models drown

logger = logging.getLogger("discreet")


@dataclass(frozen=True)
class EvaluationPlan:
    """The plan by which clients rate the models of a run.

    Attributes:
      config: when.
      query: what they are asked.
      joined: the constants of a round whose cohort rates the model that it starts from. Its event is that of update,
        bits and answers together: they are about the same cohort.
      event: what it costs if a cohort is asked for nothing else, as after the last round; None if each client noises
        its own answer, and accounts it itself.
    """

    config: EvaluationConfig
    query: Query
    joined: RoundSettings
    event: DpEvent | None

    def is_due(self, number: int, *, last: bool) -> bool:
        """True if a cohort of its own rates the model after a round."""
        return last or (self.config.cohort == "own" and number > 0 and number % self.config.every == 0)

    def left(self, done: int, *, rounds: int) -> int:
        """The number of ratings by cohorts of their own that are left after `done` of all rounds."""
        _, planned = self.config.ratings(rounds)
        return planned - (done // self.config.every if self.config.cohort == "own" else 0)

    def announce(self) -> None:
        """Logs how far off the estimates are expected to be, by noise alone and with the chance of who is asked; warns
        if the population is too small for them. Estimates whose error can't be told before they are read are left out.
        """
        how, zeros = self.answers, [0.0] * self.query.length
        asked, everybody = (
            self.query.read(Sums(zeros, how.expected_cohort, how.stddev, probability))
            for probability in (1.0, how.probability)
        )
        known = {name: x.standard_error for name, x in asked.items() if math.isfinite(x.standard_error)}
        if isinstance(how, NoisedByClients) and how.of_examples:
            each = "; ".join(f"{name} {error:.4g} / m" for name, error in known.items())
            logger.info("clients rate the model; standard errors by noise if each holds out m examples: %s", each)
            return
        in_all = {name: everybody[name].standard_error for name in known}
        each = "; ".join(f"{name} {error:.4g} by noise, {in_all[name]:.4g} in all" for name, error in known.items())
        poor = known.get("accuracy", 0.0) > LARGEST_ERROR
        more = f". The population is too small for a useful number: {LARGEST_ERROR:g} by noise would be one"
        logger.log(
            logging.WARNING if poor else logging.INFO,
            "clients rate the model; standard errors: %s%s",
            *(each, more if poor else ""),
        )

    @property
    def answers(self) -> AnswerNoise | NoisedByClients:
        """The release of the answers' sum."""
        assert isinstance(self.joined.answers, AnswerNoise | NoisedByClients)
        return self.joined.answers

    def has_rated(self, folder: RunFolder, number: int) -> bool:
        """True if the row of a round holds a rating of the model after it. The untrained model has none."""
        rows = [row for row in folder.read_metrics() if row["round"] == number]
        return not rows or any(rows[-1].get(f"{name}{ERROR}") is not None for name in self.query.names())

    def write(
        self,
        folder: RunFolder,
        number: int,
        sums: Sums,
        *,
        also: Callable[[Mapping[str, object]], None],
        spent: Mapping[str, float] | None = None,
    ) -> None:
        """Adds to the row of round `number` how good the model after it is, says it, and tells `also`. `spent`: the
        epsilons, if the row is to include what this has cost."""
        noise_alone, found = self.query.read(replace(sums, probability=1.0)), self.query.read(sums)
        rated = [Rated(of, x.value, x.standard_error, noise_alone[of].standard_error) for of, x in found.items()]
        added: dict[str, float | None] = {each.name: each.value for each in rated}
        added |= {f"{each.name}{ERROR}": each.error for each in rated}
        added |= {f"{each.name}{BY_NOISE}": each.by_noise for each in rated}
        added |= spent or {}
        auc = [part for part in self.query.noised(sums) if part.block.name == "auc"]
        write_roc(folder.path, number, [point for part in auc for point in roc_points(part)])
        folder.replace_metrics([row | added if row["round"] == number else row for row in folder.read_metrics()])
        also({"round": number, **added})
        fields, said = {"event": "evaluation", "round": number, **added}, ", ".join(map(str, rated))
        logger.info("the model after round %d, by clients: %s", number, said, extra={"fields": fields})


@dataclass(frozen=True)
class RocPoint:
    """The effect of a threshold: examples with a score of at least `score`, in logits, are called positive.

    Attributes:
      of: what the score is of: a class, or a label.
      false_positive_rate, true_positive_rate: of the negatives and of the positives, in [0, 1]. Those of the lowest
        score are 1: all that lies below it counts too.
      false_positive_rate_error, true_positive_rate_error: their standard errors, as those of all clients.
    """

    of: str
    score: float
    false_positive_rate: float
    true_positive_rate: float
    false_positive_rate_error: float
    true_positive_rate_error: float


def roc_points(part: NoisedBlock) -> list[RocPoint]:
    """The points of the ROC curves of a block of AUC, from the highest threshold down, of each score in turn; none of a
    score of whose negatives or positives noise leaves nothing. Rates never fall as the threshold does."""
    edges = torch.linspace(-LARGEST_LOGIT, LARGEST_LOGIT, SCORE_BINS + 1, dtype=torch.float64).tolist()
    found = []
    for place, known in enumerate(both_kinds(part).tolist()):
        if known:
            curves = zip(edges, *(_rates(part, 2 * place + kind) for kind in range(2)), strict=True)
            points = [
                RocPoint(part.block.of[place], edge, false, true, its_error, error)
                for edge, (false, its_error), (true, error) in curves
            ]
            found += points[::-1]
    return found


def _rates(part: NoisedBlock, kind: int) -> list[tuple[float, float]]:
    """For each edge the share of one histogram that is not below it, and its standard error."""
    mean = part.mean.reshape(-1, SCORE_BINS)[kind]
    total, found = float(mean.sum()), []
    curve = rising(mean / total).tolist()
    for edge, below in enumerate([*curve[:-1], 1.0]):  # the last sum is 1, but for rounding
        gradient = torch.zeros_like(part.mean)
        chosen = (torch.arange(SCORE_BINS) < edge).double()
        gradient[kind * SCORE_BINS : (kind + 1) * SCORE_BINS] = (chosen - below) / total
        found.append((1 - below, part.error(gradient) if 0 < edge < SCORE_BINS else 0.0))
    return found


COLUMNS = ("round", *(field.name for field in fields(RocPoint)))


def write_roc(folder: Path, number: int, points: Sequence[RocPoint]) -> None:
    """Adds the curves of the model after a round, in place of those that are there of it; without points there is no
    file.

    Raises:
      ConfigError: the file that is there holds other rows.
    """
    path, rows = folder / ROC_FILE, list[Sequence[object]]()
    if path.exists():
        header, *old = csv.reader(io.StringIO(path.read_text(encoding="utf-8"), newline=""))
        if tuple(header) != COLUMNS:
            raise ConfigError(f"{path} is damaged: its columns are {', '.join(header)}")
        rows += [row for row in old if row[:1] != [str(number)]]
    rows += [(number, *astuple(point)) for point in points]
    if rows:
        text = io.StringIO(newline="")
        csv.writer(text).writerows([COLUMNS, *rows])
        replace_file(path, text.getvalue().encode())
