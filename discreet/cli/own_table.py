"""A table of your own, before the first run: `discreet data split|check|share|adopt FILE`.

split   splits FILE into train.csv and test.csv beside it (or .jsonl, .parquet, .npz, as FILE is),
        with all rows of an owner in one of the two. The test set is public: nobody in it is
        protected. Use people who have agreed to that
check   without a data.toml beside FILE, proposes one; --write writes it. It reads the data for
        that, and lists the values that must be replaced by public ones before a run. --event is
        the column that says whether an event ended the time in --target. With a
        data.toml beside FILE, checks that all rows fit it, counts what can't be read by column,
        and prints hints and the settings to use; --write adds columns that were left out and can
        be described now that their cells are corrected
share   FILE is a table with a data.toml beside it: prints the description that all sites of a run
        use. A node whose table is described otherwise refuses the run
adopt   FILE is such a description: proposes the data.toml of this site's --table, with its own
        names, words and units; --write writes it. It lists all that does not fit

examples:
  discreet data split data/hospital.csv --owner patient_id --test 0.2
  discreet data check data/train.csv --owner patient_id --target readmitted --write
  discreet data share data/train.csv > shared.toml
  discreet data adopt shared.toml --table data/train.csv --owner Patient --write \\
      --named sex=Geschlecht --words readmitted:ja=yes --factor creatinine=0.0113
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Option

from discreet.data.csv_table import CsvTable
from discreet.data.description import (
    DESCRIPTION,
    TABLES,
    DataDescription,
    read_description,
)
from discreet.data.targets import FolderError
from discreet.run_files.whole_files import replace_file
from discreet.settings.foreign_files import read_text
from discreet.tables.header import header_hint
from discreet.tables.owner_split import split_by_owner
from discreet.tables.proposal import propose
from discreet.tables.rows_by_person import form_of
from discreet.tables.shared_description import Writing, adopted_text, read_shared, shared_text


def command(
    action: Annotated[Literal["split", "check", "share", "adopt"], typer.Argument()],
    file: Annotated[Path, typer.Argument(metavar="FILE")],
    owner: Annotated[str | None, Option(metavar="COLUMN", help="whose each row is")] = None,
    target: Annotated[str | None, Option(metavar="COLUMN", help="check: what is predicted")] = None,
    event: Annotated[
        str | None,
        Option(metavar="COLUMN", help="check: whether an event ended the time in --target"),
    ] = None,
    test: Annotated[float, Option(metavar="SHARE", help="split: of all owners")] = 0.2,
    encoding: Annotated[
        str | None, Option(help="of FILE, if it is not UTF-8, such as cp1252")
    ] = None,
    separator: Annotated[
        str | None, Option(help="of FILE, if it is none of , ; | and a tab, such as ^")
    ] = None,
    ids: Annotated[
        Literal["exact", "folded"] | None,
        Option(help="split, check: whether spellings that differ by case or zeros are one person"),
    ] = None,
    write: Annotated[
        bool, Option("--write", help="check, adopt: write data.toml beside the table")
    ] = False,
    table: Annotated[Path | None, Option(help="adopt: this site's table")] = None,
    named: Annotated[
        list[str] | None, Option(metavar="NAME=COLUMN", help="adopt: this site's name of a column")
    ] = None,
    words: Annotated[
        list[str] | None,
        Option(metavar="NAME:WORD=LEVEL", help="adopt: this site's word for a level or class"),
    ] = None,
    factor: Annotated[
        list[str] | None,
        Option(metavar="NAME=NUMBER", help="adopt: to the shared unit, a cell times NUMBER"),
    ] = None,
) -> None:
    """Does one action."""
    if not file.is_file():
        raise FolderError(f"{file} is no file")
    if separator is not None and len(separator) != 1:
        raise FolderError(f"--separator must be one character (got {separator!r})")
    if action == "share":
        print(shared_text(read_description(file.parent)), end="")
        return
    if action == "adopt":
        if table is None or not table.is_file():
            raise FolderError("--table must name this site's CSV file")
        own = CsvTable(table, separator, encoding)
        writing = Writing(_given(named), _words(words), _numbers(factor))
        _tell(adopted_text(read_shared(file), own, owner=owner, writing=writing), own, write)
        return
    given_table = CsvTable(file, separator, encoding)
    description = file.parent / DESCRIPTION
    if form_of(file) == "csv" and (hint := header_hint(given_table)) is not None:
        print(f"# {hint}")
    if action == "split":
        _split(given_table, owner, test, ids)
    elif description.is_file():
        given = {
            "--owner": owner,
            "--target": target,
            "--event": event,
            "--encoding": encoding,
            "--separator": separator,
            "--ids": ids,
        }
        unread = [name for name, value in given.items() if value is not None]
        if unread:
            print(f"{description} is there already and counts, not {', '.join(unread)}")
        _check(file, write)
    else:
        proposal = propose(given_table, target=target, owner=owner, ids=ids, event=event)
        print(proposal, end="")
        if write:
            replace_file(description, proposal.encode())
            print(f"\nwritten to {description}. No run starts until `unconfirmed` in it is empty.")


def _tell(text: str, table: CsvTable, write: bool) -> None:
    print(text, end="")
    if write:
        path = table.path.with_name(DESCRIPTION)
        if path.exists():
            raise FolderError(f"{path} is there already: move it away, and adopt once more")
        replace_file(path, text.encode())
        print(f"\nwritten to {path}. Check it: discreet data check {table.path}")


def _given(pairs: list[str] | None) -> dict[str, str]:
    """NAME=VALUE options."""
    found: dict[str, str] = {}
    for pair in pairs or ():
        name, equals, value = pair.partition("=")
        if not (name and equals and value):
            raise FolderError(f"write NAME=VALUE, not {pair!r}")
        if name in found:
            raise FolderError(f"{name} is given twice, as {found[name]} and as {value}")
        found[name] = value
    return found


def _words(given: list[str] | None) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for name, level in _given(given).items():
        column, colon, word = name.partition(":")
        if not (column and colon and word):
            raise FolderError(f"--words takes NAME:WORD=LEVEL, not {name}={level}")
        found.setdefault(column, {})[word] = level
    return found


def _numbers(given: list[str] | None) -> dict[str, float]:
    try:
        return {name: float(value) for name, value in _given(given).items()}
    except ValueError as error:
        raise FolderError("--factor takes NAME=NUMBER, such as dose=0.001") from error


def _split(table: CsvTable, owner: str | None, share: float, ids: str | None) -> None:
    parts = split_by_owner(table, owner=owner, share=share, ids=ids)
    for part in parts:
        print(f"{part.path}: {part.rows} rows" + (f" of {part.owners} owners" if owner else ""))
    print(f"{parts[1].path} is public from now on: nobody in it is protected")


def _check(file: Path, write: bool) -> None:
    from discreet.data.folder import load_folder  # it imports PyTorch
    from discreet.tables.target_counts import untested_classes

    folder = file.parent
    _say_cells(file, write)
    description = read_description(folder)
    task = load_folder(str(folder))
    width = ", ".join(map(str, task.shape.input_shape))
    print(
        f"{folder / DESCRIPTION} fits: {len(task.train)} rows, inputs of shape ({width}), "
        f"{len(task.test)} to test"
    )
    for line in untested_classes(task, description):
        print(line)
    start = f"discreet simulate experiment=table data.path={folder}"
    if not len(task.test):
        start += " evaluation.kind=none"
        print(
            "There is no test set, so no round is rated: `discreet data split` makes a public one, "
            "and with evaluation.kind=private clients rate the model"
        )
    if task.owners is not None:
        owners = len(set(task.owners.tolist()))
        print(f"{owners} owners ({description.owner}), each of whom becomes a client. Start with:")
        print(f"  {start} data.num_clients={owners}")
    elif description.columns:
        print(
            "No owner is named: each row becomes a client, and is protected alone. If a person has "
            "several rows, name the column of persons as owner. Start with:"
        )
        print(f"  {start} data.partition=iid data.num_clients={len(task.train)}")


def _say_cells(file: Path, write: bool) -> None:
    """Prints what can't be read, or is read as something else, of each column; hints; and columns
    that can be described now, which are written on request."""
    from discreet.data.table_files import file_in
    from discreet.tables.cell_counts import cell_counts, readings_of
    from discreet.tables.completion import completed
    from discreet.tables.hints import hints

    folder = file.parent
    path = folder / DESCRIPTION
    description = read_description(folder, confirmed=False)
    described = {
        Path(name).name for name in (description.file, description.test or "", DESCRIPTION)
    }
    if file.name not in described:
        raise FolderError(
            f"{path} describes {description.file}, not {file.name}: check that, or "
            f"move {file.name} to a folder of its own"
        )
    if description.format not in TABLES:
        return
    found, table = _opened(file_in(folder, description.file), description)
    _say_target(description, found, table)
    if table is None:
        return
    if not description.columns:
        found = table.columns(as_text=True)
    cells = {name: column.to_pylist() for name, column in found.items()}
    text, names = completed(read_text(path, FolderError), table, cells, description.marks)
    if names and write:
        replace_file(path, text.encode())
        print(f"{path} now describes {', '.join(names)}, which are unconfirmed")
    elif names:
        print(f"{', '.join(names)}: can be described now. --write adds them to {path}")
    if not description.columns:
        return
    readings = readings_of(cells, description)
    counts = cell_counts(readings, description)
    for each in counts:
        for line in each.lines(table.place_of):
            print(line)
    if not any(each.wrong for each in counts):
        for hint in hints(description, cells, readings, table.place_of):
            print(hint)


def _opened(path: Path, description: DataDescription) -> tuple[Mapping[str, Any], CsvTable | None]:
    """The columns of a table, and the table itself if it is CSV. FolderError: one is missing."""
    from discreet.data.folder import csv_table, opened
    from discreet.tables.header import require_described

    found = opened(path, description)
    require_described(path, found, description)
    if description.format == "csv":
        return found, csv_table(path, description)
    return found, None


def _say_target(
    description: DataDescription, found: Mapping[str, Any], table: CsvTable | None
) -> None:
    """Prints what is to be said of the target, unless it is a sequence."""
    from discreet.tables.target_counts import target_counts

    if description.padding is not None:
        return
    place_of = "row {}".format if table is None else table.place_of
    targets = {name: found[name].to_pylist() for name in description.target_names}
    for line in target_counts(description, targets, place_of):
        print(line)
