"""The conformance test of channels between blocks: it finds what is open, and nothing else."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from discreet.guard.channels import Channel, Values, drawn_bits, open_channels, take_turn
from discreet.guard.kernel_channels import MANY, all_channels, counter, make_pipes, pipe_inode


def played(channels: Sequence[Channel], seed: int) -> dict[str, float]:
    """The channels found open when blocks take turns in this process, without walls."""
    bits = drawn_bits(channels, random.Random(seed))
    return open_channels(channels, bits, [take_turn(channels, row) for row in bits])


def kept_in(path: Path) -> Channel:
    """A planted fault: a file that outlives its block."""
    path.write_text("0")
    return Channel(
        "a file", lambda: float(path.read_text()), lambda bit: path.write_text(f"{bit:d}")
    )


def drawn_by(source: random.Random) -> Channel:
    """A number that has nothing to do with what was written."""
    return Channel("chance", source.random, lambda bit: None)


def test_an_open_channel_is_found_among_closed_ones(tmp_path: Path) -> None:
    channels = [
        replace(kept_in(tmp_path / "bit"), alone=True),
        drawn_by(random.Random(71)),
        Channel("unreadable", lambda: float(Path("/nowhere").read_text()), lambda bit: None),
        Channel("constant", lambda: 1.0, lambda bit: None),
    ]
    assert played(channels, 4021) == {"a file": 1.0}


def test_the_number_of_a_new_pipe_tells_between_processes_that_share_a_kernel() -> None:
    channels = [counter("pipes", pipe_inode, make_pipes, 5 * MANY)]  # other tests make pipes too
    assert played(channels, 93)["pipes"] > 0.95


def test_a_bit_that_is_told_upside_down_or_as_a_change_is_found() -> None:
    count = [0.0]

    def lower(bit: bool) -> None:
        count[0] -= 5.0 if bit else 1.0

    assert played([Channel("falls", lambda: count[0], lower)], 17) == {"falls": 1.0}


def test_numbers_that_no_bit_moves_are_not_found() -> None:
    channels = [drawn_by(random.Random(0))]
    for seed in range(300):
        source = random.Random(1000 + seed)
        bits = drawn_bits(channels, source)
        values: list[Values] = [{"chance": source.random()} for _ in bits]
        assert open_channels(channels, bits, values) == {}


def test_two_bits_of_fifty_may_be_wrong_and_eight_may_not() -> None:
    channels = [Channel("told", lambda: 0.0, lambda bit: None)]
    bits = drawn_bits(channels, random.Random(5))
    for wrong, found in ((1, True), (8, False)):
        told = [float(row) for row in bits[:-1]]
        ones = [place for place, value in enumerate(told) if value][:wrong]
        zeros = [place for place, value in enumerate(told) if not value][:wrong]
        for place in ones + zeros:
            told[place] = 1 - told[place]
        values: list[Values] = [{}, *({"told": value} for value in told)]
        assert bool(open_channels(channels, bits, values)) is found


def test_at_least_thirty_channels_are_tried_and_each_by_one_name() -> None:
    names = [channel.name for channel in all_channels()]
    assert len(names) == len({*names}) >= 30


@pytest.mark.parametrize("seed", [3, 4])
def test_half_of_the_bits_of_each_channel_are_ones(seed: int) -> None:
    bits = drawn_bits(all_channels(), random.Random(seed))
    assert {column.count("1") for column in zip(*bits[:-1], strict=True)} == {26}
