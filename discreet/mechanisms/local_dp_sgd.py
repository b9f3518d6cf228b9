"""DP-SGD inside each client."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar

from discreet.accounting.events import ACCOUNTANTS, poisson_round_event
from discreet.mechanisms.client_noise import LocalPrivacy, OwnNoise
from discreet.mechanisms.mechanism import (
    CLIENTS,
    IN_THE_CLEAR,
    ONE_OWNER,
    ONE_PERSON,
    UNITS,
    ClientRound,
    ExpectedNoise,
    Participation,
    Statement,
    Unreachable,
    unnoised_at_server,
)
from discreet.mechanisms.round_state import Released
from discreet.settings.adjacency import ADD_OR_REMOVE, EXAMPLE, OF_OWNERS, ZERO_OUT
from discreet.settings.client_settings import ClientSettings
from discreet.settings.clip_choice import CLIP, ClipConfig
from discreet.settings.privacy import PLANNED, Sizes

if TYPE_CHECKING:
    from discreet.mechanisms.round_state import RoundState
    from discreet.mechanisms.sums import AnswerRelease, CohortSum, Replies
    from discreet.privacy.randomness import RandomSource
    from discreet.training.local_training import LocalSettings

MOST_STEPS = 10**6  # of a client in a round, for the bound on what noise may err


@dataclass(frozen=True)
class LocalDpSgd:
    """Hides one example of one client, or one owner with all its rows, from everybody else; only
    the client itself is trusted.

    Attributes:
      run, clip, sizes: as `CentralGaussian` has them.
    """

    run: ClientSettings
    clip: ClipConfig = CLIP
    sizes: Sizes = PLANNED
    guarantee: ClassVar[str] = EXAMPLE
    charged_at: ClassVar[frozenset[str]] = frozenset((CLIENTS,))

    def _ratings(self) -> tuple[str, str]:
        """The words for how clients rate models, and for what that is accounted as."""
        asked = self.run.evaluation
        if not asked.private:
            return "", ""
        rated = (
            f"; the client rates the model every {asked.every} rounds and at the end on the m "
            "examples that it holds out, with Gaussian noise of standard deviation "
            f"{asked.noise_multiplier:g} / m on its own answer, which one example moves by 1 / m"
        )
        priced = (
            f", and for each answer a Gaussian of noise multiplier {asked.noise_multiplier:g}, "
            "added up as if both were about the same examples"
        )
        return rated, priced

    def statement(self) -> Statement:
        declared = self.run.data.public_num_examples
        size = self.run.training.batch_size
        unit = self.run.example.unit_name
        if declared is None:
            adjacency = ZERO_OUT
        else:
            adjacency = ADD_OR_REMOVE
        probability = "batch_size / n"
        clipping = "per-example clipping"
        rated, priced = self._ratings()
        uncovered = [
            f"the number n of a client's {unit}s, which decides q, the number of "
            "steps, and so the epsilon that it reports",
            f"adding or removing an {unit}: it changes q for all others, and may cost more; see "
            "data.public_num_examples",
        ]
        if declared is not None:
            probability = f"batch_size / public_num_examples = {size} / {declared}"
            where = "with respect to runs without data.public_num_examples in the same ledger"
            uncovered = [f"adding or removing an {unit}, {where}"]
        if self.run.example.by_owner:
            adjacency = OF_OWNERS[adjacency]
            probability += f" of owners, each with at most {self.run.example.rows_per_owner} rows"
            clipping = "the gradient of the mean loss over an owner's rows clipped as one"
        return Statement(
            unit=UNITS[unit],
            adjacency=adjacency,
            trusted="only the client itself",
            observer="everybody else, including the server",
            mechanism=f"DP-SGD inside the client: Poisson batches with q = {probability}, "
            f"{clipping}, Gaussian noise on the sum{rated}",
            accounting=f"a Poisson-sampled Gaussian a local step{priced}, over every round of "
            "every run in the client's ledger",
            not_covered=(
                *uncovered,
                ONE_OWNER if self.run.example.by_owner else ONE_PERSON,
                "that a client took part, and so that its data could be read",
            ),
        )

    @property
    def price_settings(self) -> Mapping[str, object]:
        return example_price_settings(self.run)

    @property
    def accountants(self) -> tuple[str, ...]:
        return ACCOUNTANTS

    @property
    def participation(self) -> Participation:
        if self.run.example.by_owner:
            return Participation(one_by_one="privacy.example.unit=owner")
        return IN_THE_CLEAR

    def expected_noise(self, clip_norm: float) -> ExpectedNoise:
        if self.run.noise == "grid":
            slack = _steps_slack
        else:
            slack = None
        return replace(unnoised_at_server(self.run), slack=slack, sums="rounded")

    def event(self, number: int, *, again: bool = False) -> None:
        """None: clients pay for each of their steps."""

    @property
    def answers(self) -> AnswerRelease:
        from discreet.mechanisms.sums import rating_release

        return rating_release(self.run, self.sizes, own=answer_noise(self.run))

    def at_client(self, number: int, num_examples: int, *, trains: bool) -> ClientRound:
        from discreet.training.local_training import example_event, steps_of

        training = local_settings(self.run, num_examples)
        assert training.example is not None
        if trains:
            steps = steps_of(num_examples, training)
        else:
            steps = 0
        events = ((example_event(num_examples, training), steps),) if steps else ()
        return ClientRound(training.example.noise_multiplier, events, training=training)

    def add_up(self, replies: Replies, state: RoundState) -> CohortSum:
        from discreet.mechanisms.sums import AnswerSum, add_up_unnoised, rating_release

        answers = None
        if state.round + 1 in self.run.evaluation.rating_rounds:
            own = answer_noise(self.run)
            answers = AnswerSum(rating_release(self.run, self.sizes, own=own))
        return add_up_unnoised(replies, state, answers)

    def release(self, summed: CohortSum, state: RoundState, source: RandomSource) -> Released:
        """The sum unchanged: clients have noised it."""
        from discreet.mechanisms.sums import release_unnoised

        return release_unnoised(summed, state, source)


def example_price_settings(run: ClientSettings) -> dict[str, object]:
    """The settings that decide the cost of one example's part in a step."""
    names = ("unit", "noise_multiplier", "target_epsilon", "clip_norm")
    settings = {f"privacy.example.{name}": getattr(run.example, name) for name in names}
    return settings | {"data.public_num_examples": run.data.public_num_examples}


def answer_noise(run: ClientSettings) -> OwnNoise:
    """The noise that a client draws on its own answers about its examples."""
    noise = LocalPrivacy("gaussian", 1.0, run.evaluation.noise_multiplier, run.noise)
    return OwnNoise(noise, of_examples=True)


def _steps_slack(values: int, _: float) -> float:
    """The slack of a round's steps, which are far fewer than MOST_STEPS."""
    from discreet.privacy.rounded_sums import gaussian_slack

    return MOST_STEPS * gaussian_slack(values)


def local_settings(run: ClientSettings, num_examples: int) -> LocalSettings:
    """The local work of a client with `num_examples` examples, or owners if these are the unit.

    The noise meets `privacy.example.target_epsilon` for a client that takes part in every planned
    round and rates every model that is due for rating. A client that is sampled less often spends
    less.

    Raises:
      Unreachable: no noise meets the target, because the ratings alone exceed it.
    """
    from discreet.training.local_training import (
        ExamplePrivacy,
        sampling_probability,
        settings_without_noise,
        steps_of,
    )

    example = run.example
    settings = settings_without_noise(run.training, run.task)
    declared = run.data.public_num_examples
    private = ExamplePrivacy(
        example.clip_norm, example.noise_multiplier or 0.0, run.noise, declared, example.most_rows
    )
    settings = replace(settings, example=private)
    if example.noise_multiplier is not None:
        return settings
    assert example.target_epsilon is not None
    size = max(1, num_examples)
    rating = run.evaluation
    stepped = sampling_probability(size, settings), steps_of(size, settings) * run.rounds
    rated = rating.noise_multiplier, sum(rating.ratings(run.rounds))
    try:
        noise_multiplier = _calibrate(
            example.target_epsilon,
            run.delta,
            accountant=run.accountant,
            stepped=stepped,
            rated=rated,
        )
    except ValueError as error:
        target = f"privacy.example.target_epsilon={example.target_epsilon:g}"
        raise Unreachable(
            f"{target} can't be reached with the ratings of models: {error}"
        ) from error
    return replace(settings, example=replace(private, noise_multiplier=noise_multiplier))


@lru_cache(maxsize=1024)
def _calibrate(
    target: float,
    delta: float,
    *,
    accountant: str,
    stepped: tuple[float, int],
    rated: tuple[float, int],
) -> float:
    """The noise multiplier that meets the target. `stepped`: the sampling probability and number of
    steps; `rated`: the noise and number of answers."""
    from discreet.accounting.calibration import noise_multiplier_for_epsilon  # not in a guard

    probability, count = stepped
    rating, times = rated
    answers = ((poisson_round_event(1.0, noise_multiplier=rating), times),) if times else ()
    return noise_multiplier_for_epsilon(
        target,
        releases=lambda noise: (
            (poisson_round_event(probability, noise_multiplier=noise), count),
            *answers,
        ),
        delta=delta,
        accountant=accountant,
    )
