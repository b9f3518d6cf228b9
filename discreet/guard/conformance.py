"""The test of channels between blocks, as `discreet site check` runs it in a site's own sandbox."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from discreet.guard.block_task import CHANNELS, PART
from discreet.guard.channels import (
    READS,
    SETS,
    TURN,
    Pair,
    Told,
    drawn_levels,
    read_back,
    side_by_side,
)
from discreet.guard.guard_policy import KERNEL, GuardPolicy
from discreet.guard.kernel_stores import all_channels
from discreet.guard.operating import run_in, task_of
from discreet.guard.sandbox import Sandbox, SandboxError
from discreet.guard.site_blocks import archive_of

CHECK_SECONDS = 110.0  # of a block that takes part in a test
SIDE_SECONDS = (16.0, 16.0, 16.0, 32.0, 64.0)  # of two blocks at once, until all rows were read


def checking(policy: GuardPolicy) -> GuardPolicy:
    """The policy of a sandbox for tests: as the site's own, with more time for a block, and for two
    blocks at once where they may run so."""
    side_by_side = 2 if policy.enclosure == KERNEL else 1
    return replace(policy, block_seconds=CHECK_SECONDS, at_once=side_by_side)


def told_channels(sandbox: Sandbox) -> dict[str, Told]:
    """How much one block of a site's sandbox tells the next one through each channel. Blocks take
    turns in the sandbox as they do in a round, each as soon as the one before has ended.
    SandboxError: a block did not take its turn."""
    channels = all_channels()
    rows = drawn_levels(channels, random.SystemRandom())
    values = [_parts(sandbox, [{"role": TURN, "rows": [row]}])[0] for row in [*rows, ""]]
    return read_back(channels, rows, [*pairwise(values)])


def told_side_by_side(sandbox: Sandbox) -> dict[str, Told]:
    """The same of two blocks that run at once. One sets levels and the other reads them. They run
    again for rows that a slow machine has not let them read, which are set second then: before the
    first one nothing is read.
    SandboxError: a block took no part, or the machine is too slow."""
    channels = all_channels(side_by_side=True)
    rows = drawn_levels(channels, random.SystemRandom())
    found: dict[int, Pair] = {}
    for seconds in SIDE_SECONDS:
        order = sorted(range(len(rows)), key=lambda row: row in found)
        order.insert(0, order.pop())
        given = [rows[row] for row in order]
        until = time.time() + seconds
        parts = [{"role": role, "rows": given, "until": until} for role in (SETS, READS)]
        pairs = side_by_side(len(rows), *_parts(sandbox, parts))
        for row, pair in zip(order, pairs, strict=True):
            if pair is not None:
                found.setdefault(row, pair)
        if len(found) == len(rows):
            return read_back(channels, rows, [found[row] for row in range(len(rows))])
    raise SandboxError("blocks that run side by side were too slow for the test of their channels")


def _parts(sandbox: Sandbox, parts: Sequence[Mapping[str, object]]) -> list[Any]:
    """What blocks return that take part in the test of channels."""
    task = task_of(sandbox.policy, CHANNELS)
    archives = [archive_of({PART: json.dumps(part).encode()}) for part in parts]
    found = []
    for result in run_in(sandbox, task, archives):
        if not result.state:
            last = result.log.decode(errors="replace").splitlines()[-1:]
            raise SandboxError(f"a block took no part: {' '.join(last)}")
        found.append(json.loads(result.state))
    return found


def channel_lines(how: str, told: Mapping[str, Told]) -> Iterator[str]:
    """The open channels between blocks that run as `how` says, how many were tried, and what no
    kernel hides."""
    for name, each in told.items():
        if each.open:
            yield f"a block reads {each.share:.0%} of what another one sets by {name}, {how}"
    covered = [each for each in told.values() if each.covered]
    opened = sum(each.open for each in covered)
    yield f"{opened} of {len(covered)} tried channels between blocks are open, {how}"
    others = ", ".join(f"{name} {e.share:.0%}" for name, e in told.items() if not e.covered)
    yield f"not covered, and read of what was set (by chance 25%): {others}"
