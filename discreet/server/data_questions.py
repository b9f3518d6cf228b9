"""Questions about clients' data before the first round: statistics, and the normaliser of inputs.

Every client is asked once, and the answers are noised at the server.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict

import torch

from discreet.data.examples import Task
from discreet.ledger.budget import BudgetSpent
from discreet.mechanisms.round_state import RoundStart
from discreet.mechanisms.sums import AnswerRelease, Replies
from discreet.planning.plan import Plan
from discreet.protocol.messages import NORMALISE, STATISTICS, Assignment, TrainRequest
from discreet.queries.answers import Estimate
from discreet.queries.query import Query, Sums, query_of, shape_of_data
from discreet.queries.statistic_answers import DataShape, normaliser_from
from discreet.run_files.model_description import input_names
from discreet.run_files.whole_files import write_json
from discreet.server.round import RunLedger, one_query
from discreet.server.run_context import RunContext
from discreet.server.transport import NobodyAnswers, ReplyStats, Transport
from discreet.settings.adjacency import USER
from discreet.settings.data import NormaliserConfig
from discreet.settings.rules import ConfigError

BEFORE = 0  # the round that a ledger names for what is asked before the first one

logger = logging.getLogger("discreet")


def statistics_noise(plan: Plan, length: int) -> AnswerRelease:
    """The release of the sum of all clients' answers of `length` numbers about their data."""
    population = plan.run.user.population_size
    noise = plan.run.statistics.noise_multiplier
    event = plan.run.statistics.event
    return AnswerRelease(length, float(population), noise, plan.run.noise, population, event=event)


def answers_by(transport: Transport, plan: Plan, name: str) -> Replies:
    """Yields the answers of all available clients to a question about their data. The clients
    receive no parameters. NobodyAnswers: no client answered; nothing is charged then."""
    available = list(transport.available_clients())
    stats = ReplyStats()
    asked = TrainRequest(
        1, plan.first_clip_norm, plan.run, work=Assignment(trains=False, query=name)
    )
    for reply in transport.ask(asked, torch.zeros(0), available):
        counted = stats.count(reply)
        if counted is not None:
            yield counted
    stats.log_failures()
    logger.info(
        "%d of %d clients answered the question about their data", stats.accepted, len(available)
    )
    if available and not stats.accepted:
        raise NobodyAnswers(
            f"no client gave a usable answer; the last failure: {stats.reasons[-1]}"
        )


def found_normaliser(run: RunContext, task: Task, answers: Replies) -> NormaliserConfig:
    """The means and deviations in clients' answers to NORMALISE. ConfigError as `ask`."""
    query = query_of(NORMALISE, run.plan.run, task.shape)
    found = query.read(ask(run, query, answers, name=NORMALISE))
    normaliser = normaliser_from(found, shape_of_data(run.plan.run.statistics, task.shape))
    count = shape_of_data(run.plan.run.statistics, task.shape).columns
    logger.info(
        "inputs are normalised by %d means and deviations that clients were asked for", count
    )
    return normaliser


def ask(run: RunContext, query: Query, answers: Replies, *, name: str) -> Sums:
    """The noised sum of all clients' answers to a query. Its cost is on disk before noise is drawn.
    `name`: the purpose of the query; each purpose has its own random draws. ConfigError: the query
    would exceed the budget of the run, or of all runs if it charges an account; no client is asked
    then."""
    event = run.plan.run.statistics.event
    ledger = RunLedger(run.ledger, {USER: run.plan.budget()})
    what = "asking clients about their data"
    try:
        ledger.require_room(USER, event, what)
    except BudgetSpent as error:
        raise ConfigError(f"a larger statistics.noise_multiplier is needed: {error}") from error
    # A repeated question draws new noise: the same noise on two sums would reveal their difference.
    source = run.source.child(name, run.ledger.spent(USER).num_releases)
    how = statistics_noise(run.plan, query.length)
    before = RoundStart(BEFORE, torch.zeros(0), run.plan.first_clip_norm)
    return one_query(before, how, answers, ledger, source)


def written_statistics(run: RunContext, task: Task, answers: Replies) -> str:
    """The statistics from clients' answers to STATISTICS, as a text. Writes `statistics.json`.
    ConfigError: the question would exceed the budget; no client is asked then."""
    query = query_of(STATISTICS, run.plan.run, task.shape)
    sums = ask(run, query, answers, name=STATISTICS)
    titles = _titles(task, shape_of_data(run.plan.run.statistics, task.shape))
    found = {
        what: {titles.get(of, of): one for of, one in row.items()}
        for what, row in query.read(sums).items()
    }
    told = run.plan.run
    user = run.plan.guarantees[0]
    path = run.folder.path / "statistics.json"
    epsilon = run.ledger.spent(USER).epsilon(told.delta, told.accountant)
    seeded = run.plan.seed is not None
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
    if seeded:
        nobody = "; seed is set, so the noise protects nobody"
    else:
        nobody = ""
    if task.description is not None and task.description.columns:
        units = "values of columns are as a model reads them: -1..1 for low..high\n"
    else:
        units = ""
    return (
        f"{_table(found)}{units}\nuser-level: epsilon {epsilon:.4g} by {told.accountant} at delta "
        f"{told.delta:g} spent by now ({user.unit}; {user.adjacency}){nobody}\nwritten to {path}\n"
    )


def _titles(task: Task, shape: DataShape) -> dict[str, str]:
    """The names that data.toml gives to columns and classes, by those that statistics give them.
    None of columns if the inputs have no names."""
    description = task.description
    if description is None:
        return {}
    titles = {f"class {at}": f"class {word}" for at, word in enumerate(description.classes)}
    names = input_names(description) or []
    if len({*names}) == shape.columns:
        titles |= dict(zip(shape.names, names, strict=True))
    return titles


def _table(found: Mapping[str, Mapping[str, Estimate]]) -> str:
    rows = [("statistic", "of", "value", "standard error")]
    for what, row in found.items():
        rows += [
            (what, of, f"{one.value:.5g}", f"{one.standard_error:.2g}") for of, one in row.items()
        ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "".join("  ".join(map(str.ljust, row, widths)).rstrip() + "\n" for row in rows)
