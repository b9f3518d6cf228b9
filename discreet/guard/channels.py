"""A conformance test of channels between two blocks of code that must not talk to each other.

A block sets each channel to one of four levels, which are two bits: a counter moves on by so many
steps, a store is filled so far. Another block reads a number from each channel. Blocks take turns,
or run side by side, where one sets and the other reads. Whoever runs them
keeps levels and numbers, and `read_back` says how many levels each channel told. Each level comes
as often as the others, in an order drawn at random. This file and the lists of channels
(`all_channels`) need nothing but Python, so that another sandbox can be tested with them.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from operator import sub
from typing import Any

LEVELS = 4
TURNS = 28  # that set a level: one more only reads
FALSE_ALARMS = 1e-9  # over all channels, guesses and both ways to run blocks
TURN = "turn"  # the roles of a block
SETS = "sets"
READS = "reads"
Values = list[float | None]  # of each channel, or none
Pair = tuple[Values, Values]
HOLD_SECONDS = 0.25  # for which a level stays, so that it can be read
BUSY_SECONDS = 0.001  # that a level uses the processor for, of each three


@dataclass(frozen=True)
class Channel:
    """A way to tell another block a level. `read` gives a number, or raises OSError or ValueError
    where there is none; `write` sets a level: for a counter, moves it on. `alone`: no other
    channel's level changes the number. `covered`: False for what is measured and decides nothing,
    as a kernel can't hide it."""

    name: str
    read: Callable[[], float]
    write: Callable[[int], object]
    alone: bool = False
    covered: bool = True


@dataclass(frozen=True)
class Told:
    """What a channel told.

    Attributes:
      share: of the levels that were read; a guess is right in one of four.
      open: a covered channel told more than blocks do that can't talk. These are taken for some
        that can with a probability of FALSE_ALARMS, for all channels and both ways to run blocks
        together.
      covered: as the channel's.
    """

    share: float
    open: bool
    covered: bool


def read_all(channels: Sequence[Channel]) -> Values:
    """The number of each channel."""
    found: Values = []
    for channel in channels:
        try:
            found.append(float(channel.read()))
        except (OSError, ValueError, IndexError):
            found.append(None)
    return found


def write_all(channels: Sequence[Channel], levels: str) -> None:
    """Sets the level of each channel; without levels, of none."""
    for channel, level in zip(channels, levels, strict=False):
        with suppress(OSError, ValueError, IndexError):
            channel.write(int(level))


def take_part(channels: Sequence[Channel], part: Mapping[str, Any]) -> list[Any]:
    """What a block does in the test, as its `part` says: takes a turn, and returns the values that
    it read; or sets or reads levels until a moment of the clock, and returns when it did so, as
    `side_by_side` takes it."""
    with suppress(OSError):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # a kernel counts by processor
    if part["role"] == TURN:
        values = read_all(channels)
        write_all(channels, part["rows"][0])
        return values
    if part["role"] == SETS:
        return _set_until(part["until"], channels, part["rows"])
    return _read_until(part["until"], channels)


def _set_until(until: float, channels: Sequence[Channel], rows: Sequence[str]) -> list[Any]:
    """Sets one row after the other, again and again, and holds each for a while."""
    moments: list[Any] = []
    for row in itertools.cycle(rows):
        begins = time.time()
        if begins > until:
            return moments
        write_all(channels, row)
        ends = time.time()
        moments.append((begins, ends))
        _hold(int(row[-1]), ends + HOLD_SECONDS)
    return moments


def _read_until(until: float, channels: Sequence[Channel]) -> list[Any]:
    readings = []
    while (begins := time.time()) < until:
        values = read_all(channels)
        readings.append((begins, time.time(), values))
    return readings


def side_by_side(
    rows: int, moments: Sequence[Sequence[float]], readings: Sequence[Sequence[Any]]
) -> list[Pair | None]:
    """What another block read before and after each row was set, and before the next one was. Which
    readings are taken depends on nothing but moments. None where the blocks were too slow for
    that."""
    found: dict[int, Pair] = {}
    before: Values | None = None
    for number, ((_, set_at), (next_at, _)) in enumerate(pairwise(moments)):
        inside = [each for begins, ends, each in readings if begins > set_at and ends < next_at]
        after = inside[0] if inside else None
        if before is not None and after is not None:
            found.setdefault(number % rows, (before, after))
        before = after
    return [found.get(row) for row in range(rows)]


def _hold(level: int, until: float) -> None:
    """Uses the processor and its cache until a moment, the more the higher the level, for what is
    not covered."""
    while time.time() < until:
        busy = time.time() + level * BUSY_SECONDS
        while time.time() < busy:
            walk()
        time.sleep((LEVELS - 1 - level) * BUSY_SECONDS)


WALKED = bytearray(1 << 22)
LINE = 64


def walk() -> float:
    """Touches each line of some memory, and returns the seconds that this took."""
    started = time.perf_counter()
    bytes(memoryview(WALKED)[::LINE])
    return time.perf_counter() - started


def drawn_levels(channels: Sequence[Channel], source: random.Random) -> list[str]:
    """The levels of each turn, one for each channel. A store has levels of its own. Those that move
    together, as counters do, have one level together."""
    every = [str(level) for level in range(LEVELS)] * (TURNS // LEVELS)
    together = source.sample(every, TURNS)
    columns = [source.sample(every, TURNS) if channel.alone else together for channel in channels]
    return ["".join(row) for row in zip(*columns, strict=True)]


def read_back(
    channels: Sequence[Channel], rows: Sequence[str], pairs: Sequence[Pair]
) -> dict[str, Told]:
    """What each channel told. `pairs`: what was read before and after each row was set. A level is
    guessed by the rank of the number read, or of its change, or by the opposite rank: the
    best of these four counts."""
    tries = 4 * 2 * len(channels)
    found = {}
    for place, channel in enumerate(channels):
        sent = [int(row[place]) for row in rows]
        before = [each[place] or 0.0 for each, _ in pairs]
        after = [each[place] or 0.0 for _, each in pairs]
        changes = list(map(sub, after, before))
        right = max(agreement(sent, numbers) for numbers in (after, changes))
        told = chance(right, len(sent)) * tries < FALSE_ALARMS
        found[channel.name] = Told(right / len(sent), told and channel.covered, channel.covered)
    return found


def agreement(sent: Sequence[int], numbers: Sequence[float]) -> int:
    """How many levels are guessed right by the ranks of numbers, or by their opposites."""
    count = len(sent)
    ranked = sorted(range(count), key=lambda turn: numbers[turn])
    guessed = {turn: rank * LEVELS // count for rank, turn in enumerate(ranked)}
    right = sum(guessed[turn] == level for turn, level in enumerate(sent))
    opposite = sum(LEVELS - 1 - guessed[turn] == level for turn, level in enumerate(sent))
    return max(right, opposite)


def chance(right: int, count: int) -> float:
    """The probability that guesses made without the levels are right at least so often, where each
    level comes as often as the others: the hits of a random arrangement, by rook polynomials
    (Riordan 1958, chapter 7)."""
    each = count // LEVELS
    of_one = [math.comb(each, taken) ** 2 * math.factorial(taken) for taken in range(each + 1)]
    ways = [1]
    for _ in range(LEVELS):
        ways = _product(ways, of_one)
    hits = 0
    for exactly in range(right, count + 1):
        for more in range(exactly, count + 1):
            signed = (-1) ** (more - exactly) * math.comb(more, exactly)
            hits += signed * ways[more] * math.factorial(count - more)
    return hits / math.factorial(count)


def _product(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """The coefficients of a product of two polynomials."""
    made = [0] * (len(one) + len(other) - 1)
    for place, left in enumerate(one):
        for further, right in enumerate(other):
            made[place + further] += left * right
    return made
