"""The epsilons that clients report of their own accounts, as a run keeps and publishes them."""

from __future__ import annotations

import math
from dataclasses import replace

from discreet.federated.messages import EPSILONS
from discreet.federated.run_folder import Checkpoint
from discreet.federated.transport import RoundReport
from discreet.settings.privacy import PrivacyConfig


def finite_epsilons(privacy: PrivacyConfig) -> tuple[str, ...]:
    """Which of the epsilons that clients report this run keeps finite."""
    finite = {
        "epsilon_example": privacy.example.enabled and privacy.example.noise_multiplier != 0,
        "epsilon_local": privacy.local.kind != "none",
        "epsilon_local_pure": privacy.local.kind in ("laplace", "laplace_step"),
    }
    return tuple(name for name, is_finite in finite.items() if is_finite)


def with_reported(before: Checkpoint, report: RoundReport) -> Checkpoint:
    """The checkpoint with what clients have reported since. Cumulative by their own accounts; a client that sits out a
    round still has what it spent before."""
    spent = {name: max(getattr(before, name), report.epsilons[name]) for name in EPSILONS}
    return replace(before, **spent, unaccounted=sorted({*before.unaccounted, *report.unaccounted}))


def largest_reported(checkpoint: Checkpoint, name: str) -> float:
    """The largest epsilon over the clients that reported a finite one; infinity if only others have reported."""
    value: float = getattr(checkpoint, name)
    return math.inf if value == 0 and checkpoint.unaccounted else value
