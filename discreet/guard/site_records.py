"""What a guard writes for the site's operators, in a folder beside that of the blocks, and the lock
that keeps a second guard away.

`discreet site log` reads the records of a running guard. It never opens the folder of the blocks,
which Landlock needs closed while blocks run.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from discreet.guard.guard_policy import GuardPolicy
from discreet.settings.rules import ConfigError

JOURNAL = "journal.jsonl"
MOST_TEXT = 200  # characters of a text that a server chose
Row = Mapping[str, object]


def records_of(policy: GuardPolicy) -> Path:
    """The folder of the records: that of the blocks with `-records` behind its name."""
    folder = Path(policy.blocks.folder)
    return folder.with_name(f"{folder.name}-records")


def opened_records(policy: GuardPolicy) -> Path:
    """The folder of the records, made and opened for its owner alone, also after a crash of the
    guard."""
    folder = records_of(policy)
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)
    return folder


def note(folder: Path, row: Row) -> None:
    """Adds a row to the journal, with its texts cut short. A line that a crash has torn stays a
    line of its own."""
    cut = {name: each[:MOST_TEXT] if isinstance(each, str) else each for name, each in row.items()}
    path = folder / JOURNAL
    torn = path.exists() and path.stat().st_size > 0 and not _ends_a_line(path)
    with path.open("a") as file:
        file.write("\n" * torn + json.dumps(cut) + "\n")


def printable(text: str) -> str:
    """A text that a server or an app chose, without control sequences of a terminal."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


@contextmanager
def site_lock(policy: GuardPolicy) -> Iterator[None]:
    """Keeps other guards and checks away from a site until the end of a with block, or of this
    process. It is taken before anything of the site is opened. ConfigError: another one has it."""
    folder = Path(policy.blocks.folder)
    path = folder.with_name(f"{folder.name}.lock")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConfigError(f"{folder}: a guard or a check of this site is running") from error
    try:
        yield
    finally:
        os.close(descriptor)
