"""Secure aggregation: clients noise whole numbers together, and the server reads their sum alone. At user level it is
DP-FedAvg; at example level one step a round over all examples of all clients.

Source: Kairouz, Liu and Steinke 2021 (arXiv 2102.06387), Algorithm 1, with the clip norm of Andrew et al. 2021.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from discreet.mechanisms.central_gaussian import (
    SETTINGS,
    count_stddev,
    moved,
    protected,
    ratings,
    update_noise_multiplier,
)
from discreet.mechanisms.local_dp_sgd import EXAMPLE_SETTINGS
from discreet.mechanisms.mechanism import (
    ONE_PERSON,
    ClientRound,
    Released,
    Round,
    ServerMechanism,
    Statement,
    Unreachable,
    expected_cohort,
)
from discreet.settings.client_settings import ClientSettings
from discreet.settings.privacy import ADD_OR_REMOVE, EXAMPLE, USER
from discreet.settings.rules import ConfigError

if TYPE_CHECKING:
    from dp_accounting import DpEvent
    from torch import Tensor

    from discreet.mechanisms.sums import CohortSum, Replies
    from discreet.privacy.randomness import RandomSource
    from discreet.privacy.secure_grid import SecureCohort, SecureSum
    from discreet.queries.query import Sums
    from discreet.training.local_training import LocalSettings

SECURE_SETTINGS = (
    *("privacy.user.aggregation", "privacy.example.aggregation"),
    *("privacy.secure.dropouts", "privacy.secure.colluding"),
)


class MaskedSum(ServerMechanism):
    """A mechanism whose server charges a sum that nobody has read, and opens it.

    Guarantee: what is opened is a sum of integers to which each of its clients has added discrete Gaussian noise. If
    one client's vector (at example level one example) is zeroed out it moves by at most `vector.sensitivity_squared` in
    squared L2 norm, and the noise of h honest clients is what the event says. All that follows is post-processing. A
    dishonest client can send any integers, and nobody sees them: it spoils the model, not the privacy of others. The
    denominator is a public constant.
    """

    masked: ClassVar[bool] = True
    at_client: ClassVar[bool] = True
    exact: ClassVar[bool] = True
    only_rdp: ClassVar[bool] = True

    def sum(self, noise_multiplier: float) -> SecureSum:
        """The sum that clients make, the same in every round, with the noise multiplier of a round.

        Raises:
          ValueError: the noise, the clients and the model do not go together.
        """
        raise NotImplementedError

    @property
    def vector(self) -> SecureSum:
        """The sum with the noise that is declared, by which a client finds its share. ConfigError: a target has yet to
        choose it."""
        noise = self.given_noise
        if noise is None:
            name = f"privacy.{self.guarantee}.noise_multiplier"
            raise ConfigError(f"{name} must be given, or resolved from its target (got null)")
        return self.sum(noise)

    @property
    def sum_noise(self) -> float:
        return self.vector.own_noise_stddev * math.sqrt(self.vector.nodes)

    @property
    def cohort(self) -> SecureCohort:
        """The clients of a run, and the number of honest ones that are sure to be in a sum."""
        from discreet.privacy.secure_grid import SecureCohort

        nodes = self.run.user.population_size
        return SecureCohort(nodes, self.run.secure.summands(nodes))

    @property
    def decided(self) -> Mapping[str, object]:
        return {"privacy.secure.threshold": self.run.secure.threshold_of(self.run.user.population_size)}

    def event(self, noise_multiplier: float, *, trains: bool = True, rates: bool = False) -> DpEvent:
        return self.sum(noise_multiplier).event_of(trains=trains, rates=rates)

    def empty(self, num_params: int, clip_norm: float) -> CohortSum:
        raise TypeError("clients' vectors are added up under masks, and no updates")

    def release(self, replies: Replies, at: Round) -> Released:
        """As `ServerRelease` has it. RoundAbandoned: too few clients are left to open the sum, which is charged all the
        same."""
        event = self.event_of(at.number + 1, rates=at.answers is not None)
        update, below, said, count = self._opened(replies, at, event)
        return Released(update, *moved(self, at, below), count, said)

    def rate(self, replies: Replies, at: Round, event: DpEvent | None) -> Any:
        """The vectors hold noise in all places but the answers'."""
        return self._opened(replies, at, event)[2]

    def _opened(
        self, replies: Replies, at: Round, event: DpEvent | None
    ) -> tuple[Tensor, float | None, Sums | None, int]:
        from discreet.mechanisms.sums import UnopenedSum

        (sealed,) = replies
        if not isinstance(sealed, UnopenedSum):
            raise TypeError("a reply in the clear was given to a mechanism that opens masked sums")
        assert event is not None
        at.charge(event)
        update, below, answers = self.vector.decode(sealed.open(), self.norm(at.clip_norm))
        said = None if answers is None or at.answers is None else at.answers.opened(answers)
        return update, below, said, sealed.replies


@dataclass(frozen=True)
class MaskedGaussian(MaskedSum):
    """All data of one client, from everybody; at least n - c clients are trusted to be honest, the server is not."""

    guarantee: ClassVar[str] = USER
    deciding: ClassVar[tuple[str, ...]] = (*SETTINGS, *SECURE_SETTINGS)

    def statement(self) -> Statement:
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
        )

    @property
    def decided(self) -> Mapping[str, object]:
        return {**super().decided, "privacy.user.clip.count_stddev": self.count_stddev}

    @property
    def count_stddev(self) -> float | None:
        return count_stddev(self.run)

    def sum(self, noise_multiplier: float) -> SecureSum:
        from discreet.privacy.secure_grid import secure_sum

        rating, count = self.run.evaluation, count_stddev(self.run, noise_multiplier)
        return secure_sum(
            self.sizes.num_params,
            self.cohort,
            noise_multiplier=update_noise_multiplier(noise_multiplier, count_stddev=count),
            count_stddev=None if count is None else count or 1.0,
            answers=(self.sizes.answers, rating.noise_multiplier) if rating.private else None,
        )


@dataclass(frozen=True)
class MaskedStep(MaskedSum):
    """One example of one client, from everybody; the client, and at least n - c clients, are trusted to be honest."""

    guarantee: ClassVar[str] = EXAMPLE
    reported: ClassVar[tuple[str, ...]] = ("epsilon_example",)
    deciding: ClassVar[tuple[str, ...]] = (*SECURE_SETTINGS, "training.batch_size", *EXAMPLE_SETTINGS)
    fixed_norm: ClassVar[str] = "privacy.example.clip_norm"

    def statement(self) -> Statement:
        how = (
            "one step a round over all examples of all clients, on whole numbers: each client adds up a clipped "
            "gradient of each of its examples, and adds discrete Gaussian noise and masks; the server reads the sum "
            "alone"
        )
        said = masked_statement(self.run, how)
        earlier = "earlier runs over the same examples, in the server's account: each client's own ledger adds them up"
        uncovered = (*said.not_covered, ONE_PERSON, earlier)
        return replace(said, trusted=f"{said.trusted}; and the client itself", not_covered=uncovered)

    def sum(self, noise_multiplier: float) -> SecureSum:
        from discreet.privacy.secure_grid import example_secure_sum

        largest = self.run.training.batch_size
        return example_secure_sum(
            self.sizes.num_params, self.cohort, noise_multiplier=noise_multiplier, largest_sum=largest
        )

    def norm(self, clip_norm: float) -> float:
        """The norm that a step of the sum refers to: no rule moves it."""
        return step_norm(self.run)

    def client_round(self, number: int, num_examples: int, *, trains: bool) -> ClientRound:
        from discreet.privacy.secure_grid import MOST_GRADIENTS

        most = MOST_GRADIENTS * self.run.training.batch_size
        if num_examples > most:
            raise Unreachable(
                f"this client has more examples than {MOST_GRADIENTS} * training.batch_size={most}, beyond which a "
                "float64 sum of gradients is not bounded"
            )

        def step(*given: Any, settings: LocalSettings, source: RandomSource) -> Tensor:
            from discreet.training.local_training import shared_step

            return shared_step(*given, settings=settings, clip=(self.run.example.clip_norm, source))

        # Its own account is held to budgets where it adds its vector to the sum.
        return ClientRound(self.run.example.noise_multiplier or 0.0, step=step)

    @property
    def averaged(self) -> float:
        """The mean over all examples, by their public number, is at most the clip norm long."""
        return expected_cohort(self.run) * self.run.training.batch_size


def step_norm(run: ClientSettings) -> float:
    """The L2 norm that one example can add to a shared step, which is minus the learning rate times the sum of the
    clipped gradients over `batch_size`."""
    return run.training.learning_rate * run.example.clip_norm / run.training.batch_size


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
            "who takes part in a round, and who is lost in it",
            f"more than {bad} clients that tell the server what they know",
            "what a dishonest client sends: nobody sees it, and it can spoil the model",
        ),
    )
