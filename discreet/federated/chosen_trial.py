"""A run that was chosen among trials: each of its files states what the choice has cost, not what a trial has."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open
from safetensors.torch import load_file

from discreet.config import ConfigError, RunConfig
from discreet.federated.durable_ledger import Charge, DurableLedger
from discreet.federated.guarantees import USER, deciding_settings
from discreet.federated.privacy_statement import privacy_facts
from discreet.federated.run_folder import Checkpoint, RunFolder, replace_file
from discreet.federated.training_run import Outcome
from discreet.privacy.accountants import RDP

if TYPE_CHECKING:
    from dp_accounting import DpEvent

SELECTION_FILE = "selection.json"
ACCOUNTANT = RDP  # the only one that knows the choice among trials


@dataclass(frozen=True)
class Choice:
    """The event of the choice among trials, and what is to be said of it."""

    event: DpEvent
    epsilon: float
    facts: Mapping[str, object]


def state_choice(folder: Path, choice: Choice, *, named: Path) -> None:
    """Rewrites a copy of a trial's folder, which will be `named`, as the run that was chosen.

    The ledger holds one row, the choice. Every round of metrics.csv costs as much as the last one: whichever is
    released, it was chosen by what came after the last. Epsilons are by RDP.

    Raises:
      ConfigError: the trial has not done a round.
    """
    files = RunFolder(folder)
    config, checkpoint = files.read_config(), files.load_checkpoint()
    if checkpoint is None:
        raise ConfigError(f"{folder} holds no round: there is nothing to publish")
    config = replace(config, output_dir=str(named), privacy=replace(config.privacy, accountant=ACCOUNTANT))
    ledger = _new_ledger(files, config, Charge(checkpoint.round, USER, "", choice.event))
    files.save_checkpoint(checkpoint)
    if (best := files.load_checkpoint(best=True)) is not None:
        files.save_checkpoint(best, best=True)
    files.replace_metrics([{**row, "epsilon_user": choice.epsilon} for row in files.read_metrics()])
    files.write_config(config)
    _state_privacy(files, config, checkpoint, ledger=ledger, choice=choice)
    _state_in_model(files, choice)
    replace_file(folder / SELECTION_FILE, (json.dumps(choice.facts, indent=2) + "\n").encode())


def _new_ledger(files: RunFolder, config: RunConfig, charge: Charge) -> DurableLedger:
    for path in files.path.glob(f"{files.ledger_path.name}*"):
        path.unlink()
    ledger = DurableLedger.create(files.ledger_path, facts=deciding_settings(config))
    ledger.charge([charge])
    return ledger


def _state_privacy(
    files: RunFolder, config: RunConfig, checkpoint: Checkpoint, *, ledger: DurableLedger, choice: Choice
) -> None:
    stopped = json.loads((files.path / "privacy.json").read_text())["stopped"]
    files.write_privacy({**privacy_facts(config, ledger, Outcome(checkpoint, stopped)), "selection": choice.facts})


def _state_in_model(files: RunFolder, choice: Choice) -> None:
    path = files.path / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    files.write_model(load_file(path), metadata={**metadata, "selection": json.dumps(choice.facts)})
