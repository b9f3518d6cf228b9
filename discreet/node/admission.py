"""Admission of clients to a round. All that a client is asked is checked against its guarantees, its owner's policy and
its budgets, and what it costs is on disk, before anything is computed that could leave. A client is a cohort of one: a
node and a simulation of a million clients are admitted alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from discreet.accounting.events import RDP, noise_in
from discreet.accounting.privacy_ledger import epsilon_of
from discreet.ledger.durable_ledger import Charge
from discreet.mechanisms.client_noise import LocalPrivacy
from discreet.mechanisms.mechanism import SERVER, ClientRound, Unreachable
from discreet.mechanisms.mechanism_table import mechanisms_of, own_noise
from discreet.node.account import Accounts, Budget, Refused
from discreet.node.policy import ClientPolicy, budgets_of, check_policy
from discreet.protocol.messages import TrainRequest
from discreet.settings.privacy import EXAMPLE, LOCAL, USER
from discreet.training.local_training import LocalSettings, counted_examples, settings_without_noise, steps_of

ANYTHING = ClientPolicy()
NO_LEDGER = "this client has no ledger, and spends nothing it can't write down: start it with one"


@dataclass(frozen=True)
class Admitted:
    """A client that takes part: its work, what this costs, and what it has spent with this round, which is on its disk.

    Attributes:
      training, local: the settings of its work.
      charges: of a round; without the client's name.
      budgets: that hold them.
      step: makes the update in place of local training.
      bounded: updates (n, num_params) as they leave by a clip norm, and their bits (n,); None if they are clipped.
    """

    training: LocalSettings
    local: LocalPrivacy | None = None
    charges: tuple[Charge, ...] = ()
    budgets: tuple[Budget, ...] = ()
    epsilon_example: float = 0.0
    epsilon_local: float = 0.0
    epsilon_local_pure: float = 0.0
    step: Callable[..., Tensor] | None = None
    bounded: Callable[[Tensor, float], tuple[Tensor, Tensor]] | None = None


def admit_one(
    request: TrainRequest, data_owner: str, num_examples: int, *, accounts: Accounts | None, policy: ClientPolicy
) -> Admitted:
    """`admit` for one client.

    Raises:
      Refused: it does not take part.
      ConfigError: as `admit`.
    """
    admitted = admit(request, {data_owner: num_examples}, accounts=accounts, policy=policy)[data_owner]
    if isinstance(admitted, Refused):
        raise admitted
    return admitted


def admit(
    request: TrainRequest, sizes: Mapping[str, int], *, accounts: Accounts | None, policy: ClientPolicy = ANYTHING
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
    run, declared = request.run, policy.public_num_examples
    if declared is not None:  # either number is a constant, and what it costs is charged: add-or-remove holds with both
        request = replace(request, run=replace(run, data=replace(run.data, public_num_examples=declared)))
    asked = {size: _asked(request, size, policy) for size in set(sizes.values())}
    while True:
        found, charges = dict[str, Admitted | Refused](), list[Charge]()
        for data_owner, size in sizes.items():
            found[data_owner] = _enter(asked[size], data_owner, accounts, charges)
        if accounts is None or accounts.write(charges):
            return found


def _enter(
    work: Admitted | Refused, data_owner: str, accounts: Accounts | None, charges: list[Charge]
) -> Admitted | Refused:
    """Holds what a client would spend to its budgets, and adds it to the charges."""
    if isinstance(work, Refused) or not work.charges:
        return work
    if accounts is None:
        return Refused(NO_LEDGER)
    own = [replace(charge, data_owner=data_owner) for charge in work.charges]
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
        mechanisms, trains = mechanisms_of(run), request.work.trains
        each = {name: one.at_client(number, num_examples, trains=trains) for name, one in mechanisms.items()}
        training = next((one.training for one in each.values() if one.training), None)
        training = training or settings_without_noise(run.training, run.task)
        _check(request, training, each, num_examples=num_examples, policy=policy)
    except (Refused, Unreachable) as refusal:
        return Refused(str(refusal))
    charges = [Charge(number, name, "", event, count) for name, one in each.items() for event, count in one.events]
    if request.work.query and (noise := own_noise(run)) is not None:
        # No example is both trained on and held out, so that an account of the two together is an upper bound.
        name = next(name for name, one in mechanisms.items() if SERVER not in one.charged_at)
        charges.append(Charge(number, name, "", noise.privacy.event))
    budgets = budgets_of(policy, run, *dict.fromkeys(charge.guarantee for charge in charges))
    local = next((one.local for one in each.values() if one.local), None)
    step = next((one.step for one in each.values() if one.step), None)
    bounded = next((one.bounded for one in each.values() if one.bounded), None)
    return Admitted(training, local, tuple(charges), budgets, step=step, bounded=bounded)


def _noise_of(one: ClientRound) -> float:
    """The least noise of what is noised for a client: as it is declared, and by each event that it is charged."""
    return min([one.noise_multiplier, *(noise_in(event) for event, _ in one.events)])


def _check(
    request: TrainRequest,
    training: LocalSettings,
    each: Mapping[str, ClientRound],
    *,
    num_examples: int,
    policy: ClientPolicy,
) -> None:
    """Raises Refused if the policy forbids the work, or a delta is too large for so many examples."""
    run = request.run
    noises = {name: _noise_of(one) for name, one in each.items()}
    counted = counted_examples(num_examples, training)
    if own_noise(run) is not None:
        noises = {name: min(noise, run.evaluation.noise_multiplier) for name, noise in noises.items()}
        counted = math.ceil((counted + 1) / (1 - run.evaluation.share))  # at most so many, with those that it holds out
    # A guarantee for a whole client is one for each of its examples too: with 1 / n, one of them might leave as it is.
    deltas = {"privacy.delta": run.delta}
    if math.isfinite(policy.max_epsilon):
        deltas["max-delta of this client's policy"] = policy.max_delta
    for name, delta in deltas.items() if noises.keys() - {USER} else ():
        if counted > 1 and delta >= 1 / counted:
            raise Refused(f"{name} must be below 1 / n of this client's n examples (it is {delta:g})")
    steps = steps_of(num_examples, training) if request.work.trains else 0
    if steps > policy.max_steps:
        raise Refused(f"the policy of this client allows {policy.max_steps} local steps; this message asks for {steps}")
    check_policy(policy, run, noise_multipliers=noises)
