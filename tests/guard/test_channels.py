"""The conformance test of channels between blocks: it finds what is open, and nothing else."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from multiprocessing import Pipe, Process
from multiprocessing.connection import Connection
from operator import eq
from pathlib import Path
from typing import Any, cast

import pytest

from discreet.guard import channels as guard_channels
from discreet.guard import conformance, kernel_stores
from discreet.guard.channels import (
    READS,
    SETS,
    TURN,
    TURNS,
    Channel,
    Told,
    Values,
    chance,
    drawn_levels,
    read_back,
    side_by_side,
    take_part,
)
from discreet.guard.kernel_channels import MANY, counter, make_pipes, pipe_inode
from discreet.guard.kernel_stores import all_channels, held
from discreet.guard.sandbox import Sandbox


def played(channels: Sequence[Channel], seed: int) -> dict[str, float]:
    """The channels found open when blocks take turns in this process, without walls."""
    rows = drawn_levels(channels, random.Random(seed))
    parts = [{"role": TURN, "rows": [row]} for row in [*rows, ""]]
    values = [take_part(channels, part) for part in parts]
    return opened(read_back(channels, rows, [*pairwise(values)]))


def opened(told: Mapping[str, Told]) -> dict[str, float]:
    return {name: each.share for name, each in told.items() if each.open}


def kept_in(path: Path) -> Channel:
    """A planted fault: a file that outlives its block."""
    path.write_text("0")
    return Channel(
        "a file", lambda: float(path.read_text()), lambda level: path.write_text(f"{level}")
    )


def drawn_by(source: random.Random) -> Channel:
    """A number that has nothing to do with what was written."""
    return Channel("chance", source.random, lambda level: None)


def test_an_open_channel_is_found_among_closed_ones(tmp_path: Path) -> None:
    channels = [
        replace(kept_in(tmp_path / "bit"), alone=True),
        drawn_by(random.Random(71)),
        Channel("unreadable", lambda: float(Path("/nowhere").read_text()), lambda level: None),
        Channel("constant", lambda: 1.0, lambda level: None),
    ]
    assert played(channels, 4021) == {"a file": 1.0}


def test_the_number_of_a_new_pipe_tells_between_processes_that_share_a_kernel() -> None:
    channels = [counter("pipes", pipe_inode, make_pipes, 10 * MANY)]  # other tests make pipes too
    assert played(channels, 93)["pipes"] > 0.9


def test_a_level_that_is_told_upside_down_or_as_a_change_is_found() -> None:
    count = [0.0]

    def lower(level: int) -> None:
        count[0] -= 1.0 + level

    assert played([Channel("falls", lambda: count[0], lower)], 17) == {"falls": 1.0}


def test_a_channel_that_is_open_is_named_with_what_was_read(tmp_path: Path) -> None:
    channels = [replace(kept_in(tmp_path / "bit"), alone=True), drawn_by(random.Random(71))]
    rows = drawn_levels(channels, random.Random(4021))
    parts = [{"role": TURN, "rows": [row]} for row in [*rows, ""]]
    values = [take_part(channels, part) for part in parts]
    lines = [*conformance.channel_lines("in turns", read_back(channels, rows, [*pairwise(values)]))]
    assert lines[:2] == [
        "a block reads 100% of what another one sets by a file, in turns",
        "1 of 2 tried channels between blocks are open, in turns",
    ]


def test_what_is_not_covered_is_measured_and_decides_nothing(tmp_path: Path) -> None:
    channels = [replace(kept_in(tmp_path / "bit"), covered=False)]
    rows = drawn_levels(channels, random.Random(8))
    parts = [{"role": TURN, "rows": [row]} for row in [*rows, ""]]
    values = [take_part(channels, part) for part in parts]
    told = read_back(channels, rows, [*pairwise(values)])["a file"]
    assert (told.share, told.open) == (1.0, False)


def test_numbers_that_no_level_moves_are_not_found() -> None:
    channels = [drawn_by(random.Random(0))]
    for seed in range(300):
        source = random.Random(1000 + seed)
        rows = drawn_levels(channels, source)
        values: list[Values] = [[source.random()] for _ in range(TURNS + 1)]
        assert opened(read_back(channels, rows, [*pairwise(values)])) == {}


def test_one_level_of_28_may_be_wrong_and_its_partner_and_six_may_not() -> None:
    channels = [Channel("told", lambda: 0.0, lambda level: None)]
    rows = drawn_levels(channels, random.Random(5))
    for wrong, found in ((1, True), (3, False)):
        told = [float(row) for row in rows]
        ones = [place for place, value in enumerate(told) if value == 1][:wrong]
        twos = [place for place, value in enumerate(told) if value == 2][:wrong]
        for place in ones + twos:
            told[place] = 3 - told[place]
        values: list[Values] = [[None], *([value] for value in told)]
        assert bool(opened(read_back(channels, rows, [*pairwise(values)]))) is found


def test_the_chance_of_agreeing_is_that_of_all_arrangements() -> None:
    levels = (0, 0, 1, 1, 2, 2, 3, 3)
    arrangements = [*set(itertools.permutations(levels))]
    for right in range(9):
        agree = sum(sum(map(eq, levels, each)) >= right for each in arrangements)
        assert chance(right, 8) == pytest.approx(agree / len(arrangements))


def test_at_least_sixty_channels_are_tried_and_each_by_one_name() -> None:
    names = [channel.name for channel in all_channels(side_by_side=True)]
    assert len(names) == len({*names}) >= 60


@pytest.mark.parametrize("seed", [3, 4])
def test_each_level_of_a_channel_comes_as_often_as_the_others(seed: int) -> None:
    for column in zip(*drawn_levels(all_channels(), random.Random(seed)), strict=True):
        assert Counter(column) == dict.fromkeys("0123", TURNS // 4)


def part_in(pipe: Connection, role: str, rows: Sequence[str], until: float) -> None:
    """One of two processes side by side, without walls."""
    pipe.send(take_part(held(), {"role": role, "rows": rows, "until": until}))


def test_what_a_block_holds_is_read_by_one_beside_it_that_shares_its_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_this_test(name: str = "this.py") -> str:  # others may try the channels just now, too
        path = tmp_path / name
        if not path.exists():
            path.write_text("# a file")
        return str(path)

    monkeypatch.setattr(kernel_stores, "beside_python", of_this_test)
    monkeypatch.setattr(guard_channels, "HOLD_SECONDS", 0.05)  # few channels are soon read
    channels = [*held(), drawn_by(random.Random(2))]
    rows = drawn_levels(channels, random.Random(12))
    names = {"a lock of a file", "a watch of a file", "a futex in a file"}
    for seconds in (4.0, 15.0, 60.0):  # a machine with other work needs longer
        pipes = [Pipe() for _ in range(2)]
        until = time.time() + seconds
        for (_, theirs), role in zip(pipes, (SETS, READS), strict=True):
            Process(target=part_in, args=(theirs, role, rows, until), daemon=True).start()
        pairs = side_by_side(len(rows), *[ours.recv() for ours, _ in pipes])
        whole = [pair for pair in pairs if pair is not None]
        found = set(opened(read_back(held(), rows, whole))) if len(whole) == len(rows) else set()
        if found == names:
            break
    assert found == names


def test_rows_are_paired_with_what_was_read_before_and_after_them() -> None:
    moments = [(number + 0.0, number + 0.1) for number in range(6)]
    readings = [(number + 0.2, number + 0.3, [float(number)]) for number in range(6)]
    assert side_by_side(3, moments, readings) == [([2.0], [3.0]), ([0.0], [1.0]), ([1.0], [2.0])]
    readings[1] = (1.05, 1.2, [1.0])  # while the row was being set
    assert side_by_side(3, moments, readings) == [
        ([2.0], [3.0]),
        ([3.0], [4.0]),
        None,
    ]


def test_rows_that_were_not_read_in_time_are_tried_again_with_what_was_read_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    channels = all_channels(side_by_side=True)
    asked = []

    def slow(sandbox: Sandbox, parts: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Blocks of which one sets ten rows a try, which show in the first channel alone."""
        rows = parts[0]["rows"][:10]
        asked.append(rows)
        moments = [(number, number + 0.1) for number in range(11)]
        silent: Values = [None] * (len(channels) - 1)
        told = [[float(row[0]), *silent] for row in rows]
        return [moments, [(place + 0.2, place + 0.3, told[place]) for place in range(10)]]

    monkeypatch.setattr(conformance, "_parts", slow)
    told = conformance.told_side_by_side(cast(Sandbox, None))
    assert opened(told) == {channels[0].name: 1.0}
    assert len(asked) == 4
    assert not {*asked[1][1:]} & {*asked[0][1:]}  # a row that is set first has nothing before it
