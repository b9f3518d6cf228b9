"""What a guard writes for the site's operators, in a folder beside that of the blocks, and the lock
that keeps a second guard away.

`discreet site log` reads the records of a running guard. It never opens the folder of the blocks,
which Landlock needs closed while blocks run.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from discreet.guard.guard_policy import GuardPolicy
from discreet.guard.running import ACTIVE
from discreet.run_files.whole_files import replace_file
from discreet.settings.rules import ConfigError

JOURNAL = "journal.jsonl"
OLDER = "journal.older.jsonl"  # what was the journal until it had MOST_JOURNAL bytes
MOST_JOURNAL = 10_000_000
ENDED = "ended_before"  # in the first row of a journal: the rounds in those that are gone
CLOSED = "{} is closed while blocks run: try again later"
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


def open_after_crash(policy: GuardPolicy, folders: Sequence[Path]) -> None:
    """Opens for their owner those folders of a site that a guard has left closed because it was
    killed while blocks ran. ConfigError: a guard is running, or they are another user's."""
    shut = [each for each in folders if each.exists() and not each.stat().st_mode & stat.S_IRUSR]
    if not shut:
        return
    try:
        with site_lock(policy):
            for each in shut:
                each.chmod(0o700)
    except ConfigError as error:
        raise ConfigError(CLOSED.format(shut[0])) from error
    except PermissionError as error:
        raise ConfigError(
            f"{shut[0]} was left closed by a guard that was killed: read it as its user, who can "
            "open it, or start the guard"
        ) from error


def note(folder: Path, row: Row) -> None:
    """Adds a row to the journal, with its texts cut short. A line that a crash has torn stays a
    line of its own. A journal that is long enough becomes the older one, whose rounds that ended
    are counted on."""
    cut = {name: each[:MOST_TEXT] if isinstance(each, str) else each for name, each in row.items()}
    path = folder / JOURNAL
    if path.exists() and path.stat().st_size >= MOST_JOURNAL:
        begin = {ENDED: rounds_ended(read_rows(path))}
        replace_file(folder / f"new.{JOURNAL}", _line(begin).encode(), mode=0o600)
        os.replace(path, folder / OLDER)
        os.replace(folder / f"new.{JOURNAL}", path)
    torn = path.exists() and path.stat().st_size > 0 and not _ends_a_line(path)
    with path.open("a") as file:
        file.write("\n" * torn + _line(cut))


def read_rows(path: Path) -> list[dict[str, object] | None]:
    """The rows of a journal, oldest first; None for one that a crash has torn."""
    found: list[dict[str, object] | None] = []
    with path.open() as file:
        for line in file:
            try:
                found.append(dict(json.loads(line)))
            except (ValueError, TypeError):
                found.append(None)
    return found


def rounds_ended(rows: Iterable[Row | None]) -> int:
    """The rounds that ended up to the last of a journal's rows, also of journals before it."""
    ended = 0
    for row in rows:
        if row is not None:
            before = row.get(ENDED, 0)
            ended += before if isinstance(before, int) else 0
            ended += "drawn" in row
    return ended


def _line(row: Row) -> str:
    return json.dumps(row) + "\n"


def printable(text: str) -> str:
    """A text that a server or an app chose, without control sequences of a terminal."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def _ends_a_line(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def lock_of(policy: GuardPolicy) -> Path:
    """The file that a running guard has locked."""
    folder = Path(policy.blocks.folder)
    return folder.with_name(f"{folder.name}.lock")


def mark_active(policy: GuardPolicy) -> None:
    """Notes in the locked file that the guard has started, for `running`."""
    lock_of(policy).write_text(ACTIVE)


@contextmanager
def site_lock(policy: GuardPolicy) -> Iterator[None]:
    """Keeps other guards and checks away from a site until the end of a with block, or of this
    process. It is taken before anything of the site is opened. ConfigError: another one has it."""
    folder = Path(policy.blocks.folder)
    path = lock_of(policy)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ConfigError(f"{folder}: a guard or a check of this site is running") from error
    os.truncate(descriptor, 0)
    try:
        yield
    finally:
        os.close(descriptor)
