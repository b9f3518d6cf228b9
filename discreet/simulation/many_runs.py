"""Many runs, one after the other in this process or several at a time on a Ray cluster: a failure ends no other run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from discreet.server.plan import Plan
from discreet.settings.extras import require
from discreet.settings.rules import ConfigError
from discreet.simulation.job import Job

logger = logging.getLogger("discreet")


@dataclass
class Tally:
    """Counts the runs that have ended, and keeps those that failed, with the reason.

    >>> tally = Tally(40, ended=12, failed=[("run 7 of 40", "no space left on device")])
    >>> str(tally)
    '12 of 40 runs, 1 failed'
    """

    total: int
    ended: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)

    def __str__(self) -> str:
        failed = f", {len(self.failed)} failed" if self.failed else ""
        return f"{self.ended} of {self.total} runs{failed}"

    def count(self, job: Job, reason: str | None) -> None:
        """Counts a run that has ended, and says so; without a reason it is done."""
        self.ended += 1
        if reason is not None:
            self.failed.append((job.name, reason))
        logger.info("%s %s: %s", job.name, "has ended" if reason is None else "failed", self)

    def tell_failures(self, repeat: str) -> None:
        """Says which runs failed, and what to type to do them again."""
        logger.error("%d of %d runs failed:", len(self.failed), self.total)
        for name, reason in self.failed:
            logger.error("  %s: %s", name, reason)
        logger.error("to repeat them: %s", repeat)


def run_all(jobs: Sequence[Job], *, at_a_time: int, shared: Path) -> Tally:
    """Does all runs, and goes on if one fails. `shared` is the folder that all their folders lie in.

    One at a time: in this process. Else each is a task of the Ray cluster that `ray.address` names.

    Raises:
      ConfigError: the cluster can't be used; nothing has started.
    """
    tally = Tally(len(jobs))
    if at_a_time == 1 or not jobs:
        for job in jobs:
            tally.count(job, job.attempt())
    else:
        from discreet.simulation.runs_on_ray import run_on_ray  # Ray takes seconds to import

        run_on_ray(jobs, at_a_time=at_a_time, shared=shared, ended=tally.count)
    return tally


def check_parallel(plans: Sequence[Plan]) -> None:
    """Raises ConfigError if these runs can't be tasks of one Ray cluster."""
    require("ray", extra="simulation", why="--jobs")
    if len({plan.ray.address for plan in plans}) > 1:
        raise ConfigError("ray.address must be the same for all runs with --jobs")
    if any(plan.device != "cpu" and not plan.ray.num_gpus for plan in plans):
        raise ConfigError("device=cuda with --jobs needs ray.num_gpus: a run asks for that share of a GPU")
