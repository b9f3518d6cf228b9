"""Many runs, one after the other in this process or several at a time on a Ray cluster: a failure ends no other run."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import Progress as Display
from rich.progress import TextColumn

from discreet.config import ConfigError
from discreet.extras import require
from discreet.federated.durable_ledger import LedgerError
from discreet.federated.progress import log_above
from discreet.federated.run_folder import CONFIG, RunFolder, note_interruption, only_writer
from discreet.federated.run_lost import RunLostError
from discreet.settings import RunConfig

logger = logging.getLogger("discreet")

TOLD = (ConfigError, LedgerError, RunLostError)  # they say in one line what is wrong, and where
# What a run may meet, in code of one's own too. Anything else is no failure of a run: it ends them all.
FAILURES = (
    *(ValueError, ArithmeticError, LookupError, RuntimeError, MemoryError, OSError),
    *(TypeError, AttributeError, AssertionError, ImportError),
)


@dataclass(frozen=True)
class Job:
    """A run that is to be done.

    Attributes:
      name: in messages.
      work: starts it, resumes it, or leaves it if it is over. It travels to other processes.
    """

    name: str
    folder: RunFolder
    config: RunConfig
    work: Callable[[], object]

    def attempt(self) -> str | None:
        """Does the run; gives the reason for which it failed, in one line, or None.

        Raises:
          BrokenPipeError: nobody reads the output any more, which is no fault of the run.
        """
        try:
            self.work()
        except BrokenPipeError:
            raise
        except FAILURES as error:
            reason = first_line(error)
            logger.error("%s failed: %s", self.name, reason, exc_info=None if isinstance(error, TOLD) else error)
            self.note(reason)
            return reason
        return None

    def note(self, reason: str) -> None:
        """Writes in the run folder, if it holds a run that nobody writes, that the run was interrupted."""
        if (self.folder.path / CONFIG).exists():
            with suppress(*TOLD), only_writer(self.folder.path, patience=0.0):
                note_interruption(self.folder, reason)


Ended = Callable[[Job, str | None], None]  # is told of each run that has ended, and why if it failed


def first_line(error: BaseException) -> str:
    """An error in one line, with its type unless the message was written for people.

    >>> first_line(TypeError("no\\nnumber")), first_line(ConfigError("rounds must be at least 1"))
    ('TypeError: no', 'rounds must be at least 1')
    """
    said = str(error).strip().splitlines()[:1]
    return "".join(said) if isinstance(error, TOLD) and said else ": ".join([type(error).__name__, *said])


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
        """Counts a run that has ended; without a reason it is done."""
        self.ended += 1
        if reason is not None:
            self.failed.append((job.name, reason))

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
            logger.info("%s", tally)
        return tally
    from discreet.simulation.runs_on_ray import run_on_ray  # Ray takes seconds to import

    with _shown(tally, sys.stdout) as ended:
        run_on_ray(jobs, at_a_time=at_a_time, shared=shared, ended=ended)
    logger.info("%s", tally)
    return tally


@contextmanager
def _shown(tally: Tally, stream: TextIO) -> Iterator[Ended]:
    """Counts what ends while the block runs: on one line of a terminal, or in a line of the log each."""
    display = Display(
        TextColumn("{task.description}"),
        console=Console(file=stream),
        auto_refresh=False,
        transient=True,
        disable=not stream.isatty(),
    )
    line = display.add_task(str(tally))

    def ended(job: Job, reason: str | None) -> None:
        tally.count(job, reason)
        if display.disable:
            logger.info("%s %s: %s", job.name, "has ended" if reason is None else "failed", tally)
        display.update(line, description=str(tally), refresh=True)

    with display, log_above(stream) if stream.isatty() else nullcontext():
        yield ended


def check_parallel(configs: Sequence[RunConfig]) -> None:
    """Raises ConfigError if runs with these settings can't be tasks of one Ray cluster."""
    require("ray", extra="simulation", why="--jobs")
    if len({config.ray.address for config in configs}) > 1:
        raise ConfigError("ray.address must be the same for all runs with --jobs")
    if any(config.device != "cpu" and not config.ray.num_gpus for config in configs):
        raise ConfigError("device=cuda with --jobs needs ray.num_gpus: a run asks for that share of a GPU")
