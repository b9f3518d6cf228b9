"""A conformance test of channels between two blocks of code that must not talk to each other.

One block after the other takes a turn: it reads a number from each channel, and then sets one bit
in each, by a counter that it moves on or a store that it fills. Whoever runs the blocks keeps bits
and numbers, and `open_channels` says which channels told the next block its bit. Half of a
channel's bits are ones, in an order drawn at random. This file and `kernel_channels`, the list of
channels, need nothing but Python, so that another sandbox can be tested with them.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

TURNS = 53  # bits are of all but the last, which only reads
FALSE_ALARMS = 1e-9  # over all channels, readings and signs
Values = dict[str, float]


@dataclass(frozen=True)
class Channel:
    """A way to tell the next block a bit. `read` gives a number, or raises OSError or ValueError
    where there is none; `write` sets a bit: for a counter, moves it on. `alone`: no other channel's
    bit changes the number."""

    name: str
    read: Callable[[], float]
    write: Callable[[bool], object]
    alone: bool = False


def take_turn(channels: Sequence[Channel], bits: str) -> Values:
    """Reads each channel, and then sets its bit; with no bits it only reads. A channel that can't
    be read gives nothing."""
    with suppress(OSError):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # a kernel counts by processor
    found = {}
    for channel in channels:
        with suppress(OSError, ValueError, IndexError):
            found[channel.name] = float(channel.read())
    for channel, bit in zip(channels, bits, strict=False):
        with suppress(OSError, ValueError, IndexError):
            channel.write(bit == "1")
    return found


def drawn_bits(channels: Sequence[Channel], source: random.Random) -> list[str]:
    """The bits of each turn, one for each channel; the last turn has none. A store has bits of
    its own. Those that move together, as counters do, have one bit together."""
    half = (TURNS - 1) // 2
    together = list("01" * half)
    source.shuffle(together)
    columns = []
    for channel in channels:
        own = list("01" * half)
        source.shuffle(own)
        columns.append(own if channel.alone else together)
    return ["".join(row) for row in zip(*columns, strict=True)] + [""]


def open_channels(
    channels: Sequence[Channel], bits: Sequence[str], values: Sequence[Values]
) -> dict[str, float]:
    """The channels that told the next block its bit, and the share of bits that were read. A bit is
    guessed by whether the number read, or its change, is above the middle one. Blocks that can't
    talk are taken for some that can with a probability of FALSE_ALARMS, for all channels
    together."""
    found = {}
    for place, channel in enumerate(channels):
        sent = [row[place] == "1" for row in bits[:-1]]
        read = [each.get(channel.name, 0.0) for each in values]
        changes = [after - before for before, after in pairwise(read)]
        for numbers in (read[1:], changes):
            middle = sorted(numbers)[len(numbers) // 2 - 1]
            guessed = [number > middle for number in numbers]
            right = sum(one == other for one, other in zip(sent, guessed, strict=True))
            if chance(sent, guessed) * 2 * len(channels) < FALSE_ALARMS:
                found[channel.name] = max(right, len(sent) - right) / len(sent)
    return found


def chance(sent: Sequence[bool], guessed: Sequence[bool]) -> float:
    """The probability that guesses made without the bits agree with them, or with their opposite,
    as often as these: the tails of a hypergeometric distribution."""
    count = len(sent)
    ones = sum(sent)
    taken = sum(guessed)
    both = sum(one and other for one, other in zip(sent, guessed, strict=True))
    expected = ones * taken / count
    ways = [
        math.comb(ones, each) * math.comb(count - ones, taken - each)
        for each in range(max(0, taken + ones - count), min(ones, taken) + 1)
        if abs(each - expected) >= abs(both - expected)
    ]
    return sum(ways) / math.comb(count, taken)
