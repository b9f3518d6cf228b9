"""DP-FedAvg: clipped updates, and Gaussian noise that the server adds to their sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from discreet.accounting.events import fixed_size_round_event, joined_noise_multiplier, poisson_round_event
from discreet.mechanisms.mechanism import Released, Round, ServerMechanism, Statement, expected_cohort
from discreet.privacy.quantile import BIT_SENSITIVITY, default_count_stddev, split_noise_multiplier
from discreet.settings.client_settings import ClientSettings
from discreet.settings.privacy import PRIVACY_DRAWS, USER
from discreet.settings.rules import ConfigError
from discreet.settings.training import FLOWER_APP

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from discreet.mechanisms.sums import CohortSum, Replies
    from discreet.privacy.grid import Grid
    from discreet.privacy.mechanisms import Gaussian
    from discreet.privacy.randomness import RandomSource

ASKED_BEFORE = "; and before the first round a Gaussian of everybody's means and deviations of inputs"
OF_ANOTHER_APP = (
    "the train_config and the initial arrays, which are sent as they are",
    "the data that evaluate_fn works on, which are the server's own",
    "what the clients' code sends elsewhere",
)
REPORTED = ("the epsilons that clients report about their own guarantees",)
STATEFUL = "nodes that keep state from round to round: draws of a cohort of fixed size depend on each other"
SETTINGS = ("privacy.user.noise_multiplier", "privacy.user.clip.kind")


@dataclass(frozen=True)
class CentralGaussian(ServerMechanism):
    """All data of one client, from whoever sees the released models; the server is trusted."""

    guarantee: ClassVar[str] = USER
    deciding: ClassVar[tuple[str, ...]] = SETTINGS

    def statement(self) -> Statement:
        user, cohort, foreign = self.run.user, round(expected_cohort(self.run)), self.run.model.name == FLOWER_APP
        drawn, accounting = {
            "poisson": (
                f"Poisson cohorts, q = {user.probability:g}",
                "a Poisson-sampled Gaussian a round, update and bits together",
            ),
            "fixed": (
                f"cohorts of {cohort} of {user.population_size} without replacement",
                "a Gaussian of half the noise multiplier, sampled without replacement, a round; by RDP",
            ),
            "everyone": (
                "everybody in every round, no amplification",
                "a Gaussian a round, update and bits together",
            ),
        }[user.sampling]
        rated, priced = ratings(self.run, "a Gaussian", "Gaussian noise on their sum at the server")
        kind, (unit, who) = "adaptive" if user.adaptive else "fixed", protected(self.run)
        neighbours = "replace" if user.sampling == "fixed" else "add or remove"
        unamplified = "amplification by sampling, towards who sees which clients are asked"
        return Statement(
            unit=unit,
            adjacency=f"{neighbours} one {who}",
            trusted="the server",
            observer="who sees every released model and clip norm, but not who takes part",
            mechanism=f"DP-FedAvg with {kind} clip norm, {drawn}, Gaussian noise on the sum at the server{rated}",
            accounting=f"{accounting}{priced}{ASKED_BEFORE if self.run.data.normalise == 'private' else ''}",
            not_covered=(
                "who took part in a round, and how many replied",
                *((unamplified,) if user.sampling != "everyone" else ()),
                *((STATEFUL,) if foreign and user.sampling == "fixed" else ()),
                *(OF_ANOTHER_APP if foreign else REPORTED),
            ),
        )

    @property
    def decided(self) -> Mapping[str, object]:
        return {"privacy.user.clip.count_stddev": count_stddev(self.run)}

    @property
    def only_rdp(self) -> bool:
        return self.run.user.sampling == "fixed"

    def grid_slack(self, values: int, scale: float) -> float | None:
        from discreet.privacy.grid import grid_slack

        return grid_slack(values, scale) if self.exact else None

    @property
    def count_stddev(self) -> float | None:
        return count_stddev(self.run)

    @property
    def exact(self) -> bool:
        return self.run.noise == "grid"

    @property
    def sum_noise(self) -> float:
        """z_update, see `update_noise_multiplier`."""
        return update_noise_multiplier(self.noise_multiplier, count_stddev=self.count_stddev)

    def event(self, noise_multiplier: float, *, trains: bool = True, rates: bool = False) -> DpEvent:
        """Of a cohort that trains and rates the model, update, bits and answer are one Gaussian of the multiplier
        (z^-2 + z_evaluation^-2)^(-1/2)."""
        user, rating = self.run.user, self.run.evaluation.noise_multiplier
        if rates:
            noise_multiplier = joined_noise_multiplier(noise_multiplier, rating) if trains else rating
        if user.sampling == "fixed":
            size, population = round(user.probability * user.population_size), user.population_size
            return fixed_size_round_event(size, population_size=population, noise_multiplier=noise_multiplier)
        return poisson_round_event(user.probability, noise_multiplier=noise_multiplier)

    def empty(self, num_params: int, clip_norm: float) -> CohortSum:
        from discreet.mechanisms.sums import CohortSum

        return CohortSum(num_params, clip_norm, self._grid(clip_norm, num_params, self.sum_noise * clip_norm))

    def release(self, replies: Replies, at: Round) -> Released:
        """It clips once more, adds up, noises the sum and moves the clip norm.

        Guarantee: for neighbouring cohorts that differ in one client, the sum before noise differs by at most C_t in L2
        and the centred count by at most 1/2, whatever that client sends. Both are noised together as one Gaussian
        mechanism of multiplier z, sampled as the event says. Noise and denominator are functions of public constants
        and C_t alone: not of who replied. A sum of answers, which differs by at most 1, is part of the same mechanism,
        of multiplier (z^-2 + z_answers^-2)^(-1/2).
        """
        from discreet.mechanisms.sums import take_all

        total = self.empty(at.num_params, at.clip_norm)
        take_all(replies, total, at.answers)
        at.charge(self.event_of(at.number + 1, rates=at.answers is not None))
        answers = at.answers and at.answers.released(at.source.child("answer"))
        # Noise before the clip norm moves: C_t, not C_{t+1}, bounded this sum.
        noised = total.clipped.noised(self._gaussian(self.sum_noise), at.source.child("update"))
        stddev = self.count_stddev
        below = None if stddev is None else self._noised_count(total.below, stddev, at.source.child("count"))
        return Released(noised, *moved(self, at, below), total.replies, answers)

    def _gaussian(self, noise_multiplier: float) -> Gaussian:
        from discreet.privacy.mechanisms import Gaussian

        return Gaussian(noise_multiplier, draws=PRIVACY_DRAWS.get(self.run.noise, 1))

    def _grid(self, norm: float, length: int, noise_scale: float) -> Grid | None:
        """For exact sums of the whole population (`discreet.privacy.grid`); None for sums in floating point."""
        from discreet.privacy.grid import grid_for

        most = self.run.user.population_size
        return grid_for(norm, length, largest_cohort=most, noise_scale=noise_scale) if self.exact else None

    def _noised_count(self, below: int, stddev: float, source: RandomSource) -> float:
        """The noised sum of (b - 1/2); `below` counts it in halves, so it is a whole number."""
        from discreet.privacy.clipping import ClippedSum

        grid, count = self._grid(BIT_SENSITIVITY, 1, stddev), below * BIT_SENSITIVITY
        total = ClippedSum(1, BIT_SENSITIVITY, grid=grid)
        total.values[0] = count if grid is None else round(count / grid.step)
        return float(total.noised(self._gaussian(stddev / BIT_SENSITIVITY), source)[0])


def moved(mechanism: ServerMechanism, at: Round, below: float | None) -> tuple[float, float | None]:
    """The next clip norm, and the fraction below this one, by the noised sum of (b - 1/2): a function of public
    constants and of the round."""
    stddev = mechanism.count_stddev
    if stddev is None or below is None:
        return at.clip_norm, None
    return mechanism.clip.moved(at.clip_norm, below, number=at.number, cohort=at.expected_cohort, count_stddev=stddev)


def protected(run: ClientSettings) -> tuple[str, str]:
    """The unit that is protected, and who holds it. Of another app only its nodes are known: whether one is a person,
    a device or a hospital is the app's to say."""
    foreign = run.model.name == FLOWER_APP
    return ("everything that one node holds", "node") if foreign else ("all data of one client", "client")


def ratings(run: ClientSettings, what: str, drawn: str) -> tuple[str, str]:
    """The ratings by clients, as a part of the mechanism and of the accounting."""
    asked = run.evaluation
    if not asked.private:
        return "", ""
    own = asked.cohort == "own"
    rated = "for each rating, by a cohort of its own," if own else "for the last rating"
    joined = "" if own else "in a round that also rates the model its answer too; "
    return (
        f"; clients rate the model on held-out examples of their own every {asked.every} rounds and at the end, each "
        f"answer clipped to norm 1, {drawn}",
        f"; {joined}{rated} {what} of noise multiplier {asked.noise_multiplier:g}",
    )


def count_stddev(run: ClientSettings, noise: float | None = None) -> float | None:
    """The noise on the count of norms below the clip norm; None with a fixed clip norm. `noise`: the multiplier of a
    round; None: that of the run, which a target has chosen by now.

    Raises:
      ConfigError: so little that the bits alone would cost more than the round may.
    """
    if not run.user.adaptive:
        return None
    noise = run.user.noise_multiplier if noise is None else noise
    assert noise is not None
    value = run.user.count_stddev
    if value is None:
        value = default_count_stddev(run.user.probability * run.user.population_size, noise_multiplier=noise)
    if noise > 0 and value <= noise / 2:
        raise ConfigError(
            f"privacy.user.clip.count_stddev must be above noise_multiplier / 2 = {noise / 2:g} (got {value:g})"
        )
    return value


def update_noise_multiplier(noise_multiplier: float, *, count_stddev: float | None) -> float:
    """z_update: so that update and bits together are one Gaussian of multiplier z; z itself if there are no bits."""
    if count_stddev is None or noise_multiplier == 0:
        return noise_multiplier
    return split_noise_multiplier(noise_multiplier, count_stddev=count_stddev)
