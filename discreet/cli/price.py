"""Estimates the cost of a run before it spends anything: epsilon a round and in all, noise over
clip norm, if it can learn through that noise, bytes that a node sends, minutes and memory.

Minutes and memory are measured in a round on made-up data of the same sizes. The data themselves
are read only for their sizes, and nothing is trained on them.

examples:
  discreet plan
  discreet plan experiment=table data.num_clients=897 privacy.user.target_epsilon=2
"""

from __future__ import annotations

import logging
import sys

from discreet.cli.console import Words
from discreet.logs import log_to
from discreet.planning.run_price import average_units, price_lines
from discreet.run_files.resuming import asked_settings
from discreet.server.resolve import resolve
from discreet.server.session import warnings_of
from discreet.settings.settings import with_any_noise
from discreet.simulation.in_process import check_device
from discreet.simulation.timed_round import timed_round


def command(overrides: Words = None) -> None:
    """Prints a line for each kind of cost."""
    asked, call = asked_settings(overrides or [])
    check_device(call.device)
    plan, task = resolve(with_any_noise(asked), resumed=call.resume)
    lines = [*price_lines(plan, average_units(plan.run, task.train)), *warnings_of(plan.run, task)]
    print(*lines, sep="\n", flush=True)
    log_to(sys.stdout, log_format=asked.operations.log_format)
    logging.getLogger("discreet").setLevel(logging.ERROR)
    timed = timed_round(plan, task, call)
    measured = "measured on made-up data"
    print(*timed.lines(plan.run.rounds, measured), sep="\n")
