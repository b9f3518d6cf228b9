"""The Protocol of mechanisms: a run, its transports, its clients, its reports and its audits know no more of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from discreet.settings.client_settings import ClientSettings
from discreet.settings.privacy import LOCAL, PLANNED, USER, ClipConfig, Sizes

if TYPE_CHECKING:
    from dp_accounting import DpEvent
    from torch import Tensor

    from discreet.accounting.correlation import Turns
    from discreet.mechanisms.client_noise import OwnNoise
    from discreet.mechanisms.sums import AnswerSum, CohortSum, Replies
    from discreet.privacy.randomness import RandomSource
    from discreet.training.local_training import LocalSettings

CLIP = ClipConfig()  # of a mechanism that is asked for its events alone
NOT_COVERED = (
    "the choice of hyperparameters, if private data guided it",
    "timing, traffic and which nodes are connected",
)
ONE_NODE = "a client with several nodes: one node is taken for one client"
IN_NO_ACCOUNT = "runs over the same clients that did not charge the population's account"
EARLIER_RUNS = "earlier runs over the same clients: each run has a ledger of its own"
SHARED = "the same example at other clients"
ONE_PERSON = "all examples of one person together, if a client holds several of one person"


@dataclass(frozen=True)
class Statement:
    """A guarantee in words; docs/privacy.md says the same at length.

    Attributes:
      observer: from whom the unit is hidden.
      mechanism, accounting: how, and as which events.
      name, enabled: which guarantee it is; False: the run gives none of this kind, epsilon is infinite.
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
    """A client can't do this work with the noise or the examples that it has. The message says why."""


@dataclass(frozen=True)
class ClientRound:
    """A mechanism's part of one client's work in a round.

    Attributes:
      noise_multiplier: of what is noised for it, by the client or by what the server declares; infinity if nothing is.
      events: the cost to a ledger of the client's own, each with its count, before anything leaves.
    """

    noise_multiplier: float
    events: tuple[tuple[DpEvent, int], ...] = ()
    training: LocalSettings | None = None  # of local training, if they hold the noise
    local: Any = None  # the noise on the update, a `LocalPrivacy`
    step: Callable[..., Tensor] | None = None  # makes the update in place of local training


@dataclass(frozen=True)
class Mechanism(Protocol):
    """A guarantee that a run gives, or would give if it were on. A mechanism has this class as its base, for the usual
    answers.

    Attributes:
      run: the settings that clients are told.
      guarantee: which of the three it is, and whose name its releases have in a ledger.
      masked: True if the server reads one sum that it opens, and no reply of a client.
      at_server: True if the server's ledger is charged for a round: see `ServerMechanism`.
      at_client: True if each client's own ledger is charged for what it sends.
      reported: the epsilons that clients report of it, by their names in a reply.
      deciding: the settings that decide what a release costs, which a resumed run has to keep.
    """

    run: ClientSettings
    guarantee: ClassVar[str]
    masked: ClassVar[bool] = False
    at_server: ClassVar[bool] = False
    at_client: ClassVar[bool] = False
    reported: ClassVar[tuple[str, ...]] = ()
    deciding: ClassVar[tuple[str, ...]] = ()

    def statement(self) -> Statement:
        """The guarantee in words."""

    @property
    def on(self) -> bool:
        """True if the run gives the guarantee."""
        return bool(self.terms.kind != "none" if self.guarantee == LOCAL else self.terms.enabled)

    def stated(self, *, account: bool) -> Statement:
        """The statement, with its name and all that is not covered. `account`: the run charges a population's."""
        said, gaps = self.statement(), list(NOT_COVERED)
        if self.run.data.partition == "sampled":  # for measuring: real people would not hold each other's examples
            gaps.append(f"{SHARED}: with data.partition=sampled views overlap, each is counted by itself")
        gaps += said.not_covered
        if self.guarantee == USER:
            gaps += ONE_NODE, IN_NO_ACCOUNT if account else EARLIER_RUNS
        return replace(said, name=self.guarantee, enabled=self.on, not_covered=tuple(gaps))

    def client_round(self, number: int, num_examples: int, *, trains: bool) -> ClientRound:
        """Its part of the work of a client with so many examples. Raises Unreachable if there is none."""
        return ClientRound(self.given_noise or 0.0)

    def answer_noise(self, l1_norm: float = 1.0) -> OwnNoise | None:
        """The noise that a client draws on answers of at most this L1 norm by itself; None if it draws none."""
        return None

    @property
    def terms(self) -> Any:
        """The settings of its guarantee, which an owner's policy can hold the run to."""
        return getattr(self.run, self.guarantee)

    @property
    def given_noise(self) -> float | None:
        """The noise multiplier; None: a target, which is not met yet or by each client, chooses it."""
        noise: float | None = self.terms.noise_multiplier
        return noise

    @property
    def target(self) -> float | None:
        """The epsilon that chooses the noise; None: it is given."""
        return getattr(self.terms, "epsilon" if self.guarantee == LOCAL else "target_epsilon", None)

    @property
    def budget(self) -> float | None:
        """The epsilon that is not passed: the target, unless a budget is given."""
        return self.target if self.terms.max_epsilon is None else self.terms.max_epsilon

    @property
    def unbatched(self) -> str | None:
        """The setting that keeps a simulation from training many of its clients at a time; None if it can."""
        return None

    @property
    def finite(self) -> tuple[str, ...]:
        """Those of `reported` that the run keeps finite."""
        return () if self.given_noise == 0 else self.reported

    @property
    def decided(self) -> Mapping[str, object]:
        """The numbers beside `deciding` that decide what a release costs and follow from settings."""
        return {}

    @property
    def only_rdp(self) -> bool:
        """True if no accountant but RDP knows its events."""
        return False

    def grid_slack(self, values: int, scale: float) -> float | None:
        """The distance of so many values of its noise, of this scale in steps of a grid, to exact noise; None if it is
        not bounded."""
        return None


class Kept:
    """What the release of a round keeps for the rounds after it, in memory: a secret of the run. Of one that has a
    folder `discreet.server.run_folder.RunSecrets` keeps it on disk."""

    def __init__(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        self.tensors = tensors or {}

    def load(self) -> Mapping[str, Tensor]:
        """What was saved last; empty before."""
        return self.tensors

    def save(self, tensors: Mapping[str, Tensor]) -> None:
        """Replaces it as a whole; after a crash the old or the new is there."""
        self.tensors = dict(tensors)


@dataclass(frozen=True)
class Round:
    """The facts of a round that its release needs.

    Attributes:
      number: of the rounds before it.
      expected_cohort: the public denominator of the average.
      charge: is called with the event before noise is added to anything, or a sum is opened: it writes the ledger.
      answers: the empty sum of the answers to a query; None in a round without one.
      again: it was charged before, by a process that has died, and may be out with other noise.
    """

    number: int
    num_params: int
    clip_norm: float
    expected_cohort: float
    source: RandomSource
    charge: Callable[[DpEvent], None]
    answers: AnswerSum | None = None
    kept: Kept = field(default_factory=Kept)
    again: bool = False


@dataclass(frozen=True, eq=False)
class Released:
    """The release of a round, of which all that follows is post-processing.

    Attributes:
      total: the noised sum of the updates, (num_params,).
      clip_norm: of the next round.
      fraction_below: the noised fraction of update norms at or below the clip norm; None without an adaptive one.
      replies: how many updates were added up. Who takes part is not covered by the guarantee.
      answers: the noised sum of the answers; None in a round without a query.
    """

    total: Tensor
    clip_norm: float
    fraction_below: float | None
    replies: int
    answers: Any = None


class ServerRelease(Protocol):
    """What the server does in a round: with what clients send, before anything is published.

    Attributes:
      guarantee: whom a round is charged to; None if nothing is charged.
      masked: True if it opens one sum, and reads no reply.
      exact: True if its sums are of whole numbers, whose order does not matter.
      sum_noise: the noise that is expected in the sum, over `norm`: more than what is accounted if clients that are not
        counted on add theirs too.
    """

    masked: ClassVar[bool] = False

    @property
    def guarantee(self) -> str | None:
        return None

    @property
    def exact(self) -> bool:
        return False

    @property
    def sum_noise(self) -> float:
        return 0.0

    def event_of(self, number: int, *, rates: bool = False, again: bool = False) -> DpEvent | None:
        """The event of round `number`, from 1 on. `rates`: clients also rate the model; `again`: see `Round`."""
        return None

    def norm(self, clip_norm: float) -> float:
        """The bound on a client's part in a sum, in a round with this clip norm."""
        return clip_norm

    def empty(self, num_params: int, clip_norm: float) -> CohortSum:
        """The sum that a round's replies are added to."""
        from discreet.mechanisms.sums import CohortSum

        return CohortSum(num_params, clip_norm, None)

    def release(self, replies: Replies, at: Round) -> Released:
        """Adds replies up as they come, charges the event, and only then noises the sum or opens it."""

    def rate(self, replies: Replies, at: Round, event: DpEvent | None) -> Any:
        """As `release`, of the answers of clients that are asked for nothing else; `event`: what they cost."""
        from discreet.mechanisms.sums import answer_round

        assert at.answers is not None
        return answer_round(replies, at.answers, event=event, source=at.source, charge=at.charge)


class PlainSum(ServerRelease):
    """The release of a round that clients alone noise, or nobody: nothing is clipped, noised or charged."""

    def release(self, replies: Replies, at: Round) -> Released:
        from discreet.mechanisms.sums import take_all

        total = self.empty(at.num_params, at.clip_norm)
        take_all(replies, total, at.answers)
        answers = at.answers and at.answers.released(at.source)
        return Released(total.clipped.total, at.clip_norm, None, total.replies, answers)


@dataclass(frozen=True)
class ServerMechanism(Mechanism, ServerRelease, Protocol):
    """A mechanism whose releases the server's ledger is charged for: at most one of a run.

    Attributes:
      clip: the rule by which an adaptive clip norm moves.
      sizes: of what is masked.
      fixed_norm: the setting of the norm that clips, if it never follows the updates, so that noise can't feed itself.
    """

    clip: ClipConfig = CLIP
    sizes: Sizes = PLANNED
    at_server: ClassVar[bool] = True
    fixed_norm: ClassVar[str | None] = None

    @property
    def noise_multiplier(self) -> float:
        """Of a round as a whole; 0 draws no noise and protects nobody. A target has chosen it by now."""
        assert self.given_noise is not None
        return self.given_noise

    @property
    def count_stddev(self) -> float | None:
        """Of the noise on the count of norms below the clip norm; None if the release has no such count."""
        return None

    @property
    def turns(self) -> Turns | None:
        """Of clients, if noise is correlated over rounds, so that all rounds are one observation; else None."""
        return None

    def event(self, noise_multiplier: float, *, trains: bool = True, rates: bool = False) -> DpEvent:
        """The event of one release. `trains`, `rates`: clients are asked for an update, for a rating of the model."""

    def event_of(self, number: int, *, rates: bool = False, again: bool = False) -> DpEvent | None:
        return self.event(self.noise_multiplier, rates=rates)

    def first_rounds(self, noise_multiplier: float, count: int) -> tuple[tuple[DpEvent, int], ...]:
        """The events of the first `count` rounds that rate nothing, each with how often it is charged."""
        return ((self.event(noise_multiplier), count),)

    def bounded(self, updates: Tensor, clip_norm: float) -> tuple[Tensor, Tensor]:
        """Updates (n, num_params) as they leave clients, and their bits (n,)."""
        from discreet.mechanisms.sums import clipped

        return clipped(updates, clip_norm)

    @property
    def averaged(self) -> float:
        """The public number of updates, or of examples, over which a step is the mean."""
        return expected_cohort(self.run)


def expected_cohort(run: ClientSettings) -> float:
    """The public denominator; of a fixed-size cohort its size."""
    expected = run.user.probability * run.user.population_size
    return float(round(expected)) if run.user.sampling == "fixed" else expected


def releases_of(mechanism: ServerMechanism, noise_multiplier: float, rounds: int) -> tuple[tuple[DpEvent, int], ...]:
    """The events of so many rounds, with ratings, and with the question about data before them."""
    run = mechanism.run
    joined, alone = run.evaluation.ratings(rounds)
    releases = [
        (run.statistics.event, int(run.asks_of_data)),
        *mechanism.first_rounds(noise_multiplier, rounds - joined),
    ]
    if joined:
        releases.append((mechanism.event(noise_multiplier, rates=True), joined))
    if alone:
        releases.append((mechanism.event(noise_multiplier, trains=False, rates=True), alone))
    return tuple((event, count) for event, count in releases if count)
