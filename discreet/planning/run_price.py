"""The price of a run in a few lines, before it spends anything: epsilon, noise, and the traffic of
a node."""

from __future__ import annotations

from collections.abc import Iterator

from discreet.accounting.accounting import epsilon_spent
from discreet.mechanisms.mechanism import SERVER, releases_of
from discreet.planning.noise_outlook import noise_outlook
from discreet.planning.plan import Plan

BYTES = 4  # of a parameter on its way: float32, or a masked word


def price_lines(plan: Plan) -> Iterator[str]:
    """One line for each enabled guarantee, one on noise, and one on traffic."""
    run = plan.run
    for name, mechanism in plan.mechanisms.items():
        if SERVER not in mechanism.charged_at:
            epsilon = run.target_epsilon(name)
            if epsilon is None:
                target = ""
            else:
                target = f" {epsilon:g} after all {run.rounds} rounds,"
            yield (
                f"{name}-level: epsilon{target} of each client, in its own account "
                f"(delta {run.delta:g})"
            )
    yield from _epsilons(plan)
    if plan.charges_server:
        outlook = noise_outlook(plan)
        yield f"{outlook}: {'it will not learn' if outlook.loud else 'it can learn'}"
    yield (
        f"a node receives and sends {_size(BYTES * plan.num_params)} a round ({plan.num_params} "
        "parameters)"
    )


def _epsilons(plan: Plan) -> Iterator[str]:
    mechanism = plan.mechanism
    run = plan.run
    if plan.charges_server:
        noise = run.configured_noise_multiplier(mechanism.guarantee)
    else:
        noise = None
    if noise is None:
        return
    one, total = (
        epsilon_spent(
            releases_of(mechanism, run, rounds), delta=run.delta, accountant=run.accountant
        )
        for rounds in (1, run.rounds)
    )
    yield (
        f"{mechanism.guarantee}-level: epsilon {one:.4g} after the first round, {total:.4g} after "
        f"all {run.rounds} ({run.accountant}, delta {run.delta:g}, noise multiplier {noise:.4g})"
    )


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
