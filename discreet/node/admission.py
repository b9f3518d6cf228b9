"""Admission of clients to a round. All that a client is asked is checked against its guarantees, its owner's policy and
its budgets, and what it costs is on disk, before anything is computed that could leave. A client is a cohort of one: a
node and a simulation of a million clients are admitted alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from discreet.accounting.calibration import noise_multiplier_for_releases
from discreet.accounting.events import RDP, poisson_round_event
from discreet.accounting.privacy_ledger import epsilon_of
from discreet.ledger.durable_ledger import Charge
from discreet.node.account import Accounts, Budget, Refused
from discreet.node.policy import ClientPolicy, as_declared, budgets_of, check_policy
from discreet.node.release import LocalPrivacy, own_noise, round_privacy
from discreet.privacy.secure_grid import MOST_GRADIENTS
from discreet.protocol.messages import TrainRequest
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

ANYTHING = ClientPolicy()
NO_LEDGER = "this client has no ledger, and spends nothing it can't write down: start it with one"


@dataclass(frozen=True)
class Admitted:
    """A client that takes part: its work, what this costs, and what it has spent with this round, which is on its disk.

    Attributes:
      training, local: the settings of its work.
      charges: of a round; without the client's name.
      budgets: that hold them.
    """

    training: LocalSettings
    local: LocalPrivacy | None
    charges: tuple[Charge, ...] = ()
    budgets: tuple[Budget, ...] = ()
    epsilon_example: float = 0.0
    epsilon_local: float = 0.0
    epsilon_local_pure: float = 0.0


def admit_one(
    request: TrainRequest, holder: str, num_examples: int, *, accounts: Accounts | None, policy: ClientPolicy
) -> Admitted:
    """`admit` for one client.

    Raises:
      Refused: it does not take part.
      ConfigError: as `admit`.
    """
    admitted = admit(request, {holder: num_examples}, accounts=accounts, policy=policy)[holder]
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
    request = replace(request, run=as_declared(request.run, policy))
    asked = {size: _asked(request, size, policy) for size in set(sizes.values())}
    while True:
        found, charges = dict[str, Admitted | Refused](), list[Charge]()
        for holder, size in sizes.items():
            found[holder] = _enter(asked[size], holder, accounts, charges)
        if accounts is None or accounts.write(charges):
            return found


def _enter(
    work: Admitted | Refused, holder: str, accounts: Accounts | None, charges: list[Charge]
) -> Admitted | Refused:
    """Holds what a client would spend to its budgets, and adds it to the charges."""
    if isinstance(work, Refused) or not work.charges:
        return work
    if accounts is None:
        return Refused(NO_LEDGER)
    own = [replace(charge, holder=holder) for charge in work.charges]
    try:
        spent = accounts.after(own, work.budgets)
    except Refused as refusal:
        return refusal
    charges += own
    example, local = (accounts.epsilon(spent[name]) if name in spent else 0.0 for name in (EXAMPLE, LOCAL))
    pure = epsilon_of(spent[LOCAL], 0.0, RDP) if LOCAL in spent else 0.0
    return replace(work, epsilon_example=example, epsilon_local=local, epsilon_local_pure=pure)


def _asked(request: TrainRequest, num_examples: int, policy: ClientPolicy) -> Admitted | Refused:
    """Everything that follows from the number of examples alone; refused if it may not be asked at all."""
    run, number = request.run, request.round
    try:
        # After the last round a cohort may be asked to rate the last model.
        if number > run.rounds + (not request.work.trains):
            raise Refused(f"the train request is for round {number}, and the run has rounds={run.rounds}")
        local = round_privacy(run, round_number=number) if request.work.trains else None
        training = local_settings(run, num_examples)
        _check(run, training, local, num_examples=num_examples, policy=policy)
    except Refused as refusal:
        return refusal
    charges = _charges(request, training, local, num_examples)
    return Admitted(
        training, local, charges, budgets_of(policy, run, *dict.fromkeys(charge.guarantee for charge in charges))
    )


def _charges(
    request: TrainRequest, training: LocalSettings, local: LocalPrivacy | None, num_examples: int
) -> tuple[Charge, ...]:
    """The cost of a round to a client without a name: at example level the steps on what it trains on and its answer on
    what it holds out, at local level its update and its answer. No example is both trained on and held out, so that an
    account of the two together is an upper bound."""
    number, steps, charges = request.round, steps_of(num_examples, training), list[Charge]()
    if request.work.trains and training.example is not None and steps > 0:
        charges.append(Charge(number, EXAMPLE, "", example_event(num_examples, training), steps))
    if local is not None:
        charges.append(Charge(number, LOCAL, "", local.event))
    answer = own_noise(request.run) if request.work.query else None
    if answer is not None:
        charges.append(Charge(number, EXAMPLE if request.run.local.kind == "none" else LOCAL, "", answer.event))
    return tuple(charges)


def _check(
    run: ClientSettings, training: LocalSettings, local: LocalPrivacy | None, *, num_examples: int, policy: ClientPolicy
) -> None:
    """Raises Refused if the policy forbids the work, or a delta is too large for so many examples."""
    noises = {USER: run.user.noise_multiplier or 0.0} if run.user.enabled else {}
    rating = run.evaluation.noise_multiplier if run.rates_itself else math.inf
    if training.example is not None:
        noises[EXAMPLE] = min(training.example.noise_multiplier, rating)
    if run.example.secure:  # what its own account says is held to its budgets where it adds its vector to the sum
        noises[EXAMPLE] = run.example.noise_multiplier or 0.0
        if num_examples > MOST_GRADIENTS * run.training.batch_size:
            raise Refused(
                f"this client has more examples than {MOST_GRADIENTS} * training.batch_size="
                f"{MOST_GRADIENTS * run.training.batch_size}, beyond which a float64 sum of gradients is not bounded"
            )
    if run.local.kind != "none":
        noises[LOCAL] = min(rating, math.inf if local is None else local.noise_multiplier)
    counted = counted_examples(num_examples, training)
    if run.rates_itself:  # at most so many, with those that it holds out
        counted = math.ceil((counted + 1) / (1 - run.evaluation.share))
    # A guarantee for a whole client is one for each of its examples too: with 1 / n, one of them might leave as it is.
    deltas = {"privacy.delta": run.delta}
    if math.isfinite(policy.max_epsilon):
        deltas["max-delta of this client's policy"] = policy.max_delta
    for name, delta in deltas.items() if noises.keys() - {USER} else ():
        if counted > 1 and delta >= 1 / counted:
            raise Refused(f"{name} must be below 1 / n of this client's n examples (it is {delta:g})")
    check_policy(policy, run, noise_multipliers=noises)


def local_settings(run: ClientSettings, num_examples: int) -> LocalSettings:
    """The local work of a client with `num_examples` examples.

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
