"""The same experiment as `flwr run`, in one process and without Ray: `python -m scripts.simulate rounds=5`.

Hydra's command line: overrides, `--help`, `--cfg job`, and sweeps with `--multirun`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from discreet.config import CONF, ConfigError, load_config, parse_config
from discreet.durable_ledger import LedgerError
from discreet.logs import log_to
from simulation.in_process import simulate


@hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")
def _job(settings: DictConfig) -> None:
    hydra_config = HydraConfig.get()
    if hydra_config.mode == RunMode.MULTIRUN and settings.output_dir is None:
        # One folder for a sweep, one below it for each job: Hydra has chosen them.
        OmegaConf.update(settings, "output_dir", str(Path(hydra_config.runtime.output_dir).resolve()))
    try:
        config = parse_config(settings)
        log_to(sys.stdout, log_format=config.operations.log_format, over_progress=True)
        simulate(config, progress=sys.stdout)
    except (ConfigError, LedgerError) as error:
        # Hydra would show where it was raised, in forty lines.
        _refuse(error)


def _refuse(error: Exception) -> NoReturn:
    print(f"discreet: {error}", file=sys.stderr)
    raise SystemExit(2) from None


def main() -> None:
    """Checks the overrides before Hydra starts, so that what is wrong is one line; exit code 2."""
    words = sys.argv[1:]
    try:
        if not any(word.startswith("-") for word in words):
            load_config(words)
        _job()
    except ConfigError as error:
        _refuse(error)


if __name__ == "__main__":
    main()
