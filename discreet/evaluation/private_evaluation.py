"""Models rated by clients, on data that each holds out of its own: when, at which price, and what is written of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from discreet.evaluation.answer_sum import AnswerNoise, NoisedByClients
from discreet.evaluation.roc import roc_points, write_roc
from discreet.queries.query import Query, Sums
from discreet.queries.scores import BY_NOISE, ERROR, Rated, unrated
from discreet.server.round import RoundSettings
from discreet.server.run_folder import RunFolder
from discreet.settings.evaluation import EvaluationConfig

if TYPE_CHECKING:
    from dp_accounting import DpEvent

Unrated = unrated
LARGEST_ERROR = 0.02  # of an accuracy: with more, differences between models drown

logger = logging.getLogger("discreet")


@dataclass(frozen=True)
class Outlook:
    """The expected error of private estimates, said before anything is spent.

    Attributes:
      by_noise: the standard error of each estimate by the noise alone: of the mean over the clients that are asked.
      in_all: of the mean over all clients: the noise and the chance of who is asked, with a bound on how much clients
        differ. Estimates whose error can't be told before they are read are in neither.
    """

    by_noise: Mapping[str, float]
    in_all: Mapping[str, float]

    @property
    def is_poor(self) -> bool:
        """True if the population is too small for a useful accuracy."""
        return self.by_noise.get("accuracy", 0.0) > LARGEST_ERROR

    def __str__(self) -> str:
        each = (f"{name} {error:.4g} by noise, {self.in_all[name]:.4g} in all" for name, error in self.by_noise.items())
        whole = f"clients rate the model; standard errors: {'; '.join(each)}"
        if not self.is_poor:
            return whole
        return f"{whole}. The population is too small for a useful number: {LARGEST_ERROR:g} by noise would be one"


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
        """Logs how far off the estimates are expected to be; warns if the population is too small for them."""
        outlook = self.outlook()
        if isinstance(self.answers, NoisedByClients) and self.answers.of_examples:
            each = "; ".join(f"{name} {error:.4g} / m" for name, error in outlook.by_noise.items())
            logger.info("clients rate the model; standard errors by noise if each holds out m examples: %s", each)
            return
        logger.log(logging.WARNING if outlook.is_poor else logging.INFO, "%s", outlook)

    def outlook(self) -> Outlook:
        """The expected error of the estimates. Clients that noise their own answers for one example are assumed to hold
        one held-out example each."""
        how, zeros = self.answers, [0.0] * self.query.length
        asked, everybody = (
            self.query.read(Sums(zeros, how.expected_cohort, how.stddev, probability))
            for probability in (1.0, how.probability)
        )
        known = [name for name, each in asked.items() if math.isfinite(each.standard_error)]
        return Outlook(*({name: found[name].standard_error for name in known} for found in (asked, everybody)))

    @property
    def answers(self) -> AnswerNoise | NoisedByClients:
        """The release of the answers' sum."""
        assert self.joined.answers is not None
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
        found = rated(self.query, sums)
        added: dict[str, float | None] = {each.name: each.value for each in found}
        added |= {f"{each.name}{ERROR}": each.error for each in found}
        added |= {f"{each.name}{BY_NOISE}": each.by_noise for each in found}
        added |= spent or {}
        auc = [part for part in self.query.noised(sums) if part.block.name == "auc"]
        write_roc(folder.path, number, [point for part in auc for point in roc_points(part)])
        folder.replace_metrics([row | added if row["round"] == number else row for row in folder.read_metrics()])
        also({"round": number, **added})
        fields = {"event": "evaluation", "round": number, **added}
        logger.info(
            "the model after round %d, by clients: %s", number, ", ".join(map(str, found)), extra={"fields": fields}
        )


def rated(query: Query, sums: Sums) -> list[Rated]:
    """Reads a model's ratings from a noised sum, each with both standard errors."""
    noise_alone = query.read(replace(sums, probability=1.0))
    return [
        Rated(name, each.value, each.standard_error, noise_alone[name].standard_error)
        for name, each in query.read(sums).items()
    ]
