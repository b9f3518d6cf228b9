"""What a node forgets of a run that was killed, and what it must not forget."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from discreet.masking.store import FolderStore, read_state
from discreet.masking.wire import MaskingRefused, Stage
from discreet.node.secure_aggregation import FORGOTTEN_SECONDS, forget
from tests.masking.federation import RUN, Federation, federation, terms_of

LATER, ANOTHER = FORGOTTEN_SECONDS + 60, "f" * 32


def federation_in(folder: Path) -> Federation:
    return federation(terms_of(5, dropouts=2), store=lambda name: FolderStore(folder / name))


def later(seconds: float = LATER) -> float:
    return time.time() + seconds


def test_a_round_that_was_opened_without_a_node_can_not_be_opened_again_after_the_others_forgot_the_run(
    tmp_path: Path,
) -> None:
    ours = federation_in(tmp_path)
    first, *others = ours.nodes
    ours.sum(1, {Stage.UNMASK: frozenset({first})})
    for name in others:
        forget(tmp_path / name, but=ANOTHER, now=later())
    with pytest.raises(MaskingRefused, match="is over"):
        ours.sum(1)
    assert ours.charges.count(first) == 1


def test_secrets_of_a_killed_run_are_erased(tmp_path: Path) -> None:
    ours = federation_in(tmp_path)
    ours.until(Stage.CONFIRM)
    name = next(iter(ours.nodes))
    assert read_state(FolderStore(tmp_path / name).load(RUN) or b"").attempts
    forget(tmp_path / name, but=ANOTHER, now=later())
    assert not read_state(FolderStore(tmp_path / name).load(RUN) or b"").attempts


@pytest.mark.parametrize(("but", "seconds"), [(RUN, LATER), (ANOTHER, FORGOTTEN_SECONDS - 60)])
def test_a_run_that_goes_on_is_not_forgotten(tmp_path: Path, but: str, seconds: float) -> None:
    ours = federation_in(tmp_path)
    exchange = ours.until(Stage.CONFIRM)
    for name in ours.nodes:
        forget(tmp_path / name, but=but, now=later(seconds))
    assert ours.send(exchange)


def test_a_node_that_is_making_its_vector_is_left_alone(tmp_path: Path) -> None:
    ours = federation_in(tmp_path)
    exchange = ours.until(Stage.MASKED)
    name = next(iter(ours.nodes))
    with FolderStore(tmp_path / name).locked(RUN):
        forget(tmp_path / name, but=ANOTHER, now=later())
    assert ours.answer(name, exchange.requests[name])
