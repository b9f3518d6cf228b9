"""Ratings of the model: by whom, by which metrics, and how often."""

from __future__ import annotations

from dataclasses import field
from typing import Annotated

from discreet.settings.ranges import Count, OpenShare, Positive, different, one_of
from discreet.settings.rules import section

# What clients can be asked of a model: `discreet.queries.answers` says of which kind of target.
METRICS = ("accuracy", "loss", "auc", "calibration", "clients", "mae", "rmse", "r2")
# Means over a client's examples of vectors whose norm is bounded by a constant: one of m moves them by a share 1 / m.
MEANS = ("accuracy", "loss", "auc", "calibration", "mae", "rmse")


@section("evaluation.")
class EvaluationConfig:
    """Ratings of the model.

    Attributes:
      kind: public: on the server's public test set. private: by clients, on a part of their own data that they never
        train on; what they answer is noised, and paid for. none: not at all.
      every: private: the model is rated after so many rounds, again and again, and after the last one.
      cohort: own: each model is rated by a cohort drawn for it. same: by the next round's, before it trains.
      share: of each client's examples that it holds out, by a public rule (`discreet.data.partition`).
      metrics: what clients are asked.
      noise_multiplier: of the noise on the sum of all answers, over what one client can add to it; at example level of
        each client's noise on its own answer, over what one of its examples can add to it; with local privacy of that
        noise over how far other data of the client can move the answer.
    """

    kind: Annotated[str, one_of("public", "private", "none")] = "public"
    every: Count = 10
    cohort: Annotated[str, one_of("own", "same")] = "own"
    share: OpenShare = 0.2
    metrics: Annotated[list[str], different(*METRICS)] = field(default_factory=lambda: ["accuracy"])
    noise_multiplier: Positive = 10.0

    @property
    def private(self) -> bool:
        """True if clients rate the model."""
        return self.kind == "private"

    def joins(self, round_number: int) -> bool:
        """True if the cohort of a round also rates the model that it starts from."""
        return self.private and self.cohort == "same" and round_number > 1 and (round_number - 1) % self.every == 0

    def ratings(self, rounds: int) -> tuple[int, int]:
        """The numbers of ratings in so many rounds: by cohorts that also train, and by others."""
        times = -(-rounds // self.every) if self.private else 0
        return (0, times) if self.cohort == "own" else (max(0, times - 1), min(times, 1))
