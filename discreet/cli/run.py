"""Trains over Flower's simulation, and shows accuracy and epsilon at every round.

Each SETTING=VALUE overrides conf/config.yaml, as Hydra reads it.

examples:
  discreet run rounds=5 privacy.user.noise_multiplier=0.8
  discreet run experiment=silos
"""

from __future__ import annotations

import os

from discreet.cli.console import Words
from discreet.deployment.flower_run import run_app


def command(overrides: Words = None) -> int:
    """Trains. DISCREET_PROGRAM is the command to run it again, if that is not `discreet run`."""
    return run_app(overrides or [], program=os.environ.get("DISCREET_PROGRAM", "discreet run"))
