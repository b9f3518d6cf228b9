"""Run folders to tables and a page with pictures: `python -m scripts.report` is the way to it from a terminal."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from discreet.federated.run_folder import replace_file
from discreet.reporting.choosing import ChoiceCost, choice_costs
from discreet.reporting.drawing import Picture, alone
from discreet.reporting.page import page
from discreet.reporting.pictures import pictures_of
from discreet.reporting.records import RunRecord, find_runs, read_runs
from discreet.reporting.table import Table, runs_table, to_csv

REPORT_FILE = "report.html"


@dataclass(frozen=True, eq=False)
class Report:
    """Runs, and what is said of them."""

    records: tuple[RunRecord, ...]
    pictures: tuple[Picture, ...]
    costs: tuple[ChoiceCost, ...]

    @property
    def table(self) -> Table:
        """A row a run."""
        return runs_table(self.records)

    def write_page(self, path: Path, *, now: datetime | None = None) -> None:
        """One HTML file with everything in it."""
        replace_file(path, page(self.records, self.pictures, self.costs, now or datetime.now(UTC)).encode())

    def write_table(self, path: Path) -> None:
        """A CSV file."""
        replace_file(path, to_csv(self.table).encode())

    def write_pictures(self, folder: Path) -> list[Path]:
        """Each picture as an SVG file of its own, named by its title."""
        folder.mkdir(parents=True, exist_ok=True)
        paths = []
        for picture in self.pictures:
            name = "".join(letter if letter.isalnum() else "_" for letter in picture.title.lower())
            paths.append(folder / f"{name}.svg")
            replace_file(paths[-1], alone(picture).encode())
        return paths


def report_of(paths: Sequence[Path]) -> Report:
    """The report on the run folders among `paths` and below them.

    Raises:
      ConfigError: there is no such folder, no run in it, or none that has finished a round.
    """
    # An order that the RDP accountant can't use is left out and said on this logger; the bound holds without it.
    logging.getLogger("absl").setLevel(logging.ERROR)
    records = read_runs(find_runs(paths))
    return Report(tuple(records), tuple(pictures_of(records)), tuple(choice_costs(records)))


def write_run_report(folder: Path) -> Path:
    """`report.html` in a run folder, about that run; gives its path."""
    path = folder / REPORT_FILE
    report_of([folder]).write_page(path)
    return path
