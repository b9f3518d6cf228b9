"""A guarded site under secure aggregation: what one patient moves, what it costs, and what is
refused."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict

from discreet.accounting.events import event_from_json, event_to_json
from discreet.guard import masked_blocks
from discreet.guard.block_release import BlockRelease, BlockSum
from discreet.guard.guard_policy import GuardPolicy, GuardTerms
from discreet.guard.masked_blocks import MaskedBlocks, block_event, read_masked, site_vector
from discreet.node.account import Refused
from discreet.privacy.randomness import seeded_source
from discreet.privacy.secure_grid import SecureCohort, SecureSum, secure_sum
from discreet.protocol.masked_messages import ASKED, FROZEN
from discreet.protocol.messages import MASKING, TRAIN, TrainRequest, request_items
from discreet.settings.settings import client_settings
from tests.guard.made import SIZE, arrays, context, message, site
from tests.guard.test_block_release import APP, guard_at
from tests.node.clients import config

BLOCKS, C, NOISE = 10, 0.5, 2.0
PATIENTS = {f"p{number}": 1.0 for number in range(6)}
SECURE = (
    "privacy.user.aggregation=secure",
    "sampling.kind=everyone",
    "data.num_clients=4",
    "sampling.population_size=4",
    "privacy.user.clip.kind=fixed",
    f"privacy.user.clip.norm={C}",
    f"privacy.user.noise_multiplier={NOISE}",
    "privacy.user.target_epsilon=null",
    "privacy.accountant=rdp",
    "rounds=2",
)


def work(size: int, sums: SecureSum) -> MaskedBlocks:
    release = BlockRelease(size, GuardTerms(C, 1.0), 1.0, BLOCKS)
    none = BlockSum(torch.zeros(0), 0, 0)
    return MaskedBlocks(None, sums, release, lambda event: None, lambda: none)  # type: ignore[arg-type]


def steps(made: MaskedBlocks, vectors: list[np.ndarray]) -> list[int]:
    """A site's vector without noise."""
    with patch.object(
        SecureSum, "noise", lambda self, source: torch.zeros(self.length, dtype=torch.int64)
    ):
        return [
            int(each) for each in site_vector(made, made.blocks.add_up(vectors), seeded_source(4))
        ]


@pytest.mark.parametrize("size", [1, 7, 1000])
@pytest.mark.parametrize("blocks", [2, 10])
def test_one_patient_moves_a_sites_vector_by_what_is_charged(size: int, blocks: int) -> None:
    sums = secure_sum(size, SecureCohort(4, 2), noise_multiplier=NOISE)
    made = work(size, sums)
    made = replace(made, blocks=replace(made.blocks, blocks=blocks))
    draw = np.random.default_rng(61001)
    for _ in range(20):
        direction = draw.normal(size=size)
        unit = (C * direction / np.linalg.norm(direction)).astype(np.float32)
        others = [(C * draw.normal(size=size)).astype(np.float32) for _ in range(blocks - 1)]
        pairs = zip(steps(made, [*others, unit]), steps(made, [*others, -unit]), strict=True)
        moved = sum((one - other) ** 2 for one, other in pairs)
        charged = block_event(sums, blocks).sensitivity_squared
        assert moved <= charged
        assert moved >= 0.7 * charged or size == 1


def test_a_charge_for_c_would_be_too_little() -> None:
    sums = secure_sum(SIZE, SecureCohort(4, 2), noise_multiplier=NOISE)
    unit = np.zeros(SIZE, np.float32)
    unit[0] = C
    made = work(SIZE, sums)
    pairs = zip(steps(made, [unit]), steps(made, [-unit]), strict=True)
    with patch.object(masked_blocks, "MOVES", 1):
        assert (
            sum((one - other) ** 2 for one, other in pairs)
            > block_event(sums, BLOCKS).sensitivity_squared
        )


def test_a_sites_vector_is_within_what_a_node_may_add() -> None:
    sums = secure_sum(SIZE, SecureCohort(4, 2), noise_multiplier=NOISE)
    huge = [np.full(SIZE, 1e20, np.float32)] * BLOCKS
    assert sum(each**2 for each in steps(work(SIZE, sums), huge)) <= sums.clip_steps**2


def test_a_patient_has_k_half_times_the_noise_of_a_site() -> None:
    sums = secure_sum(SIZE, SecureCohort(4, 2), noise_multiplier=NOISE)
    event = block_event(sums, BLOCKS)
    assert event.renyi_noise_multiplier == pytest.approx(NOISE * BLOCKS / 2, rel=0.01)
    assert event_from_json(event_to_json(event)) == event


def asked(*words: str, clip_norm: float = C, **changed: object) -> Message:
    """A message that asks for a masked vector."""
    run = client_settings(config(*SECURE, *words))
    request = TrainRequest(1, clip_norm, run, work=TRAIN)
    items = ConfigRecord({**request_items(request), FROZEN: []})  # type: ignore[dict-item]
    content = {
        "arrays": arrays(),
        ASKED: items,
        MASKING: ConfigRecord({"request": b"x"}),
        **changed,
    }
    return message(RecordDict(content))  # type: ignore[arg-type]


def read(policy: GuardPolicy, given: Message) -> MaskedBlocks:
    return read_masked(
        given, policy, lambda event: None, run=lambda *_: BlockSum(torch.zeros(SIZE).long(), 2, 0)
    )


def test_a_run_whose_terms_fit_is_worked_for_and_the_app_sees_no_masking(tmp_path: Path) -> None:
    policy, given = site(tmp_path, PATIENTS, min_noise_multiplier=1.5), asked()
    charged: list[object] = []
    made = read_masked(
        given, policy, charged.append, run=lambda *_: BlockSum(torch.zeros(SIZE).long(), 2, 0)
    )
    begun: list[bool] = []
    assert made.vector(lambda: begun.append(bool(charged))).shape == (SIZE,)
    assert begun == [True]
    assert charged == [block_event(made.sums, 2)]
    assert set(given.content) == {"arrays"}


@pytest.mark.parametrize(
    ("settings", "words", "said"),
    [
        ({"min_noise_multiplier": 5.0}, (), "requires a noise multiplier of 5 for one patient"),
        ({"q": 0.5}, (), "samples its blocks"),
        ({}, ("privacy.user.clip.kind=adaptive",), "no clip bits and no query answers"),
    ],
)
def test_a_run_that_gives_a_patient_too_little_is_refused(
    settings: dict[str, object], words: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    policy = site(tmp_path, PATIENTS, **{"min_noise_multiplier": 1.0, **settings})  # type: ignore[arg-type]
    with pytest.raises(Refused, match=said):
        read(policy, asked(*words))


def test_updates_that_nothing_clips_are_refused_before_they_are_charged(tmp_path: Path) -> None:
    guard = guard_at(tmp_path, patients=PATIENTS, min_noise_multiplier=1.0)
    given = asked(clip_norm=math.inf)

    def masking(content: RecordDict, config: object, *, work: Any, guarded: bool) -> RecordDict:
        work().vector(lambda: None)
        return RecordDict()

    with (
        patch("discreet.guard.site_guard.answer_masking", masking),
        pytest.raises((Refused, ValueError), match=r"clip norm|int64") as found,
    ):
        guard.answer(given, context(), APP)
    assert guard.ledger.releases() == []
    assert found.type is Refused
