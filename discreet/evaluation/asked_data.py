"""Questions about clients' data before the first round of a run: everybody is asked once, and what comes back is noised
at the server and charged. The same for simulated clients and for nodes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace

import torch

from discreet.data.examples import Task
from discreet.evaluation.answer_sum import answer_round
from discreet.evaluation.private_statistics import (
    data_query,
    needs_normaliser,
    normaliser_in,
    statistics_noise,
    with_range,
)
from discreet.ledger.budget import BudgetSpent, require_room_for
from discreet.ledger.durable_ledger import Charge
from discreet.mechanisms.sums import Replies
from discreet.protocol.messages import Work
from discreet.queries.answers import Estimate
from discreet.queries.query import NORMALISE, STATISTICS, Query, Sums, shape_of_data
from discreet.queries.statistic_answers import normaliser_from
from discreet.server.run_context import RunContext
from discreet.server.run_folder import write_json
from discreet.server.session import Session
from discreet.server.transport import ReplyStats, Transport
from discreet.settings.data import NormaliserConfig
from discreet.settings.privacy import USER
from discreet.settings.rules import ConfigError

BEFORE = 0  # the round that a ledger names for what is asked before the first one
FILE = "statistics.json"

Answers = Callable[[Query], Replies]

logger = logging.getLogger("discreet")


def answers_by(transport: Transport, session: Session, name: str) -> Replies:
    """Yields the answers of all available clients to a question about their data. They get no parameters."""
    available, stats = list(transport.available_clients()), ReplyStats()
    asked = Work(trains=False, query=name)
    clip_norm, nothing = session.plan.first_clip_norm, torch.zeros(0)
    replies = transport.ask(round_number=1, params=nothing, clip_norm=clip_norm, cohort=available, work=asked)
    yield from stats.accept(replies)
    stats.log_failures()
    answered = len(available) - sum(stats.failures.values())
    logger.info("%d of %d clients answered what their data are like", answered, len(available))


def normalised(session: Session, answers: Answers) -> Session:
    """The session of a run with `data.normalise=private`, whose clients have been asked what inputs are normalised by;
    any other session as it is, and one that goes on. The means and deviations are written to the run folder, so that a
    run that goes on does not ask again.

    Raises:
      ConfigError: asking would pass the budget; nobody is asked then.
    """
    plan, task, run = session.plan, session.task, session.context
    if not needs_normaliser(plan):
        return session
    query = data_query(NORMALISE, plan, task)
    sums = ask(run, query, answers(query), name=NORMALISE)
    ranged = with_range(plan.run.statistics, plan.run.data.name, plan.data_path)
    found = normaliser_from(query.read(sums), shape_of_data(ranged, task.shape))
    normaliser = NormaliserConfig(list(found.means), list(found.deviations))
    written = {**plan.written, "normaliser": asdict(normaliser)}
    run.folder.write_config(written)
    logger.info("inputs are normalised by %d means and deviations that clients were asked for", len(found.means))
    plan = replace(plan, run=replace(plan.run, normaliser=normaliser), written=written)
    return replace(session, context=replace(run, plan=plan), task=normaliser_in(normaliser).task(task))


def ask(run: RunContext, query: Query, answers: Replies, *, name: str) -> Sums:
    """The noised sum of all clients' answers to a query; what it costs is on disk before noise is drawn. `name`: of
    what the query is for; each has draws of its own.

    Raises:
      ConfigError: it would pass the budget of the run, or of all runs if it charges an account; nobody is asked then.
    """
    event, ledger, what = run.plan.run.statistics.event, run.ledger, "asking clients about their data"
    charged = Charge(BEFORE, USER, "", event)
    try:
        require_room_for(charged, what, ledger=ledger, budget=run.plan.budget())
    except BudgetSpent as error:
        raise ConfigError(f"a larger statistics.noise_multiplier is needed: {error}") from error
    # What is asked again draws anew: the same noise on two sums would give their difference away.
    source = run.source.child(name, ledger.spent(USER).num_releases)
    how = statistics_noise(run.plan, query.length)
    return answer_round(answers, how, event=event, source=source, charge=lambda _: ledger.charge([charged]))


def written_statistics(run: RunContext, task: Task, answers: Replies) -> str:
    """The statistics that clients' answers to STATISTICS give, as a text; `statistics.json` is written.

    Raises:
      ConfigError: asking would pass the budget; nobody is asked then.
    """
    query = data_query(STATISTICS, run.plan, task)
    found = query.read(ask(run, query, answers, name=STATISTICS))
    told, user, path = run.plan.run, run.plan.guarantees[0], run.folder.path / FILE
    epsilon, seeded = run.ledger.spent(USER).epsilon(told.delta, told.accountant), run.plan.seed is not None
    spent = {
        "noise_multiplier": told.statistics.noise_multiplier,
        "unit": user.unit,
        "adjacency": user.adjacency,
        "delta": told.delta,
        "epsilon": epsilon,
        "accountant": told.accountant,
        "protects_nobody": seeded,
    }
    numbers = {what: {of: asdict(one) for of, one in row.items()} for what, row in found.items()}
    write_json(path, {"statistics": numbers, "privacy": spent})
    nobody = "; seed is set, so that the noise protects nobody" if seeded else ""
    return (
        f"{_table(found)}\nuser-level: epsilon {epsilon:.4g} by {told.accountant} at delta {told.delta:g} spent by now "
        f"({user.unit}; {user.adjacency}){nobody}\nwritten to {path}\n"
    )


def _table(found: Mapping[str, Mapping[str, Estimate]]) -> str:
    rows = [("statistic", "of", "value", "standard error")]
    for what, row in found.items():
        rows += [(what, of, f"{one.value:.5g}", f"{one.standard_error:.2g}") for of, one in row.items()]
    widths = [max(len(row[place]) for row in rows) for place in range(4)]
    return "".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n" for row in rows
    )
