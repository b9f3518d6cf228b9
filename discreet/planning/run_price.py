"""The price of a run in a few lines, before it spends anything: epsilon, noise, and the traffic of
a node."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from discreet.accounting.calibration import rounds_within
from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.data.examples import Examples
from discreet.mechanisms.mechanism import SERVER, Unreachable
from discreet.planning.noise_outlook import noise_outlook, outlook_at_clients
from discreet.planning.plan import Plan
from discreet.settings.adjacency import EXAMPLE
from discreet.settings.client_settings import ClientSettings

BYTES = 4  # of a parameter on its way: float32, or a masked word


def price_lines(plan: Plan, units: int | None = None) -> Iterator[str]:
    """One line for each enabled guarantee, one on noise, and one on traffic. `units`: the examples
    or owners of an average client; None if they are not known."""
    for name, mechanism in plan.mechanisms.items():
        if SERVER not in mechanism.charged_at:
            yield from _client_lines(plan, name, units)
    yield from _epsilons(plan)
    if not plan.is_private:
        yield "no guarantee of this run has noise: it protects nobody"
    yield from plan.reasons
    if plan.charges_server and not plan.run.statistics.only:  # which learns nothing
        outlook = noise_outlook(plan)
        yield outlook.line
    yield (
        f"a node receives and sends {_size(BYTES * plan.num_params)} a round ({plan.num_params} "
        "parameters)"
    )


def average_units(run: ClientSettings, examples: Examples) -> int:
    """The examples of an average client, or its owners if they are what a guarantee is about."""
    if run.example.by_owner and examples.owners is not None:
        count = len(set(examples.owners.tolist()))
    else:
        count = len(examples)
    return count // run.data.num_clients


def _client_lines(plan: Plan, name: str, units: int | None) -> Iterator[str]:
    """What each client pays from its own account, and the noise that it adds."""
    run = plan.run
    work = None
    if units:
        with suppress(Unreachable):
            work = plan.mechanisms[name].at_client(1, units, trains=True)
    target = run.target_epsilon(name)
    said = ""
    if work is not None and work.events:
        one = PrivacyLedger(work.events).epsilon(run.delta, run.accountant)
        said += f" {one:.4g} after the first round,"
        if target is None:
            events = tuple((event, count * run.rounds) for event, count in work.events)
            target = PrivacyLedger(events).epsilon(run.delta, run.accountant)
    if target is not None:
        said += f" {target:.4g} after all {run.rounds} rounds,"
    whose = "each client"
    own_count = name == EXAMPLE and run.data.public_num_examples is None
    if own_count and said and run.target_epsilon(name) is None:
        whose = f"a client with the average of {units} {run.example.unit_name}s (fewer cost more)"
    yield f"{name}-level: epsilon{said} of {whose}, in its own account (delta {run.delta:g})"
    if work is not None and (outlook := outlook_at_clients(plan, work)) is not None:
        if work.training is None:
            who = ""
        else:
            who = f"with {units} {run.example.unit_name}s a client, "
        yield f"{who}{outlook.line}"


def _epsilons(plan: Plan) -> Iterator[str]:
    mechanism = plan.mechanism
    run = plan.run
    if plan.charges_server:
        noise = run.configured_noise_multiplier(mechanism.guarantee)
    else:
        noise = None
    if noise is None:
        return
    one = plan.epsilon_after(1)
    total = plan.epsilon_after(run.rounds)
    yield (
        f"{mechanism.guarantee}-level: epsilon {one:.4g} after the first round, {total:.4g} after "
        f"all {run.rounds} ({run.accountant}, delta {run.delta:g}, noise multiplier {noise:.4g})"
    )
    most = run.largest_epsilon(mechanism.guarantee)
    if plan.account is None and most is not None and total > most:
        room = rounds_within(most, plan.epsilon_after, most=run.rounds)
        yield f"the budget of epsilon {most:g} has room for {room} of the {run.rounds} rounds"


def _size(count: float) -> str:
    """
    >>> _size(4 * 9610)
    '38.4 kB'
    """
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
