"""Runs a small simulation in a fork, which kills itself with SIGKILL at a point between two steps
of a round."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import discreet.run_files.whole_files
from discreet.ledger.durable_ledger import DurableLedger
from discreet.run_files.compose import load_asked
from discreet.run_files.run_folder import RunFolder, RunSecrets
from discreet.server.population_account import PopulationAccount
from discreet.simulation.in_process import simulate

AFTER_ACCOUNT = (
    "after_account"  # the population's account is charged, and the run's own ledger is not
)
BEFORE_SECRETS = "before_secrets"  # the noise of the round is drawn, and its key is not on disk
POINTS = (
    "before_ledger",
    "after_ledger",
    "before_metrics",
    "before_checkpoint",
    "in_checkpoint",
    "after_checkpoint",
)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(number: int, before: bool, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, killing the process before or after its call of that number."""
    calls = 0

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if before and calls == number:
            die()
        result = function(*args, **kwargs)
        if calls == number:
            die()
        return result

    return wrapped


def plant(point: str, number: int) -> None:
    if point in ("before_ledger", "after_ledger"):
        charge = DurableLedger.charge
        dying = at_call(number, point == "before_ledger", charge)

        def charged(
            self: DurableLedger, *args: Any, **kwargs: Any
        ) -> bool:  # an account is a ledger too
            return (dying if self.path.name == "ledger.db" else charge)(self, *args, **kwargs)

        DurableLedger.charge = charged  # type: ignore[method-assign]
    elif point == AFTER_ACCOUNT:
        PopulationAccount.charge = at_call(number, False, PopulationAccount.charge)  # type: ignore[method-assign]
    elif point == BEFORE_SECRETS:
        RunSecrets.save = at_call(number, True, RunSecrets.save)  # type: ignore[method-assign]
    elif point == "before_metrics":
        RunFolder.append_metrics = at_call(number, True, RunFolder.append_metrics)  # type: ignore[method-assign]
    else:
        plant_at_checkpoint(point, number)


def plant_at_checkpoint(point: str, number: int) -> None:
    save = RunFolder.save_checkpoint
    dying = at_call(number, point == "before_checkpoint", save)

    def saved(self: RunFolder, checkpoint: Any, *, best: bool = False, **positions: Any) -> None:
        if best or (point == "in_checkpoint" and checkpoint.round != number):
            save(self, checkpoint, best=best, **positions)
        elif point == "in_checkpoint":
            # The new file is half written beside the old one, and never renamed.
            discreet.run_files.whole_files.os.replace = lambda *_: die()  # type: ignore[assignment]
            save(self, checkpoint, **positions)
        else:
            dying(self, checkpoint, **positions)

    RunFolder.save_checkpoint = saved  # type: ignore[method-assign]


def _simulated(overrides: Sequence[str]) -> object:
    return simulate(*load_asked(list(overrides)))


Run = Callable[[Sequence[str]], object]


def crash(
    point: str, number: int, overrides: Sequence[str], *, run: Run = _simulated
) -> int | None:
    """Runs a simulation in a fork of this process until it dies at a point in round `number`; its
    exit code. `run`: another command; then the point is passed as many times."""
    return crash_all([(point, number, overrides)], run=run)[0]


def crash_all(
    runs: Sequence[tuple[str, int, Sequence[str]]], *, run: Run = _simulated
) -> list[int | None]:
    """As `crash`, for several runs side by side."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_dying, args=(run, *each)) for each in runs]
    with warnings.catch_warnings():
        # Newer Pythons warn of forks beside threads. The child takes none of this process's locks.
        warnings.simplefilter("ignore", DeprecationWarning)
        for process in processes:
            process.start()
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes]


def _dying(run: Run, point: str, number: int, overrides: Sequence[str]) -> None:
    logging.getLogger("discreet").setLevel(logging.WARNING)
    plant(point, number)
    run(overrides)
