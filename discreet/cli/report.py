"""Shows runs as a table, and writes a page with pictures of them.

PATH is a run folder, or a folder that holds run folders. The page, report.html, goes into the folder of a single run,
or into the first PATH if there are several runs. Without a PATH it is about the newest run under outputs/.

examples:
  discreet report
  discreet report outputs/first
  discreet report multirun --csv runs.csv --pictures pictures
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table as RichTable

from discreet.reporting.page import REPORT_FILE, Report, report_of
from discreet.reporting.records import find_runs
from discreet.reporting.table import Table, repetitions_table, swept_line

OUTPUTS = Path("outputs")
WIDE = 240  # columns of a table that goes into a file or a pipe


def command(
    paths: Annotated[list[Path] | None, typer.Argument(metavar="PATH ...")] = None,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="write the page there")] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="write the table there too")] = None,
    pictures: Annotated[Path | None, typer.Option(metavar="FOLDER", help="write each picture as SVG there too")] = None,
) -> None:
    """Writes and shows."""
    paths = paths or [max(find_runs([OUTPUTS]), key=lambda folder: (folder / "ledger.db").stat().st_mtime)]
    report = report_of(paths)
    html = html or (report.records[0].path if len(report.records) == 1 else paths[0]) / REPORT_FILE
    report.write_page(html)
    if csv:
        report.write_table(csv)
    if pictures:
        report.write_pictures(pictures)
    show(report, Console() if sys.stdout.isatty() else Console(width=WIDE))
    print(f"report: {html.resolve()}")


def show(report: Report, console: Console) -> None:
    """Prints the table and the cost of choosing; what is the same in every run is printed once."""
    table, lines = report.table, []
    same = table.same or dict(zip(table.columns, table.rows[0], strict=True))
    lines.append(", ".join(f"{column} {value or '-'}" for column, value in same.items()))
    if len(table.rows) > 1:
        fitting, left = table.without(same).fitting(console.width)
        console.print(_rich(fitting))
        if swept := swept_line(report.records):
            lines.insert(0, f"the runs differ in: {swept}")
        if left:
            lines.append(f"too wide to show: {', '.join(left)} (--csv FILE writes all)")
    if any(record.protects_nobody for record in report.records):
        lines.append("noise that was drawn from a seed can be drawn again: it protects nobody")
    if repetitions := repetitions_table(report.records):
        console.print(_rich(repetitions))
    for line in (*lines, *map(str, report.costs)):
        console.print(line, soft_wrap=True, highlight=False)


def _rich(table: Table) -> RichTable:
    drawn = RichTable(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(table.columns):
        # Only the name of the run or the setting is folded; numbers stay whole.
        drawn.add_column(column, overflow="fold", no_wrap=number > 0)
    for row in table.rows:
        drawn.add_row(*row)
    return drawn
