"""Run folders for tests of what reads them: made by hand, without training and with numbers that
are known, or copied from a run that several tests begin with."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from discreet.ledger.durable_ledger import Charge, DurableLedger
from discreet.planning.plan import Plan, resolve_noise
from discreet.run_files.compose import load_config
from discreet.run_files.run_folder import ASKED, RunFolder
from discreet.run_files.run_ledgers import create_ledgers
from discreet.run_files.whole_files import write_json
from discreet.settings.adjacency import USER

ENDED = {"rounds": 1, "stopped": None, "guarantees": []}


def make_run(
    path: Path,
    *overrides: str,
    accuracies: Sequence[float] = (0.5, 0.7),
    per_round: int = 1,
    ended: bool = True,
) -> RunFolder:
    """A run with a row for each accuracy, and its rounds in the ledger, `per_round` times each.

    The user level is off where the overrides say so. epsilon_user in metrics.csv grows by one a
    round.
    """
    asked = load_config(overrides)
    config = resolve_noise(asked)
    path.mkdir(parents=True)
    folder = RunFolder(path)
    plan = Plan(config, asked)
    folder.write_config(config)
    create_ledgers(folder, plan, simulated=True)
    folder.write_config(asked, name=ASKED)
    ledger = folder.ledger(plan)
    user = config.privacy.user
    for number, accuracy in enumerate(accuracies, start=1):
        row: dict[str, object] = {
            "round": number,
            "loss": 2.0 - accuracy,
            "accuracy": accuracy,
            "seconds": 0.5,
        }
        row |= {"clip_norm": 0.1 * number, "fraction_below": 0.4, "cohort": 10, "replies": 9}
        row |= {f"epsilon_{name}": float("inf") for name in ("user", "example", "local")}
        if user.enabled and user.noise_multiplier is not None:
            event = plan.mechanism.event(number)
            assert event is not None
            ledger.charge([Charge(number, USER, "", event, per_round)])
            row["epsilon_user"] = float(number)
        folder.append_metrics(row)
    if ended:
        write_json(folder.path / "privacy.json", ENDED)
    return folder


def copied(made: RunFolder, path: Path) -> RunFolder:
    """A copy of a run as if it had run there, on a machine that knows no ledgers yet: set
    DISCREET_STATE to a new folder before."""
    shutil.copytree(made.path, path)
    folder = RunFolder(path)
    for ledger in (folder.ledger_path, folder.clients_ledger_path):
        if ledger.exists():
            DurableLedger(ledger).adopt()
    return folder
