"""The context of a run, from its opened folder to its last file, whatever clients it asks."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

from torch import Tensor

from discreet.ledger.durable_ledger import DurableLedger
from discreet.mechanisms.mechanism import terms_of
from discreet.privacy.randomness import RandomSource, source_of
from discreet.server.noise_outlook import noise_outlook
from discreet.server.plan import Plan
from discreet.server.population_account import PopulationAccount
from discreet.server.privacy_statement import epsilon_lines, privacy_facts
from discreet.server.run_folder import (
    ASKED,
    RunFolder,
    RunSecrets,
    change_state,
    check_output,
    note_interruption,
    only_writer,
    write_json,
    write_tensors,
)
from discreet.server.state import Outcome, State, initial_state

logger = logging.getLogger("discreet")


@dataclass(frozen=True, eq=False)
class RunContext:
    """A run whose folder is held, with its plan and its ledger open. It starts from `state`, or goes on; `source` is of
    cohorts and noise; `says` gives a message the names by which the caller knows its settings."""

    plan: Plan
    folder: RunFolder
    ledger: DurableLedger
    state: State
    source: RandomSource
    says: Callable[[str], str] = str


def open_run(plan: Plan, *, params: Tensor, simulated: bool, held: ExitStack) -> RunContext:
    """Opens the folder of a new run, which starts from `params` (num_params,), or of one that goes on, and has `held`
    hold it for this process alone. Clients that are `simulated` keep their ledger in it.

    Raises:
      ConfigError: the folder holds a run already, or none to go on with, or can't be used.
      LedgerError: a run is resumed under other privacy settings, or its ledgers are not all that was spent.
    """
    folder, account = check_output(plan.output, resume=plan.resume), PopulationAccount.of(plan)
    if account is not None:
        account.ledger.check()
    held.enter_context(only_writer(folder.path))
    if plan.resume:
        folder.check_ledgers(plan, simulated=simulated)
    else:
        folder.create_ledgers(plan, simulated=simulated)
    ledger, state = folder.ledger(plan), None
    if account is not None:
        account.join(ledger, folder)
    if plan.resume:
        state = folder.load_checkpoint()
        done = state.round if state else 0
        # Without the rows of rounds that are done again.
        folder.replace_metrics([row for row in folder.read_metrics() if (row["round"] or 0) <= done])
        logger.info("resumed after round %d", done)
    plan = replace(plan, written={**plan.written, "output_dir": str(folder.path), "resume": False})
    folder.write_config(plan.written)
    if not plan.resume:
        folder.write_config(plan.asked, name=ASKED)
    _announce(plan, folder)
    state = state or initial_state(params, clip_norm=plan.first_clip_norm)
    return RunContext(plan, folder, ledger, state, source_of(plan.seed))


def _announce(plan: Plan, folder: RunFolder) -> None:
    if plan.seed is not None:
        logger.warning(
            "seed=%d makes this run reproducible: its noise can be drawn again and protects nobody", plan.seed
        )
    for name, mechanism in plan.mechanisms.items():
        terms, kind = terms_of(mechanism), f" ({mechanism.kind})" if mechanism.kind else ""
        noise = f"noise for a target epsilon of {terms.target:g}" if terms.target is not None else ""
        if terms.noise_multiplier is not None:
            noise = f"noise multiplier {terms.noise_multiplier:.4g}"
        accountant = "" if mechanism.reported else f"accountant {plan.run.accountant}, "
        budget = "none" if terms.budget is None else f"{terms.budget:g}"
        said = f"{noise}, delta {plan.run.delta:g}, {accountant}budget epsilon {budget}"
        logger.info("%s%s-level: %s", name, kind, said)
    if plan.mechanism is not None:
        outlook = noise_outlook(plan)
        logger.log(logging.WARNING if outlook.loud else logging.INFO, "%s", outlook)
    off = [guarantee.name for guarantee in plan.guarantees if not guarantee.enabled]
    logger.info("guarantees that are off (epsilon = inf): %s", ", ".join(off) or "none")
    logger.info("run folder: %s", folder.path)


def close_run(run: RunContext, outcome: Outcome, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes the model and privacy.json, which complete the folder."""
    write_tensors(run.folder.path / "model.safetensors", tensors, metadata)
    write_json(run.folder.path / "privacy.json", privacy_facts(run.plan, run.ledger, outcome))


def say_how_it_ended(run: RunContext, outcome: Outcome) -> None:
    """Writes, last of all, that the run is over, and says what it has spent."""
    change_state(run.folder, "stopped" if outcome.stopped else "finished", outcome.stopped)
    RunSecrets(run.folder.path).erase()
    if outcome.stopped:
        logger.info("stopped after round %d: %s", outcome.checkpoint.round, outcome.stopped)
    for line in epsilon_lines(run.plan, run.ledger, outcome.checkpoint):
        logger.info("%s", line)
    logger.info("run folder: %s", run.folder.path)


@contextmanager
def interruptible(folder: RunFolder, goes_on_by: str) -> Iterator[None]:
    """A block that, if it ends by any error, leaves a folder that says so, and says how the run goes on. Ledger and
    checkpoint are whole at any moment. SystemExit is what Flower makes of SIGTERM and SIGINT."""
    try:
        yield
    except BaseException as error:
        asked = isinstance(error, SystemExit | KeyboardInterrupt)
        done = note_interruption(folder, "the server was asked to end" if asked else str(error) or type(error).__name__)
        logger.warning("interrupted after round %d: %s goes on", done, goes_on_by)
        raise
