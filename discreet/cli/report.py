"""Shows runs as a table, and writes a page with pictures of them.

PATH is a run folder, or a folder that holds run folders. The page, report.html, goes into the folder of a single run,
or into the first PATH if there are several runs. Without a PATH it is about the newest run under outputs/.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table as RichTable

from discreet.config import ConfigError
from discreet.federated.durable_ledger import LedgerError
from discreet.reporting.page import REPORT_FILE, Report, report_of
from discreet.reporting.records import find_runs
from discreet.reporting.spending import ChoiceCost
from discreet.reporting.table import Table, repetitions_table, swept_line

EXAMPLES = """examples:
  discreet report
  discreet report outputs/first
  discreet report multirun --csv runs.csv --pictures pictures
"""
OUTPUTS = Path("outputs")
WIDE = 240  # columns of a table that goes into a file or a pipe


def newest_run(outputs: Path) -> Path:
    """The run folder below `outputs` that was written to last; a ConfigError if there is none."""
    return max(find_runs([outputs]), key=lambda folder: (folder / "ledger.db").stat().st_mtime)


def show(report: Report, console: Console) -> None:
    """Prints the table and the cost of choosing; what is the same in every run is printed once."""
    table = report.table
    same = table.same or dict(zip(table.columns, table.rows[0], strict=True))
    left = _show_runs(report, table.without(same), console) if len(table.rows) > 1 else []
    repetitions = repetitions_table(report.records)
    if repetitions:
        console.print(_rich(repetitions))
    words = [f"{column} {value or '-'}" for column, value in same.items()]
    console.print(", ".join(words), soft_wrap=True, highlight=False)
    if left:
        console.print(f"too wide to show: {', '.join(left)} (--csv FILE writes all)", soft_wrap=True)
    if any(record.protects_nobody for record in report.records):
        console.print("noise that was drawn from a seed can be drawn again: it protects nobody", soft_wrap=True)
    for cost in report.costs:
        console.print(choice_line(cost), soft_wrap=True, highlight=False)


def _show_runs(report: Report, table: Table, console: Console) -> list[str]:
    """Prints the columns that fit and what their short names stand for; gives the names of those that do not fit."""
    fitting, left = table.fitting(console.width)
    console.print(_rich(fitting))
    swept = swept_line(report.records)
    if swept:
        console.print(f"the runs differ in: {swept}", soft_wrap=True, highlight=False)
    return left


def choice_line(cost: ChoiceCost) -> str:
    """What it costs to publish the best of the runs, in one line."""
    drawn = "; ".join(f"{name} {value:.4g}" for name, value in cost.drawn.items())
    if_drawn = f"if their number had been drawn at random: {drawn}" if drawn else cost.why_not
    all_runs = "not stated" if cost.all_runs is None else f"{cost.all_runs:.4g}"
    one = "one" if cost.all_runs != math.inf else "the dearest of the others"
    return (
        f"{cost.guarantee}-level, choosing the best: epsilon {all_runs} for all {cost.num_runs} runs, "
        f"{cost.one_run:.4g} for {one} (rdp, delta {cost.delta:g}); {if_drawn}"
    )


def _rich(table: Table) -> RichTable:
    drawn = RichTable(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(table.columns):
        # Only the name of the run or the setting is folded; numbers stay whole.
        drawn.add_column(column, overflow="fold", no_wrap=number > 0)
    for row in table.rows:
        drawn.add_row(*row)
    return drawn


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="discreet report",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("paths", nargs="*", type=Path, metavar="PATH", help="a run folder, or a folder above some")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the page there")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the table there too")
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="write each picture as SVG there too")
    return parser


def main(words: Sequence[str]) -> int:
    """Writes and shows; 2 if a path holds no run."""
    arguments = _parser().parse_args(words)
    try:
        paths = arguments.paths or [newest_run(OUTPUTS)]
        report = report_of(paths)
        html = arguments.html or (report.records[0].path if len(report.records) == 1 else paths[0]) / REPORT_FILE
        report.write_page(html)
        if arguments.csv:
            report.write_table(arguments.csv)
        if arguments.pictures:
            report.write_pictures(arguments.pictures)
    except (ConfigError, LedgerError, OSError) as error:
        print(f"discreet: {error}", file=sys.stderr)
        return 2
    show(report, Console() if sys.stdout.isatty() else Console(width=WIDE))
    print(f"report: {html.resolve()}")
    return 0
