"""Times and memory of compared calls, measured in turns in one process, so that a busy machine
slows all alike."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

Call = Callable[[], object]
Row = dict[str, Any]
TURN_SECONDS = 0.1


def times_in_turns(
    calls: dict[str, Call], seconds: float, *, before: dict[str, Call]
) -> dict[str, list[float]]:
    """Milliseconds of CPU time of each call, for `seconds` times their number; at least three
    rounds. The calls must be warm; functions called `before` them are not timed."""
    times: dict[str, list[float]] = {what: [] for what in calls}
    end = time.perf_counter() + seconds * len(calls)
    while time.perf_counter() < end or min(map(len, times.values())) < 3:
        for what, call in calls.items():
            # Several calls a turn, as in training: the first one starts with the caches of another
            # turn.
            turn = time.perf_counter()
            while time.perf_counter() < turn + TURN_SECONDS:
                before.get(what, tuple)()
                begin = time.process_time()
                call()
                times[what].append(1e3 * (time.process_time() - begin))
    return times


def peak_bytes(call: Call) -> int:
    """The peak bytes of tensors during a call, above those before it."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        call()
    assert watched.profiler is not None
    assert watched.profiler.kineto_results is not None
    changes = [
        event for event in watched.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    level = peak = 0
    for event in sorted(changes, key=lambda event: event.start_ns()):
        level += event.nbytes()
        peak = max(peak, level)
    return peak
