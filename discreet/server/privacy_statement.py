"""The privacy statement of a run: the last lines of its log, and privacy.json."""

from __future__ import annotations

import json
import math

from dp_accounting.dp_event import RepeatAndSelectDpEvent

from discreet.accounting.events import ACCOUNTANTS, event_to_json
from discreet.ledger.durable_ledger import DurableLedger
from discreet.mechanisms.mechanism import Mechanism, Statement
from discreet.mechanisms.mechanism_table import guarantees_of
from discreet.privacy.grid import LARGEST_SCALE
from discreet.server.plan import Plan
from discreet.server.state import Outcome, State

PURE = "pure"
ANSWER_NUMBERS = 64  # at most, of an answer: for each output of a model, and once more


def epsilon_lines(plan: Plan, ledger: DurableLedger, checkpoint: State) -> list[str]:
    """One line for each guarantee, those that are off included; and one for the population's account."""
    lines = list[str]()
    for guarantee in plan.guarantees:
        if not guarantee.enabled:
            lines.append(f"{guarantee.name}-level: none (epsilon = inf)")
            continue
        mechanism = plan.mechanisms[guarantee.name]
        epsilon = _epsilons(mechanism, plan, ledger, checkpoint)
        shown = ", ".join(f"{value:.4g} by {name}" for name, value in epsilon.items())
        whose = f"; {_whose(mechanism, checkpoint)}" if mechanism.reported else ""
        lines.append(
            f"{guarantee.name}-level: epsilon {shown} at delta {plan.run.delta:g} "
            f"({guarantee.unit}; {guarantee.adjacency}{whose})"
        )
    if ledger.account is not None:
        lines.append(ledger.account.said())
    return lines


def _whose(mechanism: Mechanism, checkpoint: State) -> str:
    if not mechanism.reported:
        return "of the server's ledger"
    if mechanism.at_server:
        return "of the run, by the server's ledger; each client's own has what it took part in"
    count = len(checkpoint.unaccounted)
    without = f"; {count} of them reported an infinite one and are not in it" if count else ""
    return f"the largest that clients reported of their own ledgers{without}"


def privacy_facts(plan: Plan, ledger: DurableLedger, outcome: Outcome) -> dict[str, object]:
    """The content of privacy.json: every guarantee of the run, those that are off included; and what the population has
    spent in all runs, if the ledger charges its account."""
    return {
        "rounds": outcome.checkpoint.round,
        "stopped": outcome.stopped,
        "model_round": outcome.model.round,
        "delta": plan.run.delta,
        "accountant": plan.run.accountant,
        "seed": plan.seed,
        "protects_nobody": plan.seed is not None,
        "ledger_head": ledger.position().head,
        "account": None if ledger.account is None else ledger.account.facts(),
        "guarantees": [
            _facts(mechanism, statement, plan, ledger, outcome.checkpoint)
            for mechanism, statement in zip(guarantees_of(plan.run), plan.guarantees, strict=True)
        ],
    }


def _facts(
    mechanism: Mechanism, guarantee: Statement, plan: Plan, ledger: DurableLedger, checkpoint: State
) -> dict[str, object]:
    on = guarantee.enabled
    facts = {
        **{each: getattr(guarantee, each) for each in ("name", "enabled", "unit", "adjacency", "trusted", "observer")},
        **{name: getattr(guarantee, name) if on else "none" for name in ("mechanism", "accounting")},
        "epsilon": _epsilons(mechanism, plan, ledger, checkpoint) if on else {plan.run.accountant: math.inf},
        "epsilon_is": _whose(mechanism, checkpoint),
        "events": [
            {"event": json.loads(event_to_json(event)), "count": count}
            for event, count in ledger.spent(guarantee.name).entries
        ]
        if mechanism.at_server
        else "in each client's own ledger",
        "not_covered": list(guarantee.not_covered),
    }
    if on:
        facts["floating_point"] = _floating_point(mechanism, plan, ledger, checkpoint)
    if on and mechanism.reported:
        facts["clients_without_epsilon"] = len(checkpoint.unaccounted)
    return facts


def _epsilons(mechanism: Mechanism, plan: Plan, ledger: DurableLedger, checkpoint: State) -> dict[str, float]:
    chosen = plan.run.accountant
    if mechanism.reported:
        return dict(zip((chosen, PURE), map(checkpoint.largest_reported, mechanism.reported), strict=False))
    spent = ledger.spent(mechanism.guarantee)
    # The chosen one first; a choice among trials has no PLD.
    only = mechanism.only_rdp or any(isinstance(event, RepeatAndSelectDpEvent) for event, _ in spent.entries)
    others = [] if only else [other for other in ACCOUNTANTS if other != chosen]
    return {accountant: spent.epsilon(plan.run.delta, accountant) for accountant in [chosen, *others]}


def _floating_point(
    mechanism: Mechanism, plan: Plan, ledger: DurableLedger, checkpoint: State
) -> dict[str, str | float]:
    if mechanism.masked:
        return {"noise": "discrete", "delta_slack": 0.0}  # whole numbers, and exact draws
    rated = sum(plan.run.evaluation.ratings(checkpoint.round))
    # Of the largest release: an update with its count, or the means and deviations that clients were asked for.
    values = max(checkpoint.params.numel() + 1, 2 * len(plan.run.normaliser.means or []))
    if rated:  # a model with k outputs has at least k parameters
        values += ANSWER_NUMBERS * (checkpoint.params.numel() + 1)
    # The largest noise that a grid takes: the bound holds for every clip norm that the run had.
    each = mechanism.grid_slack(values, LARGEST_SCALE)
    if each is None:
        noise = "secure_sum" if plan.run.noise == "secure_sum" else "float"
        return {"noise": noise, "delta_slack": "not bounded"}
    releases = ledger.spent(mechanism.guarantee).num_releases if mechanism.at_server else checkpoint.round + rated
    slack = releases * each
    stated = _epsilons(mechanism, plan, ledger, checkpoint).values()
    # The slack grows with epsilon: this one is enough for each that is stated, the pure one of Laplace noise too.
    epsilon = max((value for value in stated if math.isfinite(value)), default=math.inf)
    # For neighbours P and P', with drawn noise within r of exact noise: P(drawn in A) <= P(exact in A) + r
    # <= exp(epsilon) * P'(exact in A) + delta + r, and P'(exact in A) <= P'(drawn in A) + r.
    return {"noise": "grid", "delta_slack": (1 + math.exp(min(epsilon, 700.0))) * slack}
