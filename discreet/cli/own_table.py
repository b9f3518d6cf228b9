"""A table of your own, before the first run: `discreet data split|check FILE`.

split   splits FILE into train.csv and test.csv beside it, with all rows of an owner in one of the
        two. The test set is public: nobody in it is protected. Use people who have agreed to that
check   without a data.toml beside FILE, proposes one; --write writes it. It reads the data for
        that, and lists the values that must be replaced by public ones before a run. With a
        data.toml beside FILE, checks that all rows fit it, and prints the settings to use

examples:
  discreet data split data/hospital.csv --owner patient_id --test 0.2
  discreet data check data/train.csv --owner patient_id --target readmitted --write
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Option

from discreet.data.csv_table import CsvTable
from discreet.data.description import DESCRIPTION, read_description
from discreet.data.targets import FolderError
from discreet.tables.outside import cells_outside
from discreet.tables.owner_split import split_by_owner
from discreet.tables.proposal import propose


def command(
    action: Annotated[Literal["split", "check"], typer.Argument()],
    file: Annotated[Path, typer.Argument(metavar="FILE")],
    owner: Annotated[str | None, Option(metavar="COLUMN", help="whose each row is")] = None,
    target: Annotated[str | None, Option(metavar="COLUMN", help="check: what is predicted")] = None,
    test: Annotated[float, Option(metavar="SHARE", help="split: of all owners")] = 0.2,
    encoding: Annotated[
        str | None, Option(help="of FILE, if it is not UTF-8, such as cp1252")
    ] = None,
    separator: Annotated[
        str | None, Option(help="of FILE, if it is none of , ; | and a tab, such as ^")
    ] = None,
    write: Annotated[bool, Option("--write", help="check: write data.toml beside FILE")] = False,
) -> None:
    """Does one action."""
    if not file.is_file():
        raise FolderError(f"{file} is no file")
    if separator is not None and len(separator) != 1:
        raise FolderError(f"--separator must be one character (got {separator!r})")
    table = CsvTable(file, separator, encoding)
    description = file.parent / DESCRIPTION
    if action == "split":
        _split(table, owner, test)
    elif description.is_file():
        given = {
            "--owner": owner,
            "--target": target,
            "--encoding": encoding,
            "--separator": separator,
        }
        unread = [name for name, value in given.items() if value is not None]
        unread += ["--write"] * write
        if unread:
            print(f"{description} is there already and counts, not {', '.join(unread)}")
        _check(file)
    else:
        proposal = propose(table, target=target, owner=owner)
        print(proposal, end="")
        if write:
            description.write_text(proposal)
            print(f"\nwritten to {description}. No run starts until `unconfirmed` in it is empty.")


def _split(table: CsvTable, owner: str | None, share: float) -> None:
    parts = split_by_owner(table, owner=owner, share=share)
    for part in parts:
        print(f"{part.path}: {part.rows} rows" + (f" of {part.owners} owners" if owner else ""))
    print(f"{parts[1].path} is public from now on: nobody in it is protected")


def _check(file: Path) -> None:
    from discreet.data.folder import load_folder  # it imports PyTorch

    folder = file.parent
    description = read_description(folder)
    described = {
        Path(name).name for name in (description.file, description.test or "", DESCRIPTION)
    }
    if file.name not in described:
        raise FolderError(
            f"{folder / DESCRIPTION} describes {description.file}, not {file.name}: check that, or "
            f"move {file.name} to a folder of its own"
        )
    task = load_folder(str(folder))
    width = ", ".join(map(str, task.shape.input_shape))
    print(
        f"{folder / DESCRIPTION} fits: {len(task.train)} rows, inputs of shape ({width}), "
        f"{len(task.test)} to test"
    )
    for name, count in cells_outside(folder, description).items():
        print(
            f"{name}: {count} cells are outside low..high, and count as the nearer end. "
            "If they are codes for empty cells, such as -9, empty them in the table"
        )
    start = f"discreet simulate experiment=table data.path={folder}"
    if task.owners is not None:
        owners = int(task.owners.max()) + 1
        print(f"{owners} owners ({description.owner}), each of whom becomes a client. Start with:")
        print(f"  {start} data.num_clients={owners}")
    elif description.columns:
        print(
            "No owner is named: each row becomes a client, and is protected alone. If a person has "
            "several rows, name the column of persons as owner. Start with:"
        )
        print(f"  {start} data.partition=iid data.num_clients={len(task.train)}")
