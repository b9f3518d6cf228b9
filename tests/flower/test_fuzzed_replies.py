"""No reply of one node ends a run: some 900 hostile ones, by Flower's grid, by `DPFedAvg` and under
masks."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from flwr.app import Error, Message, RecordDict

from discreet import FixedClipping
from discreet.protocol.messages import TrainReply
from discreet.run_files.run_folder import RunFolder
from discreet.server.transport import Failure
from tests.flower import flower_apps, masked_grid
from tests.flower.flower_apps import START, changed_by, noised, values_of
from tests.flower.hostile import spoil_parts, wrong_content
from tests.flower.test_grid_transport import LinkGrid, ask, good

MOST_SAID = 300  # characters


@pytest.mark.parametrize("kind", ["contents", "bytes"])
def test_a_hostile_reply_costs_no_more_than_itself(kind: str) -> None:
    random = Random(60413)
    failures = 0
    for _ in range(300):
        grid = LinkGrid({1: good, 2: good})
        if kind == "contents":
            grid.answers[1] = lambda message: wrong_content(good(message), random)  # type: ignore[assignment, return-value]
        else:
            grid.spoil = lambda parts: spoil_parts(parts, random)
        hostile, honest = sorted(ask(grid, [1, 2]), key=lambda reply: reply.client)
        assert isinstance(honest, TrainReply)
        if isinstance(hostile, Failure):
            failures += 1
            assert len(hostile.reason) <= MOST_SAID
            assert hostile.reason.isprintable() or not hostile.reason
        else:
            assert hostile.update.shape == (2,)
            assert torch.isfinite(hostile.update).all()
    assert failures > 100


def test_hostile_replies_of_another_app_move_no_model_beyond_the_clip_norm(
    tmp_path: Path,
) -> None:
    random, honest = Random(60414), changed_by(0.0)

    def hostile(message: Message) -> RecordDict | Error | None:
        content = honest(message)
        assert isinstance(content, RecordDict)
        return wrong_content(content, random)

    clipping = FixedClipping(0.5)
    for number in range(4):
        grid = flower_apps.Nodes({node: hostile if node <= 4 else honest for node in range(1, 6)})
        with np.errstate(invalid="ignore", over="ignore"):
            settings = {"sampling": "everyone", **noised(noise_multiplier=0.0, clipping=clipping)}
            result = flower_apps.run(tmp_path / str(number), grid, num_rounds=20, **settings)
        # 20 rounds, and 4 hostile nodes of 10 places.
        assert moved(values_of(result)) <= 20 * 4 / 10 * clipping.norm * 1.001
        assert [row["cohort"] for row in RunFolder(tmp_path / str(number)).read_metrics()] == [
            5
        ] * 20


def moved(values: dict[str, np.ndarray]) -> float:
    differences = [values[name].astype(float) - START[name] for name in ("weight", "bias")]
    return math.sqrt(sum(float(np.square(each).sum()) for each in differences))


@pytest.mark.usefixtures("quick_grid")
def test_hostile_replies_in_masked_rounds_end_no_run(tmp_path: Path) -> None:
    random, told = Random(60415), [0]

    class Hostile(masked_grid.Nodes):
        def _reply(self, node: int, message: Message) -> RecordDict | Error | None:
            content = super()._reply(node, message)
            if node != 1 or not isinstance(content, RecordDict) or random.random() < 0.5:
                return content
            told[0] += 1
            return wrong_content(RecordDict(dict(content)), random)

    grid = masked_grid.nodes(tmp_path)
    hostile = Hostile(configs=grid.configs)
    masked_grid.federated(
        masked_grid.words_of(tmp_path / "run", masked_grid.PATIENT, rounds=12), hostile
    )
    rows = RunFolder(tmp_path / "run").read_metrics()
    assert len(rows) == 12
    assert told[0] >= 10
