"""Logs the publishable values of a run's rounds to TensorBoard, and nothing else: `pip install
tensorboard`.

python examples/trackers/tensorboard_rounds.py logs/first rounds=5 output_dir=outputs/first
tensorboard --logdir logs
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path

from torch.utils.tensorboard import SummaryWriter

from discreet import simulate

# Not cohort, replies, seconds, or the epsilons that clients report: docs/privacy.md.
TOLD = ("loss", "accuracy", "auc", "r2", "mae", "clip_norm", "fraction_below", "epsilon_user")


def train(logs: str, *settings: str) -> Path:
    """Trains with these settings, and returns the run folder."""
    # One time for all rounds, as the duration of a round depends on its clients.
    begun = time.time()
    with SummaryWriter(logs) as writer:

        def on_round(row: Mapping[str, object]) -> None:
            for name in TOLD:
                if isinstance(value := row.get(name), float):
                    writer.add_scalar(name, value, int(str(row["round"])), walltime=begun)
            writer.flush()

        return simulate(*settings, on_round=on_round)


if __name__ == "__main__":
    print(train(*sys.argv[1:]))
