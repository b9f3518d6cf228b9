"""The audit of secure aggregation at user level: one masked sum is opened again and again, with a client and without.

Only the honest clients of the worst case take part, n - d - c of them: what more of them add, and the noise that
colluding clients know and take off, makes no sum easier to read. The canary is one of them. If it is out, its vector is
zeroed out but for its noise, as neighbours have it. Masks change no bit of a sum, so that there are none. In a round
that also rates the model the canary moves update, bit and answer: they are one vector, which is charged as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from dp_accounting import DpEvent
from torch import Tensor

from discreet.audit.auditor import noised_sum
from discreet.audit.canaries import draw_canaries
from discreet.audit.canary_scores import Experiment
from discreet.audit.masked_sums import MakeVector, Opening, opened, repeated
from discreet.client.noised_vector import Values, noised_vector
from discreet.config import ConfigError, RunConfig
from discreet.federated.messages import TRAIN, TrainRequest, Work
from discreet.federated.query import EVALUATION
from discreet.federated.round import RoundSettings
from discreet.federated.run_plan import evaluation_plan, round_settings
from discreet.federated.secure_round import secure_answers, secure_round
from discreet.federated.session import checked, evaluation_query
from discreet.federated.state import State, initial_state
from discreet.privacy.quantile import BIT_SENSITIVITY
from discreet.privacy.randomness import RandomSource, source_of
from discreet.privacy.secure_grid import SecureSum
from discreet.secure_settings import Sizes
from discreet.settings import client_settings
from discreet.tasks.examples import Task
from discreet.tasks.model_check import num_params_of

NOTHING = "nothing"  # the query of a request that asks for no update, and that no client answers
LONG = 1e4  # times the norm that it is clipped to: the length of the canary's update, and of its answer


@dataclass(frozen=True)
class SecureAudit:
    """What is put to the test.

    Attributes:
      releases: how many sums with what the canary adds, and as many without.
      of_answers: whether it is the sum that rates the model, if a cohort of its own is asked for that.
    """

    releases: int = 2000
    of_answers: bool = False


def audit_secure(config: RunConfig, audit: SecureAudit, *, make: MakeVector = noised_vector) -> Experiment:
    """Repeats a round under secure aggregation, and scores the canary by all that it opens: the update, the count, and
    with `evaluation.cohort=same` the answers.

    Raises:
      ConfigError: the user level has no secure aggregation with noise, the answers of clients that answer nothing are
        to be audited, or there are fewer than two releases.
    """
    if not config.privacy.user.secure or config.privacy.user.noise_multiplier == 0:
        raise ConfigError("an audit of masked sums needs privacy.user.aggregation=secure, with noise")
    resolved, task = checked(config)
    asked = _asked(resolved, task, of_answers=audit.of_answers)
    source = source_of(config.seed).child("audit")
    round_ = MaskedRound.of(resolved, asked, source)

    def score(included: bool, source: RandomSource) -> float:
        return round_.score(included, source, make)

    opening = Opening(asked.says, asked.vector, asked.event)
    return repeated(resolved, opening, score, releases=audit.releases, source=source)


@dataclass(frozen=True)
class Asked:
    """What is opened again and again.

    Attributes:
      settings: of a round; with `answers` if the model is rated.
      work: what clients are asked for.
      event: what it costs.
    """

    settings: RoundSettings
    work: Work
    event: DpEvent

    @property
    def vector(self) -> SecureSum:
        """What clients add up."""
        assert self.settings.secure is not None
        return self.settings.secure

    @property
    def says(self) -> str:
        """In words."""
        if not self.work.query:
            return "a masked sum"
        return "a masked sum that also rates the model" if self.work.trains else "a masked sum of ratings"


def _asked(resolved: RunConfig, task: Task, *, of_answers: bool) -> Asked:
    query, num_params = evaluation_query(resolved, task), num_params_of(resolved.model.name, task)
    if of_answers and query is None:
        raise ConfigError("evaluation.kind must be private: otherwise clients answer nothing that could be audited")
    settings = round_settings(resolved, Sizes(num_params, 1 if query is None else query.length))
    if query is not None and (of_answers or resolved.evaluation.cohort == "same"):
        plan = evaluation_plan(resolved, query, num_params=num_params)
        if resolved.evaluation.cohort == "own":
            assert plan.event is not None
            return Asked(plan.joined, Work(trains=False, query=EVALUATION), plan.event)
        assert plan.joined.user is not None
        return Asked(plan.joined, Work(query=EVALUATION), plan.joined.user.event)
    assert settings.user is not None
    return Asked(settings, TRAIN, settings.user.event)


@dataclass(frozen=True, eq=False)
class MaskedRound:
    """A round whose clients send nothing but noise, the canary aside.

    Attributes:
      asked: what is opened.
      told: what the canary is asked, and what it puts into the sum.
      rests: the same of clients that put nothing but noise into the sum.
      direction: of the canary's update, (num_params,), of norm 1.
    """

    asked: Asked
    told: tuple[TrainRequest, Values]
    rests: tuple[TrainRequest, Values]
    start: State
    direction: Tensor

    @classmethod
    def of(cls, config: RunConfig, asked: Asked, source: RandomSource) -> MaskedRound:
        """The first round of a run."""
        vector, clip_norm = asked.vector, config.privacy.user.clip.norm
        direction = draw_canaries(1, vector.num_params, source.child("direction")).direction(0)
        start = initial_state(torch.zeros_like(direction), clip_norm=clip_norm)
        silent = Values((LONG * clip_norm * direction).float(), below=vector.bit_steps > 0)
        answer = torch.zeros(max(1, vector.answer_length))
        answer[0] = LONG
        request = TrainRequest(1, clip_norm, client_settings(config), work=asked.work)
        told = request, replace(silent, answer=answer if asked.work.query else None)
        rests = replace(request, work=Work(trains=False, query=NOTHING)), silent
        return cls(asked, told, rests, start, direction)

    def score(self, included: bool, source: RandomSource, make: MakeVector) -> float:
        """Of one opened sum: the log-likelihood ratio of in and out, up to a constant and to rounding."""
        vector, settings = self.asked.vector, self.asked.settings
        each = [self.told if included else self.rests, *[self.rests] * (vector.summands - 1)]
        vectors = [make(vector, values, request, source.child(number)) for number, (request, values) in enumerate(each)]
        sealed = opened(vector, vectors)
        if not self.asked.work.trains:
            sums = secure_answers(sealed, settings, event=self.asked.event, charge=lambda _: None)
            return sums.values[0] / self._variance(vector.answer_steps)
        after, seen = secure_round(self.start, sealed, settings, charge=lambda _: None)
        clip_norm = self.start.clip_norm
        moved = float(noised_sum(settings, self.start, after) @ self.direction) / clip_norm
        score = moved / self._variance(vector.clip_steps)
        # A fraction that was clamped to 0 or 1 hides the count.
        if seen.fraction_below is not None and 0 < seen.fraction_below < 1:
            count = (seen.fraction_below - 0.5) * settings.expected_cohort
            score += count / BIT_SENSITIVITY / self._variance(vector.bit_steps)
        if seen.answers is not None:
            score += seen.answers.values[0] / self._variance(vector.answer_steps)
        return score

    def _variance(self, steps: int) -> float:
        """Of the noise on an entry, in units of what the canary adds: so many steps."""
        return self.asked.vector.summands * self.asked.vector.variance / steps**2
