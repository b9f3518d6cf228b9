"""DP-FedAvg under secure aggregation: clients noise whole numbers together, and the server reads their sum alone.

Source: Kairouz, Liu and Steinke 2021 (arXiv 2102.06387), Algorithm 1, with the clip norm of Andrew et al. 2021.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from discreet.mechanisms.central_gaussian import (
    SETTINGS,
    CentralGaussian,
    UserPrivacy,
    count_stddev,
    protected,
    ratings,
    runs_and_nodes,
    update_noise_multiplier,
)
from discreet.mechanisms.mechanism import NOT_COVERED, Released, Round, ServerMechanism, ServerRelease, Statement
from discreet.privacy.quantile import default_count_stddev
from discreet.settings.client_settings import ClientSettings
from discreet.settings.privacy import ADD_OR_REMOVE, EXAMPLE, PLANNED, USER, ClipConfig, Sizes
from discreet.settings.rules import ConfigError

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from discreet.mechanisms.sums import CohortSum, Replies
    from discreet.privacy.secure_grid import SecureCohort, SecureSum

SECURE_SETTINGS = (
    *("privacy.user.aggregation", "privacy.example.aggregation"),
    *("privacy.secure.dropouts", "privacy.secure.colluding"),
)


@dataclass(frozen=True)
class MaskedGaussian(ServerMechanism):
    """All data of one client, from everybody; at least n - c clients are trusted to be honest, the server is not."""

    run: ClientSettings
    guarantee: ClassVar[str] = USER
    masked: ClassVar[bool] = True
    at_client: ClassVar[bool] = True
    deciding: ClassVar[tuple[str, ...]] = (*SETTINGS, *SECURE_SETTINGS)
    only_rdp: ClassVar[bool] = True

    def statement(self, *, account: bool = False) -> Statement:
        rated, priced = ratings(self.run, "such a sum", "in the same vector")
        kind, (unit, who) = "adaptive" if self.run.user.adaptive else "fixed", protected(self.run)
        how = (
            f"DP-FedAvg with {kind} clip norm, everybody in every round, on whole numbers; each client "
            "adds discrete Gaussian noise and masks, of which the server reads the sum alone"
        )
        one = f"one {who}'s update counts as zero, and it still takes part and adds its noise"
        said = masked_statement(self.run, how, joined="update and bits together, ")
        return replace(
            said,
            unit=unit,
            adjacency=f"zero-out: {one}",
            mechanism=said.mechanism + rated,
            accounting=said.accounting + priced,
            not_covered=(*said.not_covered, *runs_and_nodes(self.run, account=account)),
        )

    @property
    def decided(self) -> Mapping[str, object]:
        return {**threshold(self.run), "privacy.user.clip.count_stddev": count_stddev(self.run)}

    def sum(self, sizes: Sizes, noise_multiplier: float | None = None) -> SecureSum:
        """The sum that clients make, the same in every round: a client finds its share of the noise by it.
        `noise_multiplier`: of a round; None for the one that is declared.

        Raises:
          ValueError: the noise, the clients and the model do not go together.
        """
        from discreet.privacy.secure_grid import secure_sum

        user, rating = self.run.user, self.run.evaluation
        noise = resolved(USER, user.noise_multiplier if noise_multiplier is None else noise_multiplier)
        count = user.count_stddev
        if count is None:
            count = default_count_stddev(user.population_size, noise_multiplier=noise)
        return secure_sum(
            sizes.num_params,
            cohort(self.run),
            noise_multiplier=update_noise_multiplier(noise, count_stddev=count if user.adaptive else None),
            count_stddev=(count or 1.0) if user.adaptive else None,
            answers=(sizes.answers, rating.noise_multiplier) if rating.private else None,
        )

    def event(
        self, noise_multiplier: float, *, trains: bool = True, rates: bool = False, sizes: Sizes = PLANNED
    ) -> DpEvent:
        return self.sum(sizes, noise_multiplier).event_of(trains=trains, rates=rates)

    def server_release(self, clip: ClipConfig, sizes: Sizes = PLANNED, *, rates: bool = False) -> MaskedSum:
        clipping, noise = CentralGaussian(self.run).server_release(clip), self.run.user.noise_multiplier or 0.0
        return MaskedSum(self.sum(sizes), self.event(noise, rates=rates, sizes=sizes), clipping)

    @property
    def noise_in_sum(self) -> float:
        return CentralGaussian(self.run).noise_in_sum * unaccounted(self.run)


@dataclass(frozen=True)
class MaskedSum(ServerRelease):
    """The server's release: it charges a sum that nobody has read, and opens it.

    Guarantee: what is opened is a sum of integers to which each of its clients has added discrete Gaussian noise. If
    one client's vector (at example level one example) is zeroed out it moves by at most `vector.sensitivity_squared` in
    squared L2 norm, and the noise of h honest clients is what the event says. All that follows is post-processing. A
    dishonest client can send any integers, and nobody sees them: it spoils the model, not the privacy of others. The
    denominator is a public constant.

    Attributes:
      clipping: the rule by which the clip norm moves.
      step_norm: at example level, where no rule moves it, the norm that one step of the sum refers to.
    """

    vector: SecureSum
    event: DpEvent
    clipping: UserPrivacy | None = None
    step_norm: float = math.inf
    masked: ClassVar[bool] = True
    exact: ClassVar[bool] = True

    @property
    def guarantee(self) -> str:
        return EXAMPLE if self.clipping is None else USER

    @property
    def sum_noise(self) -> float:
        """Of all clients: more than what is accounted for those that are sure to add theirs."""
        return self.vector.own_noise_stddev * math.sqrt(self.vector.nodes)

    def norm(self, clip_norm: float) -> float:
        return self.step_norm if self.clipping is None else clip_norm

    def empty(self, num_params: int, clip_norm: float) -> CohortSum:
        raise TypeError("clients' vectors are added up under masks, and no updates")

    def release(self, replies: Replies, at: Round) -> Released:
        """As `ServerRelease` has it. RoundAbandoned: too few clients are left to open the sum, which is charged all the
        same."""
        (update, below, answers), count = self._opened(replies, at, self.event)
        said = None if answers is None or at.answers is None else at.answers.opened(answers)
        moved = (at.clip_norm, None) if self.clipping is None else self.clipping.moved(at, below)
        return Released(update, *moved, count, said)

    def rate(self, replies: Replies, at: Round, event: DpEvent | None) -> Any:
        """The vectors hold noise in all places but the answers'."""
        assert at.answers is not None
        assert event is not None
        (_, _, answers), _ = self._opened(replies, at, event)
        return at.answers.opened(answers)

    def _opened(self, replies: Replies, at: Round, event: DpEvent) -> tuple[tuple[Any, ...], int]:
        from discreet.mechanisms.sums import UnopenedSum

        (sealed,) = replies
        if not isinstance(sealed, UnopenedSum):
            raise TypeError("a reply in the clear was given to a mechanism that opens masked sums")
        at.charge(event)
        return self.vector.decode(sealed.open(), self.norm(at.clip_norm)), sealed.replies


def resolved(guarantee: str, noise_multiplier: float | None) -> float:
    """The noise of masked sums, which each side finds by itself: ConfigError if a target has yet to choose it."""
    if noise_multiplier is None:
        raise ConfigError(f"privacy.{guarantee}.noise_multiplier must be given, or resolved from its target (got null)")
    return noise_multiplier


def cohort(run: ClientSettings) -> SecureCohort:
    """The clients of a run, and the number of honest ones that are sure to be in a sum."""
    from discreet.privacy.secure_grid import SecureCohort

    return SecureCohort(run.user.population_size, run.secure.summands(run.user.population_size))


def unaccounted(run: ClientSettings) -> float:
    """The noise of all clients over that of those who are sure to add theirs."""
    nodes = run.user.population_size
    return math.sqrt(nodes / run.secure.summands(nodes))


def threshold(run: ClientSettings) -> Mapping[str, object]:
    return {"privacy.secure.threshold": run.secure.threshold_of(run.user.population_size)}


def masked_statement(run: ClientSettings, how: str, *, joined: str = "") -> Statement:
    """The parts that statements about masked sums have in common. `how`: a client's part, in words; `joined`: the
    releases that are accounted together."""
    nodes, lost, bad = run.user.population_size, run.secure.dropouts, run.secure.colluding
    return Statement(
        unit="one example of one client",
        adjacency=ADD_OR_REMOVE,
        trusted=f"not the server: that at least {nodes - bad} of the {nodes} clients are honest and add their noise",
        observer=f"everybody else: the server and up to {bad} of the clients, who know who takes part",
        mechanism=f"{how}; up to {lost} clients may be lost in a round",
        accounting=f"a sum of {run.secure.summands(nodes)} clients' discrete Gaussians a round, the least that is left "
        f"of honest ones; {joined}not amplified; by RDP",
        not_covered=(
            *NOT_COVERED,
            "who takes part in a round, and who is lost in it",
            f"more than {bad} clients that tell the server what they know",
            "what a dishonest client sends: nobody sees it, and it can spoil the model",
        ),
    )
