"""The Protocol of mechanisms: a run, its transports, its clients, its reports and its audits know
no more of one."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from discreet.settings.client_settings import ClientSettings
from discreet.settings.privacy import EXAMPLE, LOCAL, USER

if TYPE_CHECKING:
    from dp_accounting import DpEvent
    from torch import Tensor

    from discreet.accounting.correlation import Turns
    from discreet.mechanisms.client_noise import LocalPrivacy
    from discreet.mechanisms.round_state import Released, RoundState
    from discreet.mechanisms.sums import AnswerMechanism, Replies
    from discreet.privacy.randomness import RandomSource
    from discreet.privacy.secure_grid import SecureSum
    from discreet.training.local_training import LocalSettings

# whose ledgers pay
SERVER = "server"
CLIENTS = "clients"
PURE = "pure"  # the accountant of epsilon at delta 0
# The epsilons that clients report of a guarantee, by their names in a reply.
REPORTED = {
    USER: (),
    EXAMPLE: ("epsilon_example",),
    LOCAL: ("epsilon_local", "epsilon_local_pure"),
}
NOT_COVERED = (
    "the choice of hyperparameters, if private data guided it",
    "timing, traffic and which nodes are connected",
)
ONE_NODE = "a client with several nodes: one node is taken for one client"
IN_NO_ACCOUNT = "runs over the same clients that did not charge the population's account"
EARLIER_RUNS = "earlier runs over the same clients: each run has a ledger of its own"
SHARED = "the same example at other clients"
ONE_OWNER = "rows of one owner at several clients, or under several names"
ONE_PERSON = "all examples of one person together, if a client holds several of one person"


@dataclass(frozen=True)
class Statement:
    """A guarantee in words; docs/privacy.md says the same at length.

    Attributes:
      observer: from whom the unit is hidden.
      mechanism, accounting: how, and as which events.
      name, enabled: which guarantee it is; False: the run gives none of this kind, epsilon is
        infinite.
    """

    unit: str
    adjacency: str
    trusted: str
    observer: str
    mechanism: str
    accounting: str
    not_covered: tuple[str, ...]
    name: str = ""
    enabled: bool = True


class Unreachable(ValueError):
    """A client can't do this work with the noise or the examples that it has. The message says
    why."""


class Uncharged(ValueError):
    """A mechanism has no cost for what it would release, or opens a sum that was not charged:
    nothing is released."""


@dataclass(frozen=True)
class Participation:
    """The way in which clients take part.

    Attributes:
      vector: the masked sum that they add to, which is all that the server reads; None if it reads
        replies.
      turns: theirs, if noise is correlated over rounds, so that all rounds are one observation;
        None if each round is one by itself.
      one_by_one: the setting that keeps a simulation from training many clients at a time; None if
        it can.
    """

    vector: SecureSum | None = None
    turns: Turns | None = None
    one_by_one: str | None = None


IN_THE_CLEAR = Participation()


@dataclass(frozen=True)
class ExpectedNoise:
    """The noise that is expected in the sum that a round releases.

    Attributes:
      multiplier: of the noise, over `norm`: more than what is accounted if clients that are not
        counted on add theirs too.
      norm: the bound on a client's part in the sum.
      denominator: the public number of updates, or of examples, over which a step is the mean.
      clip_setting: the setting of the norm that clips, if it never follows the updates, so that
        noise can't feed itself.
      count_stddev: of the noise on the count of norms below the clip norm; None if there is no such
        count.
      slack: the distance of so many values of the noise, of a scale in steps of a grid, to exact
        noise; None if it is not bounded.
    """

    multiplier: float
    norm: float
    denominator: float
    clip_setting: str | None = None
    count_stddev: float | None = None
    slack: Callable[[int, float], float] | None = None


@dataclass(frozen=True)
class ClientRound:
    """A mechanism's part of one client's work in a round.

    Attributes:
      noise_multiplier: of what is noised for it, by the client or by what the server declares;
        infinity if nothing is.
      events: the cost to a ledger of the client's own, each with its count, before anything leaves.
      training: the settings of local training, if they hold the noise.
      local: the noise on the update.
      step: makes the update in place of local training.
      bounded: updates (n, num_params) as they leave by a clip norm, and their bits (n,); None if
        they are clipped.
    """

    noise_multiplier: float
    events: tuple[tuple[DpEvent, int], ...] = ()
    training: LocalSettings | None = None
    local: LocalPrivacy | None = None
    step: Callable[..., Tensor] | None = None
    bounded: Callable[[Tensor, float], tuple[Tensor, Tensor]] | None = None


class Mechanism(Protocol):
    """A guarantee that a run gives, or would give if it were on.

    A mechanism is made of a run's `ClientSettings`, the rule of its clip norm, and the sizes of
    what it releases.
    In a round the server calls `add_up`, charges `event`, and calls `release`: nothing is noised or
    opened before the charge is on disk, and a mechanism knows no ledger.

    Attributes:
      guarantee: which of the three it is, and whose name its releases have in a ledger.
      charged_at: whose ledgers pay: SERVER, CLIENTS or both.
    """

    guarantee: ClassVar[str]
    charged_at: ClassVar[frozenset[str]]

    def statement(self) -> Statement:
        """The guarantee in words."""

    @property
    def price_settings(self) -> Mapping[str, object]:
        """All that decides what a release costs, by the names of settings: a resumed run has to
        keep it."""

    @property
    def accountants(self) -> tuple[str, ...]:
        """The accountants that know its events, and give a finite epsilon if there is noise."""

    @property
    def participation(self) -> Participation:
        """The way in which clients take part."""

    def expected_noise(self, clip_norm: float) -> ExpectedNoise:
        """The noise that is expected in the sum of a round with this clip norm."""

    def event(self, number: int, *, again: bool = False) -> DpEvent | None:
        """The cost of round `number`, from 1 on, to the server's ledger; None if only clients pay.
        `again`: it was charged before, by a process that has died, and may be out with other
        noise."""

    def at_client(self, number: int, num_examples: int, *, trains: bool) -> ClientRound:
        """Its part of the work of a client with so many examples. Unreachable if there is none."""

    def add_up(self, replies: Replies, state: RoundState) -> Any:
        """The sum of replies, which are taken as they come and clipped again. Nothing is noised and
        nothing opened."""

    def release(self, summed: Any, state: RoundState, source: RandomSource) -> Released:
        """Noises what `add_up` gave, or opens it. The event is on disk by now. `source`: of the
        noise."""

    @property
    def answers(self) -> AnswerMechanism | None:
        """The release of answers of a cohort that is asked for nothing else; None if it pays for
        none."""


def unnoised_at_server(run: ClientSettings) -> ExpectedNoise:
    """The noise that the server adds to sums that clients have noised, or nobody has: none."""
    return ExpectedNoise(0.0, math.inf, run.expected_cohort)


def finite_epsilons(mechanism: Mechanism, run: ClientSettings) -> tuple[str, ...]:
    """The epsilons that clients report of a mechanism and that the run keeps finite, by their names
    in a reply."""
    if run.configured_noise_multiplier(mechanism.guarantee) == 0:
        return ()
    names = REPORTED[mechanism.guarantee]
    if PURE in mechanism.accountants:
        return names
    return names[:1]


def stated(mechanism: Mechanism, run: ClientSettings, *, account: bool) -> Statement:
    """The statement of a mechanism, with its name and all that is not covered. `account`: the run
    charges a population's."""
    said = mechanism.statement()
    gaps = list(NOT_COVERED)
    if (
        run.data.partition == "sampled"
    ):  # for measuring: real people would not hold each other's examples
        gaps.append(
            f"{SHARED}: with data.partition=sampled views overlap, each is counted by itself"
        )
    gaps += said.not_covered
    if mechanism.guarantee == USER:
        gaps += ONE_NODE, IN_NO_ACCOUNT if account else EARLIER_RUNS
    return replace(
        said,
        name=mechanism.guarantee,
        enabled=run.gives(mechanism.guarantee),
        not_covered=tuple(gaps),
    )


def charged(mechanism: Mechanism, number: int, *, again: bool = False) -> DpEvent | None:
    """The cost of round `number` to the server's ledger; None if clients alone pay, or nobody.

    Raises:
      Uncharged: the server is to pay, and the mechanism says no cost.
    """
    if SERVER not in mechanism.charged_at:
        return None
    event = mechanism.event(number, again=again)
    if event is None:
        raise Uncharged(
            f"{type(mechanism).__name__} is charged at the server, and has no cost for round "
            f"{number}"
        )
    return event


def releases_of(
    mechanism: Mechanism, run: ClientSettings, rounds: int
) -> tuple[tuple[DpEvent, int], ...]:
    """The events of so many rounds, with ratings, and with the question about data before them."""
    releases = Counter[Any]()
    if run.asks_of_data:
        releases[run.statistics.event] += 1
    for number in range(1, rounds + 1):
        releases[charged(mechanism, number)] += 1
    _, alone = run.evaluation.ratings(rounds)
    if alone and mechanism.answers is not None:
        releases[mechanism.answers.event] += alone
    return tuple((event, count) for event, count in releases.items() if event is not None)
