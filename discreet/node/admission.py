"""Admission of clients to a round. Before anything is computed that could leave, each request is
checked against the client's guarantees, its owner's policy and its budgets, and its cost is on
disk. A client is a cohort of one: a node and a simulation of a million clients use the same
admission."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from discreet.ledger.durable_ledger import Charge
from discreet.ledger.owner_account import account_name
from discreet.mechanisms.client_noise import LocalPrivacy
from discreet.mechanisms.mechanism import SERVER, ClientRound, Unreachable
from discreet.mechanisms.mechanism_table import own_noise
from discreet.node.account import Accounts, Budget, Refused
from discreet.node.policy import NOTHING, ClientPolicy, budgets_of, check_work
from discreet.node.work import Work, work_of
from discreet.settings.privacy import EXAMPLE
from discreet.training.local_training import LocalSettings

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
    declared = policy.public_num_examples
    if (
        declared is not None
    ):  # either number is a constant, and what it costs is charged: add-or-remove holds with both
        run = replace(work.run, data=replace(work.run.data, public_num_examples=declared))
        work = work_of(replace(work.request, run=run))
    asked = {size: _asked(work, size, policy) for size in set(sizes.values())}
    while True:
        found = dict[str, Admitted | Refused]()
        charges = list[Charge]()
        for data_owner, size in sizes.items():
            each = asked[size]
            if isinstance(each, Admitted) and each.charges:
                each = _enter(each, data_owner, accounts, charges)
            found[data_owner] = each
        if accounts is None or accounts.write(charges):
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
    with that number."""
    run = work.run
    number = work.request.round
    trains = work.training is not None
    parts = dict[str, ClientRound]()
    charges = list[Charge]()
    found = Admitted(work.training)
    try:
        # After the last round, a cohort may still be asked to rate the last model.
        if number > run.rounds + (not trains):
            raise Refused(
                f"the train request is for round {number}, but the run has rounds={run.rounds}"
            )
        for name, mechanism in work.mechanisms.items():
            part = mechanism.at_client(number, num_examples, trains=trains)
            parts[name] = part
            # No two mechanisms of a run set the same part.
            found = replace(
                found,
                training=part.training or found.training,
                local=part.local or found.local,
                step=part.step or found.step,
                bounded=part.bounded or found.bounded,
            )
            for event, count in part.events:
                by_owner = name == EXAMPLE and run.example.by_owner
                account = account_name("", by_owner=by_owner)
                charges.append(Charge(number, name, account, event, count))
        check_work(policy, work, parts, num_examples=num_examples, training=found.training)
    except (Refused, Unreachable) as refusal:
        return Refused(str(refusal))
    if work.query and work.has_own_noise:
        charges.append(_charge_of_answer(work))
    if not charges:
        return found
    return replace(found, charges=tuple(charges), budgets=budgets_of(policy, work, charges))


def _charge_of_answer(work: Work) -> Charge:
    """The charge of an answer that the client noises. No example is both trained on and held out,
    so one account for both is an upper bound."""
    noise = own_noise(work.run)
    assert noise is not None
    payer = next(
        name for name, mechanism in work.mechanisms.items() if SERVER not in mechanism.charged_at
    )
    return Charge(work.request.round, payer, "", noise.privacy.event)
