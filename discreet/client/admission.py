"""Whether clients take part in a round. All that a client is asked is checked against its guarantees, its owner's
policy and its budgets, and what it costs is on disk, before anything is computed that could leave. A client is a cohort
of one: a node and a simulation of a million clients are admitted alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol

from discreet.client.account import Accounts, Budget, Refused, pure_epsilon_of
from discreet.client.answering import own_noise
from discreet.client.local_privacy import LocalPrivacy, round_privacy
from discreet.client.policy import ClientPolicy, as_declared, budgets_of, check_policy
from discreet.federated.durable_ledger import Charge
from discreet.federated.messages import TrainRequest
from discreet.privacy.calibration import noise_multiplier_for_releases
from discreet.privacy.events import poisson_round_event
from discreet.privacy.secure_grid import MOST_GRADIENTS
from discreet.settings.client_settings import ClientSettings
from discreet.settings.privacy import EXAMPLE, LOCAL, PRIVACY_DRAWS, USER
from discreet.training.local_training import (
    ExamplePrivacy,
    LocalSettings,
    counted_examples,
    example_event,
    sampling_probability,
    settings_without_noise,
    steps_of,
)

if TYPE_CHECKING:
    from dp_accounting import DpEvent

ANYTHING = ClientPolicy()
NO_LEDGER = "this client has no ledger, and spends nothing it can't write down: start it with one"


@dataclass(frozen=True)
class Release:
    """What a client releases in a round under a guarantee that it accounts itself: events, each with how often."""

    guarantee: str
    events: tuple[tuple[DpEvent, int], ...]

    def charges(self, round_number: int, holder: str) -> list[Charge]:
        """As the ledger has them."""
        return [Charge(round_number, self.guarantee, holder, event, count) for event, count in self.events]


@dataclass(frozen=True)
class RoundWork:
    """What a round asks of a client with some number of examples, and the budgets that hold its releases."""

    training: LocalSettings
    local: LocalPrivacy | None
    releases: tuple[Release, ...] = ()
    budgets: tuple[Budget, ...] = ()


@dataclass(frozen=True)
class Admitted:
    """A client that takes part, and what it has spent with this round, which is on its disk."""

    work: RoundWork
    epsilon_example: float = 0.0
    epsilon_local: float = 0.0
    epsilon_local_pure: float = 0.0


class Account(Protocol):
    """One client's ledger, its name in it, and its owner's policy."""

    @property
    def accounts(self) -> Accounts | None: ...

    @property
    def policy(self) -> ClientPolicy: ...

    @property
    def holder(self) -> str: ...


def admit_one(request: TrainRequest, client: Account, *, num_examples: int) -> Admitted:
    """`admit` for one client.

    Raises:
      Refused: it does not take part.
      ConfigError: as `admit`.
    """
    sizes = {client.holder: num_examples}
    admitted = admit(request, sizes, accounts=client.accounts, policy=client.policy)[client.holder]
    if isinstance(admitted, Refused):
        raise admitted
    return admitted


def admit(
    request: TrainRequest,
    sizes: Mapping[str, int],
    *,
    accounts: Accounts | None,
    policy: ClientPolicy = ANYTHING,
) -> dict[str, Admitted | Refused]:
    """Checks and charges clients for one round; the charges are on disk after, in one transaction.

    Args:
      request: what is asked of all of them.
      sizes: how many examples each client trains on, by its name in the ledger.
      accounts: None for clients without a ledger.
      policy: of the owner of all these clients.

    Returns:
      Each client as it takes part, or why it does not; one that does not is charged nothing.

    Raises:
      ConfigError: the number of examples that the owner declares does not go with the run.
    """
    request, round_number = replace(request, run=as_declared(request.run, policy)), request.round
    asked = {size: _asked(request, num_examples=size, policy=policy) for size in set(sizes.values())}
    while True:
        found, charges = dict[str, Admitted | Refused](), list[Charge]()
        for holder, size in sizes.items():
            try:
                found[holder] = _enter(asked[size], holder, accounts, round_number=round_number, charges=charges)
            except Refused as refusal:
                found[holder] = refusal
        if accounts is None or accounts.write(charges):
            return found


def _enter(
    work: RoundWork | Refused, holder: str, accounts: Accounts | None, *, round_number: int, charges: list[Charge]
) -> Admitted:
    """Holds what a client would spend to its budgets, and adds it to the charges."""
    if isinstance(work, Refused):
        raise work
    if not work.releases:
        return Admitted(work)
    if accounts is None:
        raise Refused(NO_LEDGER)
    own = [charge for release in work.releases for charge in release.charges(round_number, holder)]
    spent = accounts.after(own, work.budgets)
    charges += own
    example, local = (accounts.epsilon(spent[name]) if name in spent else 0.0 for name in (EXAMPLE, LOCAL))
    return Admitted(work, example, local, pure_epsilon_of(spent[LOCAL]) if LOCAL in spent else 0.0)


def _asked(request: TrainRequest, *, num_examples: int, policy: ClientPolicy) -> RoundWork | Refused:
    """Everything that follows from the number of examples alone; refused if it may not be asked at all."""
    run, round_number = request.run, request.round
    try:
        # After the last round a cohort may be asked to rate the last model.
        if round_number > run.rounds + (not request.work.trains):
            raise Refused(f"the train request is for round {round_number}, and the run has rounds={run.rounds}")
        local = round_privacy(run, round_number=round_number) if request.work.trains else None
        work = RoundWork(local_settings(run, num_examples), local)
        _check(run, work, num_examples=num_examples, policy=policy)
    except Refused as refusal:
        return refusal
    each = {
        EXAMPLE: example_events(request, work.training, num_examples=num_examples),
        LOCAL: local_events(request, work.local),
    }
    releases = tuple(Release(name, events) for name, events in each.items() if events)
    return replace(work, releases=releases, budgets=budgets_of(policy, run, *(each.guarantee for each in releases)))


def example_events(
    request: TrainRequest, training: LocalSettings, *, num_examples: int
) -> tuple[tuple[DpEvent, int], ...]:
    """What a round costs at example level: the steps on what the client trains on, and its answer on what it holds out.
    No example is in both, so that an account of the two together is an upper bound."""
    steps = steps_of(num_examples, training)
    trained = request.work.trains and training.example is not None and steps > 0
    steps_taken = ((example_event(num_examples, training), steps),) if trained else ()
    answered = answer_events(request) if training.example is not None else ()
    return steps_taken + answered


def local_events(request: TrainRequest, local: LocalPrivacy | None) -> tuple[tuple[DpEvent, int], ...]:
    """What a round costs at local level: its update, if it trains, and its answer."""
    updated = () if local is None else ((local.event, 1),)
    return updated + (answer_events(request) if request.run.local.kind != "none" else ())


def answer_events(request: TrainRequest) -> tuple[tuple[DpEvent, int], ...]:
    """What an answer costs a client that noises it by itself."""
    noise = own_noise(request.run)
    return ((noise.event, 1),) if request.work.query and noise is not None else ()


def _check(run: ClientSettings, work: RoundWork, *, num_examples: int, policy: ClientPolicy) -> None:
    """Raises Refused if the policy forbids the work, or a delta is too large for so many examples."""
    noises = {USER: run.user.noise_multiplier or 0.0} if run.user.enabled else {}
    rating = run.evaluation.noise_multiplier if run.rates_itself else math.inf
    if work.training.example is not None:
        noises[EXAMPLE] = min(work.training.example.noise_multiplier, rating)
    if run.example.secure:  # what its own account says is held to its budgets where it adds its vector to the sum
        noises[EXAMPLE] = run.example.noise_multiplier or 0.0
        if num_examples > MOST_GRADIENTS * run.training.batch_size:
            raise Refused(
                f"this client has more examples than {MOST_GRADIENTS} * training.batch_size="
                f"{MOST_GRADIENTS * run.training.batch_size}, beyond which a float64 sum of gradients is not bounded"
            )
    if run.local.kind != "none":
        noises[LOCAL] = min(rating, math.inf if work.local is None else work.local.noise_multiplier)
    counted = counted_examples(num_examples, work.training)
    if run.rates_itself:  # at most so many, with those that it holds out
        counted = math.ceil((counted + 1) / (1 - run.evaluation.share))
    if counted > 1 and noises.keys() - {USER}:
        _check_delta("privacy.delta", run.delta, counted)
        if math.isfinite(policy.max_epsilon):
            _check_delta("max-delta of this client's policy", policy.max_delta, counted)
    check_policy(policy, run, noise_multipliers=noises)


def _check_delta(name: str, delta: float, num_examples: int) -> None:
    # A guarantee for a whole client is one for each of its examples too: with 1 / n, one of them might leave as it is.
    if delta >= 1 / num_examples:
        raise Refused(f"{name} must be below 1 / n of this client's n examples (it is {delta:g})")


def local_settings(run: ClientSettings, num_examples: int) -> LocalSettings:
    """What a run asks of a client with `num_examples` examples.

    `privacy.example.target_epsilon` is met by the noise for taking part in every planned round, and for rating every
    model that is to be rated: a client that is sampled less often spends less.

    Raises:
      Refused: no noise meets the target, since the ratings alone pass it.
    """
    example, settings = run.example, settings_without_noise(run.training, run.task)
    if not example.enabled or example.secure:
        return settings
    draws, declared = PRIVACY_DRAWS.get(run.noise, 1), run.data.public_num_examples
    private = ExamplePrivacy(example.clip_norm, example.noise_multiplier or 0.0, draws, declared)
    settings = replace(settings, example=private)
    if example.noise_multiplier is not None:
        return settings
    assert example.target_epsilon is not None
    size, rating = max(1, num_examples), run.evaluation
    stepped = sampling_probability(size, settings), steps_of(size, settings) * run.rounds
    rated = rating.noise_multiplier, sum(rating.ratings(run.rounds))
    try:
        noise_multiplier = _calibrate(
            example.target_epsilon, run.delta, accountant=run.accountant, stepped=stepped, rated=rated
        )
    except ValueError as error:
        target = f"privacy.example.target_epsilon={example.target_epsilon:g}"
        raise Refused(f"{target} can't be reached with the ratings of models: {error}") from error
    return replace(settings, example=replace(private, noise_multiplier=noise_multiplier))


@lru_cache(maxsize=1024)
def _calibrate(
    target: float, delta: float, *, accountant: str, stepped: tuple[float, int], rated: tuple[float, int]
) -> float:
    """`stepped`: with which probability a step samples, and how many steps; `rated`: noise and number of answers."""
    (probability, count), (rating, times) = stepped, rated
    answers = ((poisson_round_event(1.0, noise_multiplier=rating), times),) if times else ()
    return noise_multiplier_for_releases(
        target,
        releases=lambda noise: ((poisson_round_event(probability, noise_multiplier=noise), count), *answers),
        delta=delta,
        accountant=accountant,
    )
