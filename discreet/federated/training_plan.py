"""What a training run is to do: its rounds, their constants, and how its models are rated."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from discreet.federated.private_evaluation import EvaluationPlan
from discreet.federated.round import CohortSampling, RoundSettings
from discreet.privacy.randomness import RandomSource
from discreet.settings.privacy import PrivacyConfig

OnRound = Callable[[Mapping[str, object]], None]  # is told the row of metrics.csv of each round


def tell_nobody(row: Mapping[str, object]) -> None:
    """The hook of a run that has none."""


@dataclass(frozen=True)
class Plan:
    """What a run is to do.

    Attributes:
      source: of cohorts and noise; what round t draws depends on the source and t alone, so that a resumed run needs no
        stored random state.
      privacy: which guarantees are on, the delta, the accountant and the budget.
      chance_loss: of a model that gives 0 throughout: every class the same chance, or the middle of every range;
        infinity if it is not known.
      evaluation: how clients rate models; None if they do not.
      says: how a message calls the settings that it names.
      also: is told the row of metrics.csv of each round.
    """

    rounds: int
    settings: RoundSettings
    sampling: CohortSampling
    source: RandomSource
    privacy: PrivacyConfig
    chance_loss: float
    evaluation: EvaluationPlan | None = None
    says: Callable[[str], str] = str
    also: OnRound = tell_nobody

    def joins(self, number: int) -> bool:
        """Whether the cohort of a round also rates the model that it starts from."""
        return self.evaluation is not None and self.evaluation.config.joins(number)

    def settings_of(self, number: int) -> RoundSettings:
        """The constants of a round."""
        return self.evaluation.joined if self.evaluation and self.joins(number) else self.settings
