"""An experiment on Flower's simulation runtime: see `discreet.deployment.flower_run`."""

from __future__ import annotations

import os
from collections.abc import Sequence

from discreet.deployment.flower_run import main as flower_run


def main(words: Sequence[str]) -> int:
    """Checks the overrides and runs. DISCREET_PROGRAM is what a person types to run it again, if not `discreet run`."""
    return flower_run(words, program=os.environ.get("DISCREET_PROGRAM", "discreet run"))
