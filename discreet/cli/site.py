"""A guarded site: `discreet site GUARD_TOML`, or `discreet site VERB WHERE`.

With guard.toml alone: an overview of the budget, of what ran, and of what waits for approval.

split   deals the patients of the data WHERE to blocks, once, into the folder --out. WHERE is a
        table (csv, jsonl; parquet and npz with --public-types), a folder with data.toml, or with
        --id folders a folder with a subfolder for each patient. With --unit site there is one
        block, and no --id
check   WHERE is a guard.toml: checks policy, split, account, and which ways out are open from
        inside the sandbox and which channels between blocks. Takes up to two minutes, and longer
        beside other work. --packages: lists the packages that an app finds here instead, for the
        researcher
try     runs the app WHERE, a folder or a .fab, as a whole in the sandbox on the public rows in
        --mock; all errors are shown, and nothing is charged
log     WHERE is a guard.toml: lists what has run, with app and cost, and what was refused
backup  WHERE is a guard.toml: copies the split with its key, the account and the records to the new
        folder --out, also while the guard runs
status  WHERE is a guard.toml: shows the guarantee and the spent part of the budget; --json: in the
        format of privacy.json in the records of the site after each round

examples:
  discreet site split patients.csv --id patient --blocks 100 --out site
  discreet site check guard.toml
  discreet site try app --mock mock
  discreet site guard.toml
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import distributions
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from typer import Option

from discreet.data.csv_table import CsvTable
from discreet.guard.guard_policy import PATIENT, SITE, read_guard
from discreet.logs import json_ready
from discreet.settings.rules import ConfigError

if TYPE_CHECKING:
    from discreet.guard.sandbox import Sandbox

ACTIONS = ("split", "check", "try", "log", "status", "backup")
COLOUR = re.compile(r"\x1b\[[\d;]*m", re.ASCII)  # of a terminal


def command(
    action: Annotated[str, typer.Argument(metavar="[split|check|try|log|status|backup]")],
    where: Annotated[Path | None, typer.Argument(metavar="WHERE")] = None,
    id_column: Annotated[
        str | None, Option("--id", help="split: the column of the patients' ids, or folders")
    ] = None,
    blocks: Annotated[int | None, Option(help="split: how many blocks, a public number")] = None,
    out: Annotated[
        Path | None, Option(help="split, backup: the folder to be made, for this user alone")
    ] = None,
    unit: Annotated[
        Literal["patient", "site"], Option(help="split: whom the guard protects")
    ] = "patient",
    ids: Annotated[
        Literal["exact", "folded"] | None,
        Option(help="split: whether spellings that differ by case or zeros are one patient"),
    ] = None,
    encoding: Annotated[
        str | None, Option(help="split: of a CSV file, if it is not UTF-8, such as cp1252")
    ] = None,
    public_types: Annotated[
        bool,
        Option(
            "--public-types",
            help="split: types and shapes in a parquet or npz file are public, whoever is in it",
        ),
    ] = False,
    mock: Annotated[
        Path | None, Option(help="try: a folder of public rows, as a block would hold them")
    ] = None,
    guard: Annotated[
        Path | None, Option(help="try: a guard.toml, for its limits and its mock folder")
    ] = None,
    as_json: Annotated[bool, Option("--json", help="status: one JSON object")] = False,
    packages: Annotated[
        bool, Option("--packages", help="check: the installed packages, a line each")
    ] = False,
) -> int:
    """Does one action; 1 if `check` finds a wall that does not hold."""
    if where is None:
        return _overview(action)
    if str(where) in ACTIONS:
        raise ConfigError(f"the action comes first: discreet site {where} {action}")
    if action not in ACTIONS:
        raise ConfigError(f"there is no site {action}; there are {', '.join(ACTIONS)}")
    if action == "split":
        _check_split(id_column, blocks, out, unit)
        if not public_types:
            _check_types(where, id_column or "")
        data = where if encoding is None else CsvTable(where, encoding=encoding)
        return _split(data, Path(out or ""), id_column or "", blocks=blocks or 1, ids=ids)
    if action == "try":
        return _try(where, mock, guard)
    if action == "check":
        return _packages() if packages else _check(where)
    if action == "backup":
        return _backup(where, out)
    if action == "status":
        return _status(where, as_json=as_json)
    return _log(where)


def _overview(guard: str) -> int:
    from discreet.guard.site_journal import overview_lines

    if guard in ACTIONS:
        raise ConfigError(f"site {guard} needs WHERE: see discreet site --help")
    for line in overview_lines(read_guard(Path(guard))):
        print(line)
    return 0


def _packages() -> int:
    """Prints what an app's blocks find, in the form of a constraints file."""
    print(f"# Python {platform.python_version()}")
    installed = {each.metadata["Name"]: each.version for each in distributions()}
    for name in sorted(installed, key=str.casefold):
        print(f"{name}=={installed[name]}")
    return 0


def _check_split(id_column: str | None, blocks: int | None, out: Path | None, unit: str) -> None:
    """Raises ConfigError for options that do not go together."""
    if out is None:
        raise ConfigError("--out must be given: the folder of key and blocks")
    if unit == PATIENT and (not id_column or blocks is None):
        raise ConfigError("--id and --blocks must be given, and at least 2 blocks")
    if unit == PATIENT and blocks is not None and blocks < 2:
        raise ConfigError(f"--blocks must be at least 2 (got {blocks})")
    if unit == SITE and (id_column is not None or blocks is not None):
        raise ConfigError("--id and --blocks go without --unit site: all data are in one block")


def _check_types(data: Path, id_column: str) -> None:
    from discreet.guard.patient_blocks import check_types

    check_types(data, id_column)


@contextmanager
def _making(out: Path) -> Iterator[None]:
    """Raises ConfigError for an OSError that names the folder --out."""
    try:
        yield
    except OSError as error:
        if error.filename != str(out):
            raise
        raise ConfigError(f"--out {out} can't be made: {error.strerror}") from error


def _split(
    data: Path | CsvTable, out: Path, id_column: str, *, blocks: int, ids: str | None
) -> int:
    from discreet.guard.patient_blocks import split_site
    from discreet.guard.site_blocks import counted

    with _making(out):
        split = split_site(data, out, id_column=id_column, count=blocks, ids=ids)
    if id_column:
        whom = f"{split.patients} patients"
    else:
        whom = "all rows"
    kept = "Keep the folder to yourself: its key is secret"
    print(f"{out}: {whom} in {counted(split.count)}. {kept}")
    if split.count > split.patients:
        print(
            f"warning: there are more blocks than patients ({split.patients}); those without one "
            "count as zero in each mean: split the data anew, with fewer --blocks"
        )
    return 0


def _check(path: Path) -> int:
    from discreet.guard.sandbox import SandboxError
    from discreet.guard.site_records import site_lock

    policy = read_guard(path)
    with site_lock(policy):
        try:
            return _checked(path)
        except SandboxError as error:
            raise ConfigError(
                f"{path}: enclosure = {policy.enclosure!r} can't be put up on this machine "
                f"({error}): docs/guide/site.md says what each one needs"
            ) from error


def _checked(path: Path) -> int:
    from discreet.guard.conformance import checking
    from discreet.guard.guard_policy import KERNEL, ONE_BLOCK
    from discreet.guard.operating import broken_walls, started
    from discreet.guard.site_check import check_site
    from discreet.guard.site_report import statement_lines

    policy = check_site(path)
    print(f"{path}: policy, split and account are in order")
    for line in statement_lines(policy):
        print(f"  {line}")
    with started(checking(policy)) as sandbox:
        reached = broken_walls(sandbox)
        for each in reached:
            print(f"  a block reaches {each}")
        if not reached:
            print(f"  none of the tried ways out of {policy.enclosure} is open")
        told = _channels(sandbox)
        if policy.enclosure != KERNEL:
            print(f"  {sandbox.counting()}")
    refused = told and policy.any and policy.charge == ONE_BLOCK
    if refused:
        print('  any = true is refused: set charge = "all-blocks", or apps that somebody has read')
    print(f"  a reply comes {policy.round_seconds:g} s after its message, whatever happens")
    if reached or refused:
        return 1
    return 0


def _channels(sandbox: Sandbox) -> bool:
    """Tries and prints the channels between blocks; true if one is open."""
    from discreet.guard.conformance import channel_lines, told_channels, told_side_by_side

    turns = told_channels(sandbox)
    found = [*channel_lines("one after the other", turns)]
    if sandbox.policy.at_once > 1:
        beside = told_side_by_side(sandbox)
        found += channel_lines("side by side", beside)
    else:
        beside = {}
        found.append("blocks never run side by side here, so no channel between such was tried")
    for line in found:
        print(f"  {line}")
    return any(each.open for each in (*turns.values(), *beside.values()))


def _try(app: Path, mock: Path | None, guard: Path | None) -> int:
    from discreet.guard.site_records import printable
    from discreet.guard.trials import bundle_of, trial_policy, try_app
    from discreet.guard.zygote import DATA

    if guard is None:
        policy = None
    else:
        policy = read_guard(guard)
    folder = mock or (Path(policy.mock) if policy is not None and policy.mock else None)
    if folder is None:
        raise ConfigError("--mock must be given, or a guard.toml that names one")
    said, ended_well = try_app(app, folder, policy or trial_policy(folder))
    for line in COLOUR.sub("", said).splitlines():
        print(f"app: {printable(line)}")  # so that no line of an app is like one of this command
    if not ended_well:
        print(f"the app has failed, or took too long. It sees the files of {folder} in {DATA}")
        return 1
    digest = hashlib.sha256(bundle_of(app)).hexdigest()
    print(f"the digest of this bundle, for apps in guard.toml: {digest}")
    return 0


def _backup(path: Path, out: Path | None) -> int:
    from discreet.guard.site_backup import back_up

    if out is None:
        raise ConfigError("--out must be given: the folder of the backup")
    with _making(out):
        position = back_up(path, out).position()
    print(
        f"{out}: {position.rows} rows, head {position.head}. It holds the key: keep it as the site"
    )
    return 0


def _log(path: Path) -> int:
    from discreet.guard.site_journal import journal_lines

    lines = 0
    for line in journal_lines(read_guard(path)):
        print(line)
        lines += 1
    if not lines:
        print("no answers yet")
    return 0


def _status(path: Path, *, as_json: bool) -> int:
    from discreet.guard.site_guard import guard_ledger
    from discreet.guard.site_report import privacy_facts, spending_lines, statement_lines

    policy = read_guard(path)
    ledger = guard_ledger(policy)
    if as_json:
        print(json.dumps(json_ready(privacy_facts(policy, ledger))))
        return 0
    for line in (*statement_lines(policy), *spending_lines(policy, ledger)):
        print(line)
    return 0
