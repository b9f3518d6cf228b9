"""An experiment on Flower's simulation runtime: see `discreet.deployment.flower_run`."""

from __future__ import annotations

from collections.abc import Sequence

from discreet.deployment.flower_run import main as flower_run


def main(words: Sequence[str]) -> int:
    """Checks the overrides and runs."""
    return flower_run(words, program="discreet run")
