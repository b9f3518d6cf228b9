"""The context of a run, from its opened folder to its last file, for any kind of clients; and its
privacy statement: the last lines of its log, and privacy.json."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from dp_accounting.dp_event import RepeatAndSelectDpEvent
from torch import Tensor

from discreet.accounting.events import ACCOUNTANTS, RDP
from discreet.ledger.durable_ledger import CLIENTS_LEDGER, DurableLedger
from discreet.mechanisms.mechanism import PURE, REPORTED, SERVER, Mechanism, Statement
from discreet.planning.noise_outlook import noise_outlook
from discreet.planning.plan import Plan
from discreet.planning.run_price import price_lines
from discreet.planning.state import Outcome, State, initial_state
from discreet.privacy.grid import LARGEST_SCALE
from discreet.privacy.randomness import RandomSource, source_of
from discreet.run_files.call import Call
from discreet.run_files.clients_account import with_lost_rounds
from discreet.run_files.opening import LOCK_SECONDS, check_output, only_writer, warn_of_readers
from discreet.run_files.run_folder import (
    ASKED,
    RunFolder,
    RunSecrets,
    change_state,
    note_interruption,
    write_tensors,
)
from discreet.run_files.run_ledgers import check_ledgers, create_ledgers, whole
from discreet.run_files.whole_files import write_json
from discreet.server.population_account import PopulationAccount
from discreet.settings.adjacency import EXAMPLE, LOCAL
from discreet.settings.client_settings import ClientSettings

logger = logging.getLogger("discreet")

ANSWER_NUMBERS = 64  # at most, of an answer: for each output of a model, and once more


@dataclass(frozen=True, eq=False)
class RunContext:
    """A run whose folder is locked, with its plan and its open ledger. It starts or resumes from
    `state`. `source` is the random source of cohorts and noise, `device` computes, and `names` maps
    settings' keys to their names in messages."""

    plan: Plan
    folder: RunFolder
    ledger: DurableLedger
    state: State
    source: RandomSource
    device: str = "cpu"
    names: Mapping[str, str] = field(default_factory=dict)


def open_run(
    plan: Plan,
    call: Call,
    *,
    params: Tensor,
    simulated: bool,
    held: ExitStack,
) -> RunContext:
    """Opens the folder of a new run, which starts from `params` (num_params,), or of a resumed one.
    `held` keeps it locked for this process. Clients that are `simulated` keep their ledger in it.

    Raises:
      ConfigError: the folder holds a run already, holds none to resume, or can't be used.
      LedgerError: a run is resumed under other privacy settings, or its ledgers lack some of its
        spending.
    """
    folder = check_output(call)
    account = PopulationAccount.of(plan)
    if account is not None:
        account.ledger.check()
    patience = LOCK_SECONDS if call.resume else 0.0
    held.enter_context(only_writer(folder.path, patience=patience))
    # A run may have begun there since.
    check_output(replace(call, output_dir=str(folder.path)), locked=True)
    warn_of_readers(folder.path)
    if call.resume:
        check_ledgers(folder, plan, simulated=simulated)
    else:
        create_ledgers(folder, plan, simulated=simulated)
    ledger = folder.ledger(plan)
    if account is not None:
        account.join(ledger, folder)
    state = initial_state(params, clip_norm=plan.first_clip_norm)
    if call.resume:
        state = with_lost_rounds(folder.load_checkpoint() or state, plan, folder)
        # Without the rows of rounds that will be repeated.
        folder.replace_metrics(
            [row for row in folder.read_metrics() if (row["round"] or 0) <= state.round]
        )
        logger.info("resumed after round %d", state.round)
        if state.round > plan.run.rounds:
            said = "rounds=%d: no round is added, and none taken away: the run has %d already"
            logger.warning(said, plan.run.rounds, state.round)
    if not call.resume:
        folder.write_config(plan.as_asked, device=call.device, name=ASKED)
    folder.write_config(plan.settings, device=call.device)  # from here on there is a run
    state = replace(state, carried=RunSecrets(folder.path))
    return RunContext(plan, folder, ledger, state, source_of(plan.seed), call.device)


def _guarantee_line(run: ClientSettings, name: str) -> str:
    """One line about a guarantee that is on: its noise, its delta and its budget."""
    if name == LOCAL:
        kind = f" ({run.local.kind})"
    elif name == EXAMPLE and run.example.by_owner:
        kind = " (owners)"
    else:
        kind = ""
    noise = run.configured_noise_multiplier(name)
    if noise is None:
        drawn = f"noise for epsilon {run.target_epsilon(name):g}"
    else:
        drawn = f"noise multiplier {noise:.4g}"
    if REPORTED[name]:
        accountant = ""
    else:
        accountant = f"accountant {run.accountant}, "
    most = run.largest_epsilon(name)
    if most is None:
        budget = "none"
    else:
        budget = f"{most:g}"
    head = f"{name}{kind}-level: {drawn}, delta {run.delta:g}"
    return f"{head}, {accountant}budget epsilon {budget}"


def announce(context: RunContext, units: int | None = None) -> None:
    """Logs the price of a run before its first round, and where its folder is. `units`: as
    `price_lines` has it."""
    plan = context.plan
    if plan.seed is not None:
        logger.warning(
            (
                "seed=%d makes this run reproducible: its noise can be drawn again, so it "
                "protects nobody"
            ),
            plan.seed,
        )
    for name in plan.mechanisms:
        logger.info("%s", _guarantee_line(plan.run, name))
    warned = None
    if plan.charges_server and (outlook := noise_outlook(plan)).loud:
        warned = str(outlook)
    for line in price_lines(plan, units):
        level = logging.INFO
        if warned is not None and line.startswith(warned):
            level = logging.WARNING
        logger.log(level, "%s", line)
    off = [guarantee.name for guarantee in plan.guarantees if not guarantee.enabled]
    logger.info("guarantees that are off (epsilon = inf): %s", ", ".join(off) or "none")
    logger.info("run folder: %s", context.folder.path)


def close_run(
    run: RunContext, outcome: Outcome, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]
) -> None:
    """Writes the model and privacy.json, the last files of the folder. LedgerError: the ledger is
    damaged, or older than the run has charged it; nothing is written then."""
    spent = whole(run.folder, run.ledger)
    write_tensors(run.folder.path / "model.safetensors", tensors, metadata)
    write_json(run.folder.path / "privacy.json", privacy_facts(run.plan, spent, outcome))


def say_how_it_ended(run: RunContext, outcome: Outcome) -> None:
    """Writes the final status of the run, after every other file, and logs its privacy spending."""
    change_state(run.folder, "stopped" if outcome.stopped else "finished", outcome.stopped)
    RunSecrets(run.folder.path).erase()
    if outcome.stopped:
        logger.info("stopped after round %d: %s", outcome.checkpoint.round, outcome.stopped)
    for line in epsilon_lines(privacy_facts(run.plan, run.ledger, outcome)):
        logger.info("%s", line)
    if run.ledger.account is not None:
        logger.info("%s", run.ledger.account.said())
    logger.info("run folder: %s", run.folder.path)


@contextmanager
def interruptible(folder: RunFolder, goes_on_by: str) -> Iterator[None]:
    """A block that, if it ends by any error, records that in the run folder and says how to resume
    the run. Ledger and checkpoint are complete at every moment. Flower turns SIGTERM and SIGINT
    into SystemExit."""
    try:
        yield
    except BaseException as error:  # whatever ends the run: it is noted, and raised again
        asked = isinstance(error, SystemExit | KeyboardInterrupt)
        done = note_interruption(
            folder, "the server was told to stop" if asked else str(error) or type(error).__name__
        )
        logger.warning("interrupted after round %d: to resume, use %s", done, goes_on_by)
        raise


def epsilon_lines(privacy: Mapping[str, Any]) -> Iterator[str]:
    """One line for each guarantee of privacy.json, including disabled ones."""
    for each in privacy["guarantees"]:
        if not each["enabled"]:
            yield f"{each['name']}-level: none (epsilon = inf)"
            continue
        by = dict(each["epsilon"])
        pure = by.pop(PURE, math.inf)
        shown = ", ".join(f"{value:.4g} by {name}" for name, value in by.items())
        shown += f" at delta {privacy['delta']:g}"
        if math.isfinite(pure):
            shown += f", {pure:.4g} at delta 0"
        if "clients_without_epsilon" in each:
            whose = f"; {each['epsilon_is']}"
        else:
            whose = ""
        said = f"({each['unit']}; {each['adjacency']}{whose})"
        yield f"{each['name']}-level: epsilon {shown} {said}"


def _whose(mechanism: Mechanism, checkpoint: State) -> str:
    if not REPORTED[mechanism.guarantee]:
        return "of the server's ledger"
    if SERVER in mechanism.charged_at:
        return (
            "of the run, by the server's ledger; each client's own ledger has the releases "
            "that it took part in"
        )
    count = len(checkpoint.unaccounted)
    if count:
        without = f"; {count} of them reported infinity and are not included"
    else:
        without = ""
    return f"the largest that clients reported from their own ledgers{without}"


def privacy_facts(plan: Plan, ledger: DurableLedger, outcome: Outcome) -> dict[str, object]:
    """The content of privacy.json: every guarantee of the run, including disabled ones; and the
    population's spending over all runs, if the ledger charges its account."""
    return {
        "rounds": outcome.checkpoint.round,
        "stopped": outcome.stopped,
        "model_round": outcome.model.round,
        "delta": plan.run.delta,
        "accountant": plan.run.accountant,
        "seed": plan.seed,
        "protects_nobody": plan.seed is not None or not plan.is_private,
        "ledger_head": ledger.position().head,
        "clients_head": _clients_head(ledger),
        "account": None if ledger.account is None else ledger.account.facts(),
        "guarantees": [
            _facts(mechanism, statement, plan, ledger, outcome.checkpoint)
            for mechanism, statement in zip(plan.every_mechanism, plan.guarantees, strict=True)
        ],
    }


def _clients_head(ledger: DurableLedger) -> str | None:
    """The head of the ledger that a simulation keeps for its virtual clients beside the server's.
    None if there is none: nodes keep their own."""
    path = ledger.path.with_name(CLIENTS_LEDGER)
    if not path.exists():
        return None
    return DurableLedger(path).position().head


def _facts(
    mechanism: Mechanism, guarantee: Statement, plan: Plan, ledger: DurableLedger, checkpoint: State
) -> dict[str, object]:
    on = guarantee.enabled
    facts = {
        **{
            each: getattr(guarantee, each)
            for each in ("name", "enabled", "unit", "adjacency", "trusted", "observer")
        },
        **{
            name: getattr(guarantee, name) if on else "none" for name in ("mechanism", "accounting")
        },
        "epsilon": _epsilons(mechanism, plan, ledger, checkpoint)
        if on
        else {plan.run.accountant: math.inf},
        "epsilon_is": _whose(mechanism, checkpoint),
        "events": ledger.spent(guarantee.name).facts()
        if SERVER in mechanism.charged_at
        else "in each client's own ledger",
        "not_covered": list(guarantee.not_covered),
    }
    if on:
        facts["floating_point"] = _floating_point(mechanism, plan, ledger, checkpoint)
    if on and REPORTED[mechanism.guarantee]:
        facts["clients_without_epsilon"] = len(checkpoint.unaccounted)
    return facts


def _epsilons(
    mechanism: Mechanism, plan: Plan, ledger: DurableLedger, checkpoint: State
) -> dict[str, float]:
    chosen = plan.run.accountant
    if reported := REPORTED[mechanism.guarantee]:
        return dict(zip((chosen, PURE), map(checkpoint.largest_reported, reported), strict=False))
    spent = ledger.spent(mechanism.guarantee)
    # The chosen accountant first; private selection among trials has no PLD.
    chosen_among = any(isinstance(event, RepeatAndSelectDpEvent) for event, _ in spent.entries)
    only = chosen_among or mechanism.accountants == (RDP,)
    if only:
        others = []
    else:
        others = [other for other in ACCOUNTANTS if other != chosen]
    return {
        accountant: spent.epsilon(plan.run.delta, accountant) for accountant in [chosen, *others]
    }


def _floating_point(
    mechanism: Mechanism, plan: Plan, ledger: DurableLedger, checkpoint: State
) -> dict[str, str | float]:
    if not plan.noised(mechanism.guarantee):
        return {"noise": "none", "delta_slack": 0.0}
    if SERVER in mechanism.charged_at and plan.run.masked:
        return {"noise": "discrete", "delta_slack": 0.0}  # whole numbers, and exact draws
    rated = sum(plan.run.evaluation.ratings(checkpoint.round))
    # For the largest release: an update with its count, or the means and deviations that clients
    # were asked for.
    values = max(checkpoint.params.numel() + 1, 2 * len(plan.run.normaliser.means or []))
    if rated:  # a model with k outputs has at least k parameters
        values += ANSWER_NUMBERS * (checkpoint.params.numel() + 1)
    # The largest noise on a grid: the bound holds for every clip norm of the run.
    expected = mechanism.expected_noise(math.inf)
    if expected.slack is None:
        if plan.run.noise == "secure_sum":
            noise = "secure_sum"
        else:
            noise = "float"
        return {"noise": noise, "delta_slack": "not bounded"}
    at_server = SERVER in mechanism.charged_at
    if at_server:
        releases = ledger.spent(mechanism.guarantee).num_releases
    else:
        releases = checkpoint.round + rated
    slack = releases * expected.slack(values, LARGEST_SCALE)
    stated = _epsilons(mechanism, plan, ledger, checkpoint).values()
    # The slack grows with epsilon: this one is enough for every stated epsilon, including the pure
    # one of Laplace noise.
    epsilon = max((value for value in stated if math.isfinite(value)), default=math.inf)
    # For neighbours P and P', with drawn noise within r of exact noise: P(drawn in A) <= P(exact in
    # A) + r
    # <= exp(epsilon) * P'(exact in A) + delta + r, and P'(exact in A) <= P'(drawn in A) + r.
    slack *= 1 + math.exp(min(epsilon, 700.0))
    return {"noise": expected.sums, "delta_slack": slack}
