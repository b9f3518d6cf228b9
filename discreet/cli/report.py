"""Shows runs as a table, and writes a page with pictures of them.

PATH is a run folder, or a folder that holds run folders. The page, report.html, goes into the
folder of a single run, or into the first PATH if there are several runs. Without a PATH it is about
the newest run under outputs/.

examples:
  discreet report
  discreet report outputs/first
  discreet report multirun --csv runs.csv --pictures pictures
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from discreet.cli.console import print_table
from discreet.reporting.page import REPORT_FILE, report_of
from discreet.reporting.records import find_runs, repetitions_table, split_same
from discreet.run_files.csv_text import csv_text
from discreet.run_files.whole_files import replace_file
from discreet.settings.rules import ConfigError


def command(
    paths: Annotated[list[Path] | None, typer.Argument(metavar="PATH ...")] = None,
    csv: Annotated[Path | None, Option(metavar="FILE", help="write the table there too")] = None,
    pictures: Annotated[
        Path | None, Option(metavar="FOLDER", help="write each picture as SVG there too")
    ] = None,
) -> None:
    """Prints the table and the cost of selection, and writes the page. A cell that is the same in
    every run is printed once."""
    paths = paths or [
        max(find_runs([Path("outputs")]), key=lambda folder: (folder / "ledger.db").stat().st_mtime)
    ]
    report = report_of(paths)
    html = (report.records[0].path if len(report.records) == 1 else paths[0]) / REPORT_FILE
    with _written("the page", html, "a copy of the run in a folder of yours"):
        report.write_page(html)
    if csv:
        text = csv_text([report.rows[0], *(row.values() for row in report.rows)])
        with _written("--csv", csv, "a file in a folder that is there"):
            replace_file(csv, text.encode())
    if pictures:
        with _written("--pictures", pictures, "a folder, which is made if it is not there"):
            report.write_pictures(pictures)
    same, rows = split_same(report.rows)
    print_table(rows)
    print(*(f"{name} {cell or '-'}" for name, cell in same.items()), sep=", ")
    if any(record.config.seed is not None for record in report.records):
        print("noise that was drawn from a seed can be drawn again: it protects nobody")
    print_table(repetitions_table(report.records))
    print(*report.costs, f"report: {html.resolve()}", sep="\n")


@contextmanager
def _written(option: str, path: Path, wanted: str) -> Iterator[None]:
    """Raises ConfigError with the option, its path and what it should be if the block can't write
    there."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise ConfigError(f"{option}: {path} can't be written ({reason}): name {wanted}") from error
