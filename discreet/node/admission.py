"""Admission of clients to a round. Before anything is computed that could leave, each request is
checked against the client's guarantees, its owner's policy and its budgets, and its cost is on
disk. A client is a cohort of one: a node and a simulation of a million clients use the same
admission."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from discreet.accounting.events import noise_in
from discreet.ledger.durable_ledger import Charge
from discreet.mechanisms.client_noise import LocalPrivacy
from discreet.mechanisms.mechanism import Unreachable
from discreet.node.account import Accounts, Budget, Refused
from discreet.node.policy import NOTHING, ClientPolicy, budgets_of, check_deltas, check_policy
from discreet.node.time_limit import lift_limit
from discreet.node.work import Work
from discreet.settings.adjacency import EXAMPLE
from discreet.training.local_training import LocalSettings, steps_of

NO_LEDGER = (
    "this client has no ledger, so it refuses work that it would have to account for: "
    "start it with a ledger"
)


@dataclass(frozen=True)
class Admitted:
    """A client that takes part: its work, its cost, and its spending including this round, which is
    on its disk.

    Attributes:
      training, local: the settings of its work.
      charges: the charges of a round, still without the client's name.
      budgets: the budgets that limit them.
      step: makes the update in place of local training.
      bounded: updates (n, num_params) as they leave by a clip norm, and their bits (n,); None if
        they are clipped.
    """

    training: LocalSettings | None
    local: LocalPrivacy | None = None
    charges: tuple[Charge, ...] = ()
    budgets: tuple[Budget, ...] = ()
    epsilon_example: float = 0.0
    epsilon_local: float = 0.0
    epsilon_local_pure: float = 0.0
    step: Callable[..., Tensor] | None = None
    bounded: Callable[[Tensor, float], tuple[Tensor, Tensor]] | None = None


def admit_one(
    work: Work,
    data_owner: str,
    num_examples: int,
    *,
    accounts: Accounts | None,
    policy: ClientPolicy,
) -> Admitted:
    """`admit` for one client.

    Raises:
      Refused: the client does not take part.
      ConfigError: as `admit`.
    """
    admitted = admit(work, {data_owner: num_examples}, accounts=accounts, policy=policy)[data_owner]
    if isinstance(admitted, Refused):
        raise admitted
    return admitted


def admit(
    work: Work,
    sizes: Mapping[str, int],
    *,
    accounts: Accounts | None,
    policy: ClientPolicy = NOTHING,
) -> dict[str, Admitted | Refused]:
    """Checks and charges clients for one round; the charges are on disk after, in one transaction.

    Args:
      work: the work that is asked of all clients.
      sizes: the number of examples, or of owners if these are the unit, that each client trains on,
        by its name in the ledger.
      accounts: None for clients without a ledger.
      policy: the policy of the owner of all these clients.

    Returns:
      For each client its admission, or the reason for refusal. A refused client is charged nothing.

    Raises:
      ConfigError: the number of examples that the owner declares does not fit the run.
    """
    if policy.public_num_examples is not None:
        work = work.declaring(policy.public_num_examples)
    asked = {size: _asked(work, size, policy) for size in set(sizes.values())}
    while True:
        found = dict[str, Admitted | Refused]()
        charges = list[Charge]()
        for data_owner, size in sizes.items():
            each = asked[size]
            if isinstance(each, Admitted) and each.charges:
                each = _enter(each, data_owner, accounts, charges)
            found[data_owner] = each
        if accounts is None:
            return found
        lift_limit()  # what is charged is answered: from here the limit holds for work on data
        if accounts.write(charges):
            return found


def _enter(
    asked: Admitted, data_owner: str, accounts: Accounts | None, charges: list[Charge]
) -> Admitted | Refused:
    """Checks a client's planned spending against its budgets, and adds it to the charges."""
    if accounts is None:
        return Refused(NO_LEDGER)
    own = [replace(each, data_owner=data_owner + each.data_owner) for each in asked.charges]
    try:
        spent = accounts.after(own, asked.budgets)
    except Refused as refusal:
        return refusal
    charges += own
    return replace(asked, **accounts.reported(spent))


def _asked(work: Work, num_examples: int, policy: ClientPolicy) -> Admitted | Refused:
    """Everything that follows from the number of examples alone. Refused: the work is forbidden
    with that number, by the run or by the policy."""
    try:
        planned, noises = _planned(work, num_examples)
        training = planned.training
        # Of DP-SGD at each client n is public. Otherwise no refusal may follow from it.
        if EXAMPLE in noises and work.terms.promise.sums is None:
            check_deltas(policy, work, num_examples=num_examples, training=training)
            counted = num_examples
        else:
            counted = 1
        if work.request.work.trains and training is not None:
            check_steps(policy, counted, training)
        if policy != NOTHING:
            check_policy(policy, work, noise_multipliers=noises)
    except (Refused, Unreachable) as refusal:
        return Refused(str(refusal))
    if not planned.charges:
        return planned
    return replace(planned, budgets=budgets_of(policy, work, planned.charges))


def check_steps(policy: ClientPolicy, num_examples: int, training: LocalSettings) -> None:
    """Refuses more local steps than the policy allows."""
    steps = steps_of(num_examples, training)
    if steps > policy.max_steps:
        raise Refused(
            f"the policy of this client allows {policy.max_steps} local steps; this message asks "
            f"for {steps}"
        )


def _planned(work: Work, num_examples: int) -> tuple[Admitted, dict[str, float]]:
    """The part of a client with so many examples, with its charges, and the noise multiplier of
    each guarantee: as declared, and also by each event that it is charged.

    Raises:
      Unreachable: a mechanism has no part for the client.
    """
    number = work.request.round
    asked = work.request.work
    planned = Admitted(work.terms.training if asked.trains else None)
    noises = dict[str, float]()
    charges = list[Charge]()
    rating = work.terms.own_noise
    for name, mechanism in work.mechanisms.items():
        part = mechanism.at_client(number, num_examples, trains=asked.trains)
        # No two mechanisms of a run set the same part.
        planned = replace(
            planned,
            training=part.training or planned.training,
            local=part.local or planned.local,
            step=part.step or planned.step,
            bounded=part.bounded or planned.bounded,
        )
        noises[name] = part.noise_multiplier
        for event, count in part.events:
            noises[name] = min(noises[name], noise_in(event))
            charges.append(Charge(number, name, work.terms.account(name), event, count))
        if rating is not None:  # then no other guarantee is on
            noises[name] = min(noises[name], rating.privacy.noise_multiplier)
            # No example is both trained on and held out, so one account for both is an upper bound.
            if asked.query:
                charges.append(Charge(number, name, work.terms.account(name), rating.privacy.event))
    return replace(planned, charges=tuple(charges)), noises
