"""Measures the time and memory of a round on made-up data of the same sizes."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from discreet.data.examples import Examples, Task
from discreet.data.targets import CLASSES, LABELS, SEQUENCES
from discreet.planning.plan import Plan
from discreet.planning.round_cost import RoundCost, peak_memory
from discreet.run_files.call import Call
from discreet.server.session import open_session, training_run
from discreet.simulation.in_process import virtual_clients

ROUNDS = 2  # the first one warms up
SEED = 20753


def timed_round(plan: Plan, task: Task, call: Call) -> RoundCost:
    """Does two rounds of a plan on made-up data, in a temporary folder, and times the second. Only
    the sizes of the task are used."""
    rows: list[Mapping[str, object]] = []
    made = replace(task, train=_made_up(task.train, task), test=_made_up(task.test, task))
    with ExitStack() as held:
        folder = (
            Path(held.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
            / "run"
        )
        user = replace(plan.privacy.user, account=None, max_epsilon=None)
        short = plan.changed(rounds=ROUNDS, privacy=replace(plan.privacy, user=user))
        call = replace(call, output_dir=str(folder), resume=False)
        session = open_session(short, made, call, simulated=True, held=held)
        transport = virtual_clients(session, held)
        training_run(session, transport, on_round=rows.append).run()
        return RoundCost(float(str(rows[-1]["seconds"])), peak_memory())


def _made_up(examples: Examples, task: Task) -> Examples:
    draws = torch.Generator().manual_seed(SEED)
    count = len(examples)
    shape = task.shape
    if shape.num_tokens:
        inputs = torch.randint(shape.num_tokens, (count, *shape.input_shape), generator=draws)
    else:
        low, high = shape.scale
        inputs = low + (high - low) * torch.rand(count, *shape.input_shape, generator=draws)
    if shape.target.kind in (CLASSES, SEQUENCES):
        targets = torch.randint(shape.num_classes, examples.targets.shape, generator=draws)
    else:
        targets = torch.rand(examples.targets.shape, generator=draws)
        if shape.target.kind == LABELS:
            targets = targets.round()
        else:
            targets = targets * 2 - 1
    return replace(examples, inputs=inputs, targets=targets)
