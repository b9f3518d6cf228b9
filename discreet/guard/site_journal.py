"""The journal of a guard, for the site's operators: all its lines, and an overview."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from discreet.guard.guard_policy import GuardPolicy
from discreet.guard.site_check import split_fault
from discreet.guard.site_guard import guard_ledger
from discreet.guard.site_records import (
    CLOSED,
    ENDED,
    JOURNAL,
    OLDER,
    open_after_crash,
    printable,
    read_rows,
    records_of,
    rounds_ended,
)
from discreet.guard.site_report import spending_lines
from discreet.settings.rules import ConfigError

NO_DIGEST = "-"  # in rows of a guard before 0.2.0, which had no field for it
MOST_APPS = 20  # of an overview: a server may send any number of bundles
Row = Mapping[str, object]


def rows(policy: GuardPolicy) -> list[dict[str, object] | None]:
    """The rows of the older journal and of the present one, oldest first, without control
    sequences; None for one that a crash has torn. ConfigError: they can't be read now."""
    open_after_crash(policy, [records_of(policy)])
    found: list[dict[str, object] | None] = []
    for path in (records_of(policy) / OLDER, records_of(policy) / JOURNAL):
        try:
            found += map(_printable, read_rows(path))
        except FileNotFoundError:
            continue
        except PermissionError as error:
            raise ConfigError(CLOSED.format(path)) from error
    return found


def _printable(row: dict[str, object] | None) -> dict[str, object] | None:
    if row is None:
        return None
    return {
        name: printable(value) if isinstance(value, str) else value for name, value in row.items()
    }


def journal_lines(policy: GuardPolicy) -> Iterator[str]:
    """The guard's answers and refusals, one line each, oldest first; and the number of rounds that
    were charged and did not end. LedgerError, after the lines: the account can't be read."""
    found = rows(policy)
    for row in found:
        if row is None:
            yield "a line that a crash has cut short"
            continue
        if ENDED in row:
            continue
        app = f"{row.get('digest', NO_DIGEST)} {row['app']}"  # a name could end like a digest
        what = f"{row['time']}  run {row['run']}  {app}  round {row['round']}  {row['kind']}"
        if "refused" in row:
            yield f"{what}: refused: {row['refused']}"
        else:
            blocks = "block" if row["drawn"] == 1 else "blocks"
            drawn = f"{row['drawn']} {blocks}, {row['failed']} of them without a result"
            late = "left late; " if row.get("late") else ""
            yield f"{what}: {drawn}; {late}epsilon {row['epsilon']:.4g} so far"
    lost = guard_ledger(policy).spent(policy.unit).num_releases - _ended(found)
    if lost > 0:
        yield f"charged without an end, as after a crash, and part of what is spent: {lost}"


def _ended(found: Sequence[Row | None]) -> int:
    """The rounds that ended: a journal's first row counts those before it, and so also those of the
    older one."""
    last = max((place for place, row in enumerate(found) if row and ENDED in row), default=0)
    return rounds_ended(found[last:])


@dataclass
class AppRecord:
    """The answers to one bundle: its last row, and how many rounds were answered, late and
    refused."""

    last: Row
    answered: int = 0
    late: int = 0
    refused: int = 0

    def add(self, row: Row) -> None:
        self.last = row
        self.answered += "drawn" in row
        self.late += bool(row.get("late"))
        self.refused += "refused" in row


def app_records(policy: GuardPolicy) -> dict[str, AppRecord]:
    """The record of each bundle by its digest, the last asked last."""
    found: dict[str, AppRecord] = {}
    for row in rows(policy):
        if row is not None and "app" in row:
            digest = str(row.get("digest", NO_DIGEST))
            record = found.pop(digest, None) or AppRecord(row)
            record.add(row)
            found[digest] = record
    return found


def overview_lines(policy: GuardPolicy) -> Iterator[str]:
    """The budget, what ran for whom, and what waits for an approval. A name is what a bundle says
    of itself, so it stands in quotes behind what is certain."""
    yield f"budget: epsilon {policy.max_epsilon:g} at delta {policy.max_delta:g}, over all runs"
    yield from spending_lines(policy, guard_ledger(policy))
    if fault := split_fault(policy):
        yield f"discreet site check refuses this guard.toml: {fault}"
    records = app_records(policy)
    approved = {
        digest: each for digest, each in records.items() if policy.any or digest in policy.apps
    }
    waiting = {digest: each for digest, each in records.items() if digest not in approved}
    yield from _listed("what ran:", approved, _ran)
    yield from _listed("what waits for approval (apps in guard.toml):", waiting, _waits)


def _ran(each: AppRecord) -> str:
    told = f"{each.answered} rounds answered, {each.late} late, {each.refused} refused"
    return f"{told}; the last {each.last['time']}"


def _waits(each: AppRecord) -> str:
    return f"asked {each.refused} times, the last {each.last['time']}: {each.last.get('refused')}"


def _listed(
    title: str, records: Mapping[str, AppRecord], told: Callable[[AppRecord], str]
) -> Iterator[str]:
    if not records:
        yield f"{title} nothing"
        return
    yield title
    for digest, each in [*records.items()][: -MOST_APPS - 1 : -1]:
        name = json.dumps(each.last["app"], ensure_ascii=False)
        yield f"  {digest}: {told(each)}; calls itself {name}"
    if len(records) > MOST_APPS:
        yield f"  and {len(records) - MOST_APPS} more: discreet site log"
