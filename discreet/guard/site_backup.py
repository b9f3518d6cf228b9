"""A backup of a site: its split with the key, its records, account and guard.toml, in one folder
that is there whole or not at all.

It can be made while the guard runs, under Landlock between its rounds. The account is copied last,
so that it says no less than the journal. What a site has spent since then is not in the copy: where
it is put back, the guard does not start with it unless somebody adopts it, and never on a machine
that has charged more.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from discreet.guard.guard_policy import read_guard
from discreet.guard.site_blocks import BLOCKS, KEY, SPLIT, read_blocks
from discreet.guard.site_records import CLOSED, open_after_crash, records_of
from discreet.ledger.durable_ledger import DurableLedger
from discreet.run_files.ledger_copy import copy_ledger
from discreet.run_files.whole_files import new_folder
from discreet.settings.rules import ConfigError


def back_up(path: Path, folder: Path) -> DurableLedger:
    """Copies what a guard.toml names into a new folder, for this user alone, under the names that
    it has there. Returns the copy of the account.

    Raises:
      ConfigError: there is such a folder, a block differs from the one that was split, or blocks
        are closed while they run.
      LedgerError: the account is damaged or missing.
    """
    policy = read_guard(path)
    site = Path(policy.blocks.folder)
    if folder.exists():
        raise ConfigError(f"{folder} exists already: a backup is a new folder")
    records = records_of(policy)
    open_after_crash(policy, [site, records])
    try:
        read_blocks(site, id_column=policy.blocks.id, count=policy.blocks.count)
        with new_folder(folder, mode=0o700) as made:
            shutil.copyfile(path, made / path.name)
            copied = made / site.name
            copied.mkdir(mode=0o700)
            for name in (KEY, SPLIT):
                shutil.copy(site / name, copied / name)
            _copy_files(site / BLOCKS, copied / BLOCKS)
            _copy_files(records, made / records.name)
            copy_ledger(Path(policy.ledger), made / Path(policy.ledger).name)
    except PermissionError as error:
        raise ConfigError(CLOSED.format(site)) from error
    return DurableLedger(folder / Path(policy.ledger).name)


def _copy_files(folder: Path, copy: Path) -> None:
    """Copies the files of a folder, if there is one. PermissionError: it is closed now."""
    copy.mkdir(mode=0o700)
    if folder.exists():
        for path in sorted(folder.iterdir()):
            if path.is_file():
                shutil.copy(path, copy / path.name)
