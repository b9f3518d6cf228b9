"""The same experiment as `flwr run`, in one process and without Ray: `python -m scripts.simulate rounds=5`.

Hydra's command line: overrides, `--help`, `--cfg job`, and sweeps with `--multirun`. A sweep that was ended goes on
with `--multirun resume=true hydra.sweep.dir=FOLDER`: runs that are done are kept, the others are resumed or started.
"""

from __future__ import annotations

import logging
import shlex
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from deployment.interruption import ending, interrupt_below, not_begun, override, resumable
from discreet.config import CONF, ConfigError, RunConfig, parse_config
from discreet.federated.durable_ledger import LedgerError
from discreet.federated.resuming import run_config
from discreet.federated.run_folder import RunFolder, with_output_folder
from discreet.logs import log_to
from scripts.sweep import Sweep, check_sweep, run_in, sweep_of
from simulation.in_process import simulate

logger = logging.getLogger("discreet")

PROGRAM = ("python", "-m", "scripts.simulate")


def _run(config: RunConfig, sweep: Sweep | None) -> None:
    log_to(sys.stdout, log_format=config.operations.log_format, over_progress=True)
    if sweep is None:
        config = with_output_folder(config)
        with resumable(RunFolder(Path(str(config.output_dir))), *PROGRAM):
            simulate(config, progress=sys.stdout)
        return
    job = HydraConfig.get()
    name, mine = sweep.name(int(job.job.num) + 1), run_in(Path(job.runtime.output_dir).resolve(), config)
    if mine is None:
        logger.info("%s has ended already, and is kept", name)
        return
    logger.info("%s", name)
    with _sweep_ending(sweep):
        simulate(mine, progress=sys.stdout)


def _sweep_ending(sweep: Sweep) -> AbstractContextManager[None]:
    command = [*PROGRAM, "--multirun", "resume=true", override("hydra.sweep.dir", sweep.folder)]
    return ending(partial(interrupt_below, sweep.folder, f"to go on: {shlex.join(command)}"))


def _refuse(error: Exception) -> NoReturn:
    print(f"discreet: {error}", file=sys.stderr)
    raise SystemExit(2) from None


def main() -> None:
    """Checks the overrides before Hydra starts, so that what is wrong is one line; exit code 2."""
    with ending(not_begun):
        _main(sys.argv[1:])


def _main(words: list[str]) -> None:
    try:
        sweep = sweep_of(words)
        if sweep is not None:
            print(f"{len(sweep.runs)} runs are checked before the first one starts; they will lie in {sweep.folder}")
            check_sweep(sweep)
            sys.argv[1:] = sweep.words
        elif not any(word.startswith("-") for word in words):
            run_config(words)
    except ConfigError as error:
        _refuse(error)

    def job(settings: DictConfig) -> None:
        try:
            resumed = settings.resume is True and sweep is None
            _run(run_config(HydraConfig.get().overrides.task) if resumed else parse_config(settings), sweep)
        except (ConfigError, LedgerError) as error:
            # Hydra would show where it was raised, in forty lines.
            _refuse(error)

    with _sweep_ending(sweep) if sweep else nullcontext():
        hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(job)()


if __name__ == "__main__":
    main()
