"""Secure aggregation: clients noise whole numbers together, and the server reads their sum alone.
At user level it is DP-FedAvg; at example level one step a round over all examples of all clients.

Source: Kairouz, Liu and Steinke 2021 (arXiv 2102.06387), Algorithm 1, with the clip norm of Andrew
  et al. 2021.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from discreet.accounting.events import RDP
from discreet.mechanisms.central_gaussian import (
    UserNoise,
    count_stddev,
    noise_of,
    protected,
    ratings,
    update_noise_multiplier,
    user_price_settings,
)
from discreet.mechanisms.mechanism import (
    CLIENTS,
    ONE_OWNER,
    ONE_PERSON,
    SERVER,
    UNITS,
    ClientRound,
    ExpectedNoise,
    Participation,
    Statement,
)
from discreet.mechanisms.round_state import Released
from discreet.settings.adjacency import ADD_OR_REMOVE, EXAMPLE, OF_OWNERS
from discreet.settings.client_settings import ClientSettings
from discreet.settings.clip_choice import CLIP, ClipConfig
from discreet.settings.privacy import PLANNED, Sizes
from discreet.settings.rules import ConfigError

if TYPE_CHECKING:
    from dp_accounting import DpEvent
    from torch import Tensor

    from discreet.mechanisms.round_state import RoundState
    from discreet.mechanisms.sums import AnswerRelease, Replies, UnopenedSum
    from discreet.privacy.randomness import RandomSource
    from discreet.privacy.secure_grid import SecureCohort, SecureSum
    from discreet.queries.query import Sums
    from discreet.training.local_training import LocalSettings


@dataclass(frozen=True)
class MaskedAnswers:
    """The release of a masked sum in which everything except the answers to a query is noise alone.

    Attributes:
      vector: the sum that clients make.
      how: the release by which the answers are read.
    """

    vector: SecureSum
    how: AnswerRelease

    @property
    def event(self) -> DpEvent:
        """The event of such a sum."""
        return self.vector.event_of(trains=False, rates=True)

    def add_up(self, replies: Replies, state: RoundState) -> UnopenedSum:
        """The one sum that has arrived, unopened."""
        return unopened(replies)

    def release(self, summed: UnopenedSum, state: RoundState, source: RandomSource) -> Sums:
        """Opens the sum, which already has its noise."""
        _, _, answers = self.vector.decode(summed.open(), state.clip_norm)
        assert answers is not None
        return self.how.opened(answers)


def unopened(replies: Replies) -> UnopenedSum:
    """The one sum that has arrived. TypeError: it is an unmasked reply."""
    from discreet.mechanisms.sums import UnopenedSum

    (summed,) = replies
    if not isinstance(summed, UnopenedSum):
        raise TypeError("a mechanism that opens masked sums was given an unmasked reply")
    return summed


def secure_cohort(run: ClientSettings) -> SecureCohort:
    """The number of clients of a run, and of the honest ones that are sure to be in a sum."""
    from discreet.privacy.secure_grid import SecureCohort

    nodes = run.user.population_size
    return SecureCohort(nodes, run.secure.summands(nodes))


def secure_price_settings(run: ClientSettings) -> dict[str, object]:
    """The settings that decide how much noise is sure to be in a sum."""
    return {
        "privacy.user.aggregation": run.user.aggregation,
        "privacy.example.aggregation": run.example.aggregation,
        "privacy.secure.dropouts": run.secure.dropouts,
        "privacy.secure.colluding": run.secure.colluding,
        "privacy.secure.threshold": run.secure.threshold_of(run.user.population_size),
    }


def configured_noise(vector: SecureSum) -> float:
    """The noise multiplier of the noise that all clients together add to a sum."""
    return vector.own_noise_stddev * math.sqrt(vector.nodes)


@dataclass(frozen=True)
class MaskedGaussian(UserNoise):
    """Hides all data of one client from everybody. The server is not trusted; at least n - c
    clients are.

    Guarantee: the opened sum is over integers, and each of its clients has added discrete Gaussian
    noise. If one client's vector is zeroed out it moves by at most `vector.sensitivity_squared` in
    squared L2 norm, and the noise of h honest clients is what the event says. Everything after that
    is post-processing. A dishonest client can send any integers without being noticed; this can
    spoil the model, but not the privacy of others. The denominator is a public constant.

    The clients' app has `ClientApp(mods=[discreet.secure_sum_mod])`; `DPFedAvg` needs
    sampling="everyone".

    Further attributes are as `CentralGaussian` has them.

    Attributes:
      accountant: "rdp".
      dropouts: the number of nodes that may be lost in a round before it is abandoned unread.
      colluding: the number of nodes that may collude with the server.
      threshold: the number of nodes whose shares open a sum; None for the smallest safe number.
    """

    _: KW_ONLY
    accountant: str = RDP
    dropouts: int = 1
    colluding: int = 1
    threshold: int | None = None
    charged_at: ClassVar[frozenset[str]] = frozenset((SERVER, CLIENTS))

    def statement(self) -> Statement:
        rated, priced = ratings(self.run, "such a sum", "in the same vector")
        if self.run.user.adaptive:
            kind = "adaptive"
        else:
            kind = "fixed"
        unit, who = protected(self.run)
        how = (
            f"DP-FedAvg with {kind} clip norm, everybody in every round, on integers; "
            "each client adds discrete Gaussian noise and masks, and the server reads "
            "only the sum"
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
    def price_settings(self) -> Mapping[str, object]:
        count = {"privacy.user.clip.count_stddev": count_stddev(self.run)}
        return user_price_settings(self.run) | secure_price_settings(self.run) | count

    @property
    def accountants(self) -> tuple[str, ...]:
        return (RDP,)

    @property
    def participation(self) -> Participation:
        return Participation(self.vector)

    def expected_noise(self, clip_norm: float) -> ExpectedNoise:
        noise = configured_noise(self.vector)
        cohort = self.run.expected_cohort
        return ExpectedNoise(
            noise, clip_norm, cohort, count_stddev=count_stddev(self.run), slack=_exactly
        )

    def event(self, number: int, *, again: bool = False) -> DpEvent:
        return self.vector.event_of(trains=True, rates=number in self.run.evaluation.rating_rounds)

    @property
    def answers(self) -> MaskedAnswers:
        from discreet.mechanisms.sums import rating_release

        return MaskedAnswers(self.vector, rating_release(self.run, self.sizes))

    def at_client(self, number: int, num_examples: int, *, trains: bool) -> ClientRound:
        # The client's own account is checked against its budgets when it adds its vector to the
        # sum.
        noise = self.run.user.noise_multiplier or 0.0
        if self.run.evaluation.private:
            noise = min(noise, self.run.evaluation.noise_multiplier)
        return ClientRound(noise)

    def add_up(self, replies: Replies, state: RoundState) -> UnopenedSum:
        """The one sum that has arrived, unopened."""
        return unopened(replies)

    def release(self, summed: UnopenedSum, state: RoundState, source: RandomSource) -> Released:
        """Opens the sum, which already has its noise. RoundAbandoned: too few clients are left."""
        from discreet.mechanisms.sums import rating_release

        update, below, answers = self.vector.decode(summed.open(), state.clip_norm)
        said = None
        if answers is not None and state.round + 1 in self.run.evaluation.rating_rounds:
            said = rating_release(self.run, self.sizes).opened(answers)
        clip_norm = state.clip_norm
        fraction = None
        stddev = count_stddev(self.run)
        if stddev is not None and below is not None:
            clip_norm, fraction = self.clip.estimator.next_clip_norm(
                clip_norm,
                below,
                number=state.round,
                expected_cohort=self.run.expected_cohort,
                count_stddev=stddev,
            )
        return Released(update, clip_norm, fraction, summed.replies, said)

    @property
    def vector(self) -> SecureSum:
        """The sum that clients make, the same in every round, with the declared noise, which
        determines a client's share.

        Raises:
          ConfigError: a target has not chosen the noise yet.
          ValueError: the noise, the clients and the model are not compatible.
        """
        from discreet.privacy.secure_grid import secure_sum

        noise = noise_of(self.run)
        rating = self.run.evaluation
        count = count_stddev(self.run)
        return secure_sum(
            self.sizes.num_params,
            secure_cohort(self.run),
            noise_multiplier=update_noise_multiplier(noise, count_stddev=count),
            count_stddev=None if count is None else count or 1.0,
            answers=(self.sizes.answers, rating.noise_multiplier) if rating.private else None,
        )


@dataclass(frozen=True)
class MaskedStep:
    """Hides one example of one client from everybody. The client itself is trusted, and at least n
    - c clients are trusted to be honest.

    Guarantee: the opened sum is over integers, and each of its clients has added discrete Gaussian
    noise. If one example is zeroed out it moves by at most `vector.sensitivity_squared` in squared
    L2 norm, and the noise of h honest clients is what the event says. Everything after that is
    post-processing. A dishonest client can send any integers without being noticed; this can spoil
    the model, but not the privacy of others. The denominator is a public constant.

    Attributes:
      run, clip, sizes: as `CentralGaussian` has them.
    """

    run: ClientSettings
    clip: ClipConfig = CLIP
    sizes: Sizes = PLANNED
    guarantee: ClassVar[str] = EXAMPLE
    charged_at: ClassVar[frozenset[str]] = frozenset((SERVER, CLIENTS))

    def statement(self) -> Statement:
        each = "its examples"
        person = ONE_PERSON
        if self.run.example.by_owner:
            each = "its owners, the mean over that owner's rows"
            person = ONE_OWNER
        how = (
            "one step a round over all examples of all clients, on integers: each client sums a "
            f"clipped gradient of each of {each}, and adds discrete Gaussian noise and masks; the "
            "server reads only the sum"
        )
        said = masked_statement(self.run, how)
        earlier = (
            "earlier runs over the same examples, in the server's account: each client's own "
            "ledger adds them up"
        )
        return replace(
            said,
            unit=UNITS[self.run.example.unit_name],
            adjacency=OF_OWNERS[ADD_OR_REMOVE] if self.run.example.by_owner else ADD_OR_REMOVE,
            trusted=f"{said.trusted}; and the client itself",
            not_covered=(*said.not_covered, person, earlier),
        )

    @property
    def price_settings(self) -> Mapping[str, object]:
        # not in a guard's process
        from discreet.mechanisms.local_dp_sgd import example_price_settings

        batch = {"training.batch_size": self.run.training.batch_size}
        return secure_price_settings(self.run) | batch | example_price_settings(self.run)

    @property
    def accountants(self) -> tuple[str, ...]:
        return (RDP,)

    @property
    def participation(self) -> Participation:
        return Participation(self.vector)

    def expected_noise(self, clip_norm: float) -> ExpectedNoise:
        """The expected noise. Its norm is the one that a step of the sum refers to, which no rule
        moves. The mean over all examples, divided by their public number, has at most the clip
        norm."""
        mean_over = self.run.expected_cohort * self.run.training.batch_size
        setting = "privacy.example.clip_norm"
        return ExpectedNoise(
            configured_noise(self.vector), step_norm(self.run), mean_over, setting, slack=_exactly
        )

    def event(self, number: int, *, again: bool = False) -> DpEvent:
        return self.vector.event_of(trains=True, rates=False)

    @property
    def answers(self) -> None:
        """None: the sum has no room for answers."""

    def at_client(self, number: int, num_examples: int, *, trains: bool) -> ClientRound:
        def step(*given: Any, settings: LocalSettings, source: RandomSource) -> Tensor:
            from discreet.training.shared_step import SharedClip, shared_step

            clip = SharedClip(self.run.example.clip_norm, source, self.run.example.most_rows)
            return shared_step(*given, settings=settings, clip=clip)

        # The client's own account is checked against its budgets when it adds its vector to the
        # sum.
        return ClientRound(self.run.example.noise_multiplier or 0.0, step=step)

    def add_up(self, replies: Replies, state: RoundState) -> UnopenedSum:
        """The one sum that has arrived, unopened."""
        return unopened(replies)

    def release(self, summed: UnopenedSum, state: RoundState, source: RandomSource) -> Released:
        """Opens the sum, which already has its noise. RoundAbandoned: too few clients are left."""
        update, _, _ = self.vector.decode(summed.open(), step_norm(self.run))
        return Released(update, state.clip_norm, None, summed.replies)

    @property
    def vector(self) -> SecureSum:
        """See `MaskedGaussian.vector`."""
        from discreet.privacy.secure_grid import example_secure_sum

        noise = self.run.example.noise_multiplier
        if noise is None:
            name = "privacy.example.noise_multiplier"
            raise ConfigError(f"{name} must be given, or resolved from its target (got null)")
        largest = self.run.training.batch_size
        return example_secure_sum(
            self.sizes.num_params,
            secure_cohort(self.run),
            noise_multiplier=noise,
            largest_sum=largest,
        )


def _exactly(values: int, scale: float) -> float:
    """The slack of integers and exact draws."""
    return 0.0


def step_norm(run: ClientSettings) -> float:
    """The largest L2 norm that one example can add to a shared step, which is minus the learning
    rate times the sum of the clipped gradients over `batch_size`."""
    return run.training.learning_rate * run.example.clip_norm / run.training.batch_size


def masked_statement(run: ClientSettings, how: str, *, joined: str = "") -> Statement:
    """The common parts of statements about masked sums. `how`: a client's part, in words; `joined`:
    the releases that are accounted together."""
    nodes = run.user.population_size
    lost = run.secure.dropouts
    bad = run.secure.colluding
    return Statement(
        unit="one example of one client",
        adjacency=ADD_OR_REMOVE,
        trusted=f"not the server: at least {nodes - bad} of the {nodes} clients must be honest "
        "and add their noise",
        observer=f"everybody else: the server and up to {bad} of the clients, who know which "
        "clients take part",
        mechanism=f"{how}; up to {lost} clients may be lost in a round",
        accounting=f"a sum of {run.secure.summands(nodes)} clients' discrete Gaussians a round, "
        f"the smallest number of honest ones that can be left; {joined}not amplified; by RDP",
        not_covered=(
            "who takes part in a round, and who drops out of it",
            f"more than {bad} clients that tell the server what they know",
            "a dishonest client's vector: it can spoil the model without being noticed",
        ),
    )
