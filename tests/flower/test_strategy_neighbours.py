"""A whole run of DPFedAvg, replayed with one node more or less: see tests/replay.py for what is compared."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
from flwr.app import Error, MetricRecord, RecordDict

from discreet.privacy.randomness import RandomSource
from discreet.server.run_folder import RunFolder
from tests.flower.flower_apps import START, Answer, Nodes, arrays, changed_by, noised, replying, run, values_of
from tests.replay import Replay, replay

ROUNDS, Z = 3, 1.3
OTHERS: dict[int, Answer] = {1: changed_by(0.01), 2: changed_by(-3.0), 3: changed_by(0.2)}
MANY_EXAMPLES = MetricRecord({"num-examples": 10**9, "loss": 1e9})

WILD: dict[str, Answer] = {
    "near": changed_by(0.02),
    "far": changed_by(1e30, metrics=MANY_EXAMPLES),
    "still": changed_by(0.0),
    "NaN": replying(RecordDict({"arrays": arrays(bias=np.array([np.nan, 1], np.float32))})),
    "the other way": replying(RecordDict({"arrays": arrays(bias=np.array([-1e4, 1e4]))})),
    "malformed": replying(RecordDict({"arrays": arrays(bias=np.zeros(5, np.float32))})),
    "an error": replying(Error(2, "it crashed")),
}


def released(answers: dict[int, Answer], source: RandomSource) -> list[object]:
    """Everything that a run releases, but who took part and how many replied, which is not covered."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        settings = {"sampling": "everyone", "seed": int(1e6 * float(source.uniform(1))), **noised(noise_multiplier=Z)}
        result = run(path, Nodes(dict(answers)), num_rounds=ROUNDS, **settings)
        rows = RunFolder(path).read_metrics()
    left: list[object] = [torch.from_numpy(values_of(result)[name].copy()) for name in START]
    return left + [row[name] for row in rows for name in ("clip_norm", "fraction_below", "epsilon_user")]


def with_and_without(node: Answer) -> list[Replay]:
    with_it, without = {**OTHERS, 4: node}, OTHERS
    return [replay(released, one, other) for one, other in ((with_it, without), (without, with_it))]


@pytest.mark.parametrize("node", WILD.values(), ids=WILD.keys())
def test_one_node_more_or_less_moves_each_noise_step_within_its_sensitivity(node: Answer) -> None:
    for found in with_and_without(node):
        assert found.faults == ()
        assert len(found.shares) == 2 * ROUNDS
        assert found.gaussian_distance <= (1 + 1e-9) * ROUNDS**0.5 / Z


def test_a_node_that_is_far_away_puts_the_bound_to_the_test() -> None:
    for found in with_and_without(WILD["far"]):
        # Differences on the grid are truncated towards zero, by less than 1 part in 1000.
        assert found.shares == pytest.approx([1.0] * 2 * ROUNDS, rel=1e-3)
        assert found.gaussian_distance == pytest.approx(ROUNDS**0.5 / Z, rel=1e-3)
