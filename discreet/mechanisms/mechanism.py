"""The Protocol of mechanisms. A run, its transports, clients, reports and audits use mechanisms
only through it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from discreet.settings.adjacency import EXAMPLE, LOCAL, USER
from discreet.settings.client_settings import ClientSettings
from discreet.settings.privacy import OWNER

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
# The names in a reply of the epsilons that clients report for a guarantee.
REPORTED = {
    USER: (),
    EXAMPLE: ("epsilon_example",),
    LOCAL: ("epsilon_local", "epsilon_local_pure"),
}
NOT_COVERED = (
    "the choice of hyperparameters, if private data guided it",
    "timing, traffic and which nodes are connected",
)
ONE_NODE = "a client with several nodes: each node counts as one client"
IN_NO_ACCOUNT = "runs over the same clients that did not charge the population's account"
EARLIER_RUNS = "earlier runs over the same clients: each run has its own ledger"
SHARED = "the same example at other clients"
ONE_OWNER = "rows of one owner at several clients, or under several names"
UNITS = {EXAMPLE: "one example of one client", OWNER: "one owner of one client, with all its rows"}
ONE_PERSON = "all examples of one person together, if a client holds several of one person"


@dataclass(frozen=True)
class Statement:
    """A guarantee in words; docs/privacy.md states the same at length.

    Attributes:
      observer: the party from whom the unit is hidden.
      mechanism, accounting: the method, and the events that are charged.
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
    """A client can't do this work with its noise or its examples. The message gives the reason."""


class Uncharged(ValueError):
    """A mechanism has no cost for its release, or opens a sum that was not charged. Nothing is
    released."""


@dataclass(frozen=True)
class Participation:
    """The way in which clients take part.

    Attributes:
      vector: the masked sum that they add to, which is all that the server reads; None if it reads
        replies.
      turns: the clients' turns, if noise is correlated over rounds, so that all rounds are one
        observation; None if each round is a separate observation.
      one_by_one: the setting that keeps a simulation from training many clients at once; None if it
        can.
    """

    vector: SecureSum | None = None
    turns: Turns | None = None
    one_by_one: str | None = None


IN_THE_CLEAR = Participation()


@dataclass(frozen=True)
class ExpectedNoise:
    """The expected noise in the sum that a round releases.

    Attributes:
      multiplier: the noise over `norm`; more than the accounted noise if clients that the account
        does not count on add theirs too.
      norm: the bound on a client's contribution to the sum.
      denominator: the public number of updates, or of examples, over which a step is the mean.
      clip_setting: the setting of the clip norm if it never follows the updates, so that noise
        can't feed back; else None.
      count_stddev: the standard deviation of the noise on the count of norms below the clip norm;
        None without such a count.
      slack: a function that bounds the distance of so many noise values, of a scale in grid steps,
        to exact noise; None if it is not bounded.
      sums: "grid" if what is noised is exact, or "rounded" for a sum in floating point.
    """

    multiplier: float
    norm: float
    denominator: float
    clip_setting: str | None = None
    count_stddev: float | None = None
    slack: Callable[[int, float], float] | None = None
    sums: str = "grid"


@dataclass(frozen=True)
class ClientRound:
    """A mechanism's part in one client's work in a round.

    Attributes:
      noise_multiplier: the noise that the client adds or the server declares for this guarantee;
        infinity if nothing is noised.
      events: the cost to the client's own ledger, each event with its count, charged before
        anything leaves.
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
    """A guarantee that a run gives, or would give if it were enabled.

    A mechanism is made of a run's `ClientSettings`, the rule of its clip norm, and the sizes of
    what it releases. A server asks for the `event` of every round before the first one. In a round
    it calls `add_up`, charges the event, and calls `release`.
    Nothing is noised or opened before the charge is on disk. A mechanism never sees a ledger.

    Attributes:
      guarantee: its name, one of three, under which its releases are in a ledger.
      charged_at: the ledgers that pay: SERVER, CLIENTS or both.
    """

    guarantee: ClassVar[str]
    charged_at: ClassVar[frozenset[str]]

    def statement(self) -> Statement:
        """The guarantee in words."""

    @property
    def price_settings(self) -> Mapping[str, object]:
        """The settings that decide the cost of a release, by name. A resumed run must keep them."""

    @property
    def accountants(self) -> tuple[str, ...]:
        """The accountants that support its events and give a finite epsilon if there is noise."""

    @property
    def participation(self) -> Participation:
        """The way in which clients take part."""

    def expected_noise(self, clip_norm: float) -> ExpectedNoise:
        """The noise that is expected in the sum of a round with this clip norm."""

    def event(self, number: int, *, again: bool = False) -> DpEvent | None:
        """The cost of round `number`, from 1 on, to the server's ledger; None if only clients pay.
        `again`: the round was charged before, by a process that has died, and may have been
        released with other noise."""

    def at_client(self, number: int, num_examples: int, *, trains: bool) -> ClientRound:
        """This mechanism's part in the work of a client with so many examples. Unreachable: there
        is none."""

    def add_up(self, replies: Replies, state: RoundState) -> Any:
        """The sum of replies, which are taken as they arrive and clipped again. Nothing is noised
        or opened."""

    def release(self, summed: Any, state: RoundState, source: RandomSource) -> Released:
        """Adds noise to the result of `add_up`, or opens it. The event is on disk by now. `source`:
        the noise source."""

    @property
    def answers(self) -> AnswerMechanism | None:
        """The release of answers of a cohort that is asked for nothing else; None if the mechanism
        does not pay for answers."""


def unnoised_at_server(run: ClientSettings) -> ExpectedNoise:
    """The noise that the server adds to sums that clients have noised, or that are not noised at
    all: none."""
    return ExpectedNoise(0.0, math.inf, run.expected_cohort)


def finite_epsilons(mechanism: Mechanism, run: ClientSettings) -> tuple[str, ...]:
    """The epsilons that clients report for a mechanism and that must be finite in this run, by
    their names in a reply."""
    if run.configured_noise_multiplier(mechanism.guarantee) == 0:
        return ()
    names = REPORTED[mechanism.guarantee]
    if PURE in mechanism.accountants:
        return names
    return names[:1]


def stated(mechanism: Mechanism, run: ClientSettings, *, account: bool) -> Statement:
    """The statement of a mechanism, with its name and the complete list of what is not covered.
    `account`: the run charges a population's account."""
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
    """The cost of round `number` to the server's ledger; None if only clients pay, or nobody.

    Raises:
      Uncharged: the server must pay, but the mechanism gives no cost.
    """
    if SERVER not in mechanism.charged_at:
        return None
    event = mechanism.event(number, again=again)
    if event is None:
        raise Uncharged(
            f"{type(mechanism).__name__} is charged at the server, but gives no cost "
            f"for round {number}"
        )
    return event


def releases_of(
    mechanism: Mechanism, run: ClientSettings, rounds: int, *, again: bool = False
) -> tuple[tuple[DpEvent, int], ...]:
    """The events of so many rounds, with ratings, and with the question about data before them.
    `again`: as `charged` has it."""
    releases = Counter[Any]()
    if run.asks_of_data:
        releases[run.statistics.event] += 1
    for number in range(1, rounds + 1):
        releases[charged(mechanism, number, again=again)] += 1
    _, alone = run.evaluation.ratings(rounds)
    if alone and mechanism.answers is not None:
        releases[mechanism.answers.event] += alone
    return tuple((event, count) for event, count in releases.items() if event is not None)
