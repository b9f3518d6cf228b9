"""DP-FedAvg: clipped updates, and Gaussian noise that the server adds to their sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar

from discreet.accounting.events import (
    ACCOUNTANTS,
    PLD,
    RDP,
    fixed_size_round_event,
    joined_noise_multiplier,
    poisson_round_event,
)
from discreet.mechanisms.mechanism import (
    IN_THE_CLEAR,
    SERVER,
    ClientRound,
    ExpectedNoise,
    Participation,
    Statement,
)
from discreet.mechanisms.round_state import Released
from discreet.privacy.quantile import BIT_SENSITIVITY, default_count_stddev, split_noise_multiplier
from discreet.settings.adjacency import USER
from discreet.settings.client_settings import UNBOUND, ClientSettings
from discreet.settings.clip_choice import CLIP, AdaptiveClipping, ClipConfig, FixedClipping
from discreet.settings.privacy import PLANNED, Sizes
from discreet.settings.rules import ConfigError, require
from discreet.settings.training import FLOWER_APP
from discreet.settings.wording import Key, Wording

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from discreet.mechanisms.round_state import RoundState
    from discreet.mechanisms.sums import AnswerRelease, CohortSum, Replies
    from discreet.privacy.grid import Grid
    from discreet.privacy.mechanisms import Gaussian
    from discreet.privacy.randomness import RandomSource

ASKED_BEFORE = (
    "; and before the first round a Gaussian on the sum that gives the means and "
    "deviations of everybody's inputs"
)
OF_ANOTHER_APP = (
    "the train_config and the initial arrays, which are sent as they are",
    "the data that evaluate_fn works on, which are the server's own",
    "whatever the clients' code sends elsewhere",
)
REPORTED = ("the epsilons that clients report about their own guarantees",)
STATEFUL = (
    "nodes that keep state from round to round: draws of a cohort of fixed size depend on each "
    "other"
)


@dataclass(frozen=True)
class UserNoise:
    """The settings of a mechanism at user level; `CentralGaussian` says what they mean."""

    run: ClientSettings = UNBOUND
    clip: ClipConfig = CLIP
    sizes: Sizes = PLANNED
    _: KW_ONLY
    noise_multiplier: float | None = None
    target_epsilon: float | None = None
    max_epsilon: float | None = None
    delta: float = 1e-5
    clipping: AdaptiveClipping | FixedClipping = field(default_factory=AdaptiveClipping)
    accountant: str = PLD
    noise: str = "grid"
    too_noisy: str = "refuse"
    guarantee: ClassVar[str] = USER


@dataclass(frozen=True)
class CentralGaussian(UserNoise):
    """Hides all data of one client from observers of the released models; the server is trusted.

    Guarantee: for neighbouring cohorts that differ in one client, the sum before noise differs by
    at most C_t in L2 and the centred count by at most 1/2, whatever that client sends. Both are
    noised together as one Gaussian mechanism of multiplier z, sampled as the event says. Noise and
    denominator are functions of public constants and C_t alone: not of who replied. A sum of
    answers, which differs by at most 1, is part of the same mechanism, of multiplier (z^-2 +
    z_answers^-2)^(-1/2).

    Pass it to `DPFedAvg(mechanism=...)` with keywords; in a run it is made from the run's settings.

    Attributes:
      run: the settings that clients are told.
      clip: the rule by which an adaptive clip norm moves.
      sizes: of what is released.
      noise_multiplier: noise per sensitivity, of a round as a whole. Give this or `target_epsilon`.
      target_epsilon: the largest epsilon of `num_rounds` rounds, which determines the noise; also
        the budget.
      max_epsilon: the budget. The run ends before a round that would exceed it, and `start` returns
        the last model.
      delta: below 1 / population_size.
      clipping: `AdaptiveClipping` or `FixedClipping`.
      accountant: "pld" or "rdp".
      noise: "grid" (exact sums and rounded noise), "float", or "secure_sum" (each value a sum of 4
        draws).
      too_noisy: "refuse" or "warn": the reaction to settings with which noise drives the model.
    """

    charged_at: ClassVar[frozenset[str]] = frozenset((SERVER,))

    def _cohorts(self) -> tuple[str, str]:
        """The words for how cohorts are drawn, and for what a round is accounted as."""
        user = self.run.user
        cohort = round(self.run.expected_cohort)
        return {
            "poisson": (
                f"Poisson cohorts, q = {user.probability:g}",
                "a Poisson-sampled Gaussian a round, update and bits together",
            ),
            "fixed": (
                f"cohorts of {cohort} of {user.population_size} without replacement",
                "a Gaussian of half the noise multiplier, sampled without replacement, a round; "
                "by RDP",
            ),
            "everyone": (
                "everybody in every round, no amplification",
                "a Gaussian a round, update and bits together",
            ),
        }[user.sampling]

    def statement(self) -> Statement:
        user = self.run.user
        foreign = self.run.model.name == FLOWER_APP
        drawn, accounting = self._cohorts()
        rated, priced = ratings(self.run, "a Gaussian", "Gaussian noise on their sum at the server")
        if user.adaptive:
            kind = "adaptive"
        else:
            kind = "fixed"
        unit, who = protected(self.run)
        if user.sampling == "fixed":
            neighbours = "replace"
        else:
            neighbours = "add or remove"
        if self.run.data.normalise == "private":
            asked = ASKED_BEFORE
        else:
            asked = ""
        unamplified = (
            "amplification by sampling, towards an observer who sees which clients are asked"
        )
        return Statement(
            unit=unit,
            adjacency=f"{neighbours} one {who}",
            trusted="the server",
            observer=(
                "an observer of every released model and clip norm who does not see which "
                "clients take part"
            ),
            mechanism=f"DP-FedAvg with {kind} clip norm, {drawn}, Gaussian noise on the sum at "
            f"the server{rated}",
            accounting=f"{accounting}{priced}{asked}",
            not_covered=(
                "who took part in a round, and how many replied",
                *((unamplified,) if user.sampling != "everyone" else ()),
                *((STATEFUL,) if foreign and user.sampling == "fixed" else ()),
                *(OF_ANOTHER_APP if foreign else REPORTED),
            ),
        )

    @property
    def price_settings(self) -> Mapping[str, object]:
        return user_price_settings(self.run) | {"privacy.user.clip.count_stddev": self._count_noise}

    @property
    def accountants(self) -> tuple[str, ...]:
        if self.run.user.sampling == "fixed":
            return (RDP,)
        return ACCOUNTANTS

    @property
    def participation(self) -> Participation:
        return IN_THE_CLEAR

    def expected_noise(self, clip_norm: float) -> ExpectedNoise:
        from discreet.privacy.grid import grid_slack

        count = self._count_noise
        if self._exact:
            slack = grid_slack
        else:
            slack = None
        return ExpectedNoise(
            self._update_noise, clip_norm, self.run.expected_cohort, count_stddev=count, slack=slack
        )

    def event(self, number: int, *, again: bool = False) -> DpEvent:
        """The event of a round. If the cohort trains and rates the model, update, bits and answer
        are one Gaussian of multiplier (z^-2 + z_evaluation^-2)^(-1/2)."""
        ratings = self.run.evaluation
        if number not in ratings.rating_rounds:
            return self._event_of_training
        noise = joined_noise_multiplier(noise_of(self.run), ratings.noise_multiplier)
        return cohort_event(self.run, noise)

    @cached_property
    def _event_of_training(self) -> DpEvent:
        """The event of a round whose cohort rates no model."""
        return cohort_event(self.run, noise_of(self.run))

    @property
    def answers(self) -> AnswerRelease:
        from discreet.mechanisms.sums import rating_release

        event = cohort_event(self.run, self.run.evaluation.noise_multiplier)
        return rating_release(self.run, self.sizes, event=event)

    def at_client(self, number: int, num_examples: int, *, trains: bool) -> ClientRound:
        return ClientRound(self.run.user.noise_multiplier or 0.0)

    def add_up(self, replies: Replies, state: RoundState) -> CohortSum:
        from discreet.mechanisms.sums import AnswerSum, CohortSum, rating_release
        from discreet.privacy.clipping import ClippedSum
        from discreet.privacy.grid import grid_for

        size = state.params.numel()
        clip_norm = state.clip_norm
        grid = None
        if self._exact:
            scale = self._update_noise * clip_norm
            most = self.run.user.population_size
            grid = grid_for(clip_norm, size, largest_cohort=most, noise_scale=scale)
        answers = None
        if state.round + 1 in self.run.evaluation.rating_rounds:
            answers = AnswerSum(rating_release(self.run, self.sizes))
        total = CohortSum(ClippedSum(size, clip_norm, grid=grid), answers)
        for reply in replies:
            total.take(reply)
        return total

    def release(self, summed: CohortSum, state: RoundState, source: RandomSource) -> Released:
        """Noises the sum, the count and the answers, and moves the clip norm."""
        said = None
        if summed.answers is not None:
            said = summed.answers.released(source.child("answer"))
        # Draws the noise before the clip norm moves: C_t, not C_{t+1}, bounded this sum.
        noised = summed.clipped.noised(self._on_updates, source.child("update"))
        clip_norm = state.clip_norm
        fraction = None
        if self._count_noise is not None:
            clip_norm, fraction = self.clip.estimator.next_clip_norm(
                clip_norm,
                self._noised_count(summed.below, source.child("count")),
                number=state.round,
                expected_cohort=self.run.expected_cohort,
                count_stddev=self._count_noise,
            )
        return Released(noised, clip_norm, fraction, summed.replies, said)

    @cached_property
    def _exact(self) -> bool:
        return self.run.noise == "grid"

    @cached_property
    def _count_noise(self) -> float | None:
        """See `count_stddev`."""
        return count_stddev(self.run)

    @cached_property
    def _update_noise(self) -> float:
        """z_update, see `update_noise_multiplier`."""
        return update_noise_multiplier(noise_of(self.run), count_stddev=self._count_noise)

    @cached_property
    def _on_updates(self) -> Gaussian:
        """The noise on the sum of updates."""
        return self._gaussian(self._update_noise)

    @cached_property
    def _on_counts(self) -> Gaussian:
        """The noise on the count of norms below the clip norm."""
        assert self._count_noise is not None
        return self._gaussian(self._count_noise / BIT_SENSITIVITY)

    def _gaussian(self, noise_multiplier: float) -> Gaussian:
        from discreet.privacy.mechanisms import Gaussian

        return Gaussian(noise_multiplier, self.run.noise)

    @cached_property
    def _count_grid(self) -> Grid:
        """The grid of the count of norms below the clip norm."""
        from discreet.privacy.grid import grid_for

        stddev = self._count_noise
        assert stddev is not None
        most = self.run.user.population_size
        return grid_for(BIT_SENSITIVITY, 1, largest_cohort=most, noise_scale=stddev)

    def _noised_count(self, below: int, source: RandomSource) -> float:
        """The noised sum of (b - 1/2); `below` counts it in halves, so it is a whole number."""
        import torch

        count = below * BIT_SENSITIVITY
        if not self._exact:
            total = torch.tensor([count], dtype=torch.float64)
            return float(self._on_counts.add_noise(total, BIT_SENSITIVITY, source))
        grid = self._count_grid
        steps = torch.tensor([round(count / grid.step)])
        noised = self._on_counts.add_grid_noise(steps, BIT_SENSITIVITY, grid=grid, source=source)
        return float(noised) * grid.step


def noise_of(run: ClientSettings) -> float:
    """The noise multiplier of a whole round at user level; 0 draws no noise and protects nobody.
    ConfigError: a target has not chosen the noise yet."""
    noise = run.user.noise_multiplier
    if noise is None:
        rule = " must be given, or resolved from its target (got null)"
        raise ConfigError(Wording(Key("privacy.user.noise_multiplier"), rule))
    return noise


def cohort_event(run: ClientSettings, noise_multiplier: float) -> DpEvent:
    """The event of a Gaussian sum over one cohort of a run."""
    user = run.user
    if user.sampling == "fixed":
        size = round(user.probability * user.population_size)
        population = user.population_size
        return fixed_size_round_event(
            size, population_size=population, noise_multiplier=noise_multiplier
        )
    return poisson_round_event(user.probability, noise_multiplier=noise_multiplier)


def user_price_settings(run: ClientSettings) -> dict[str, object]:
    """The settings that decide the cost of a round with an adaptive or a fixed clip norm."""
    return {
        "privacy.user.noise_multiplier": run.user.noise_multiplier,
        "privacy.user.clip.kind": "adaptive" if run.user.adaptive else "fixed",
    }


def protected(run: ClientSettings) -> tuple[str, str]:
    """The protected unit, and the data owner that it belongs to. In another Flower app only nodes
    are known: the app decides whether a node is a person, a device or a hospital."""
    foreign = run.model.name == FLOWER_APP
    if foreign:
        return ("everything that one node holds", "node")
    return ("all data of one client", "client")


def ratings(run: ClientSettings, what: str, drawn: str) -> tuple[str, str]:
    """The ratings by clients, as part of the mechanism and of the accounting."""
    asked = run.evaluation
    if not asked.private:
        return "", ""
    own = asked.cohort == "own"
    if run.masked:
        rated = "for each rating, by all clients,"
    elif own:
        rated = "for each rating, by a cohort of its own,"
    else:
        rated = "for the last rating"
    if own:
        joined = ""
    else:
        joined = "in a round that also rates the model its answer too; "
    return (
        f"; clients rate the model on held-out examples of their own every {asked.every} rounds "
        f"and at the end, each answer clipped to norm 1, {drawn}",
        f"; {joined}{rated} {what} of noise multiplier {asked.noise_multiplier:g}",
    )


def count_stddev(run: ClientSettings) -> float | None:
    """The noise on the count of norms below the clip norm; None with a fixed clip norm.

    Raises:
      ConfigError: a target has not chosen the noise yet, or it is so small that the bits alone
        would cost more than the round may.
    """
    if not run.user.adaptive:
        return None
    noise = noise_of(run)
    value = run.user.count_stddev
    if value is None:
        value = default_count_stddev(
            run.user.probability * run.user.population_size, noise_multiplier=noise
        )
    if noise > 0 and value <= noise / 2:
        rule = f"above noise_multiplier / 2 = {noise / 2:g}"
        require(False, "privacy.user.clip.count_stddev", rule, f"{value:g}")
    return value


def update_noise_multiplier(noise_multiplier: float, *, count_stddev: float | None) -> float:
    """z_update, chosen so that update and bits together are one Gaussian of multiplier z; equal to
    z if there are no bits."""
    if count_stddev is None or noise_multiplier == 0:
        return noise_multiplier
    return split_noise_multiplier(noise_multiplier, count_stddev=count_stddev)
