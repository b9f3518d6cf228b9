"""One run among many: a failure is told in a line, and does not end the others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from discreet.ledger.durable_ledger import LedgerError
from discreet.protocol.run_lost import RunLostError
from discreet.server.plan import Plan
from discreet.server.run_folder import CONFIG, RunFolder, note_interruption, only_writer
from discreet.settings.rules import ConfigError

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
    plan: Plan
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
