"""A report on run folders: rows of a table, pictures, one HTML page. The command is `discreet
report`."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from discreet.mechanisms.mechanism import Statement
from discreet.reporting.pictures import pictures_of
from discreet.reporting.records import (
    Row,
    RunRecord,
    find_runs,
    intervals_table,
    ratings_table,
    repetitions_table,
    runs_and_spenders,
    runs_table,
    split_same,
)
from discreet.reporting.spending import (
    choice_costs,
    ratings_cost,
    spent_by_data_owner,
    worst_epsilons,
)
from discreet.reporting.svg_style import DARK, Picture, on_page
from discreet.run_files.shapes import moved_words
from discreet.run_files.whole_files import replace_file
from discreet.settings.adjacency import USER
from discreet.settings.training import FLOWER_APP

REPORT_FILE = "report.html"


@dataclass(frozen=True, eq=False)
class Report:
    """Runs with a table row for each, their pictures, and sentences on the cost of selecting among
    them."""

    records: Sequence[RunRecord]
    rows: Sequence[Row]
    pictures: Sequence[Picture]
    costs: Sequence[str]

    def write_page(self, path: Path) -> None:
        """Writes one self-contained HTML file."""
        loader = FileSystemLoader(Path(__file__).parent)
        jinja = Environment(
            loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True
        )
        if len(self.records) == 1:
            single = self.records[0]
        else:
            single = None
        same, rows = split_same(self.rows)
        text = jinja.get_template(f"{REPORT_FILE}.j2").render(
            title=_title(self.records),
            now=datetime.now(UTC),
            records=self.records,
            warnings=list(_warnings(self.records)),
            same=same,
            rows=rows,
            repetitions=repetitions_table(self.records),
            scores=intervals_table(single) if single else [],
            ratings=ratings_table(single) if single else [],
            ratings_cost=list(ratings_cost(single)) if single and single.ratings else [],
            cards=list(_cards(self.records)),
            pictures=[replace(each, svg=on_page(each.svg)) for each in self.pictures],
            dark=DARK,
            costs=self.costs,
        )
        replace_file(path, text.encode())

    def write_pictures(self, folder: Path) -> None:
        """Writes each picture as an SVG file, named by its title."""
        folder.mkdir(parents=True, exist_ok=True)
        for picture in self.pictures:
            name = "".join(letter if letter.isalnum() else "_" for letter in picture.title.lower())
            replace_file(folder / f"{name}.svg", picture.svg.encode())


def report_of(paths: Sequence[Path]) -> Report:
    """The report on the run folders among `paths` and below them. Raises ConfigError: there is no
    such folder, no run in it, or none that has finished a round."""
    # dp_accounting warns on this logger when it skips an order of RDP. The bound holds without it.
    logging.getLogger("absl").setLevel(logging.ERROR)
    records, others = runs_and_spenders(find_runs(paths))
    costs = choice_costs(records, others)
    return Report(records, runs_table(records), pictures_of(records), costs)


def _title(records: Sequence[RunRecord]) -> str:
    data = sorted({record.config.data.name for record in records})
    models = sorted({record.config.model.name for record in records})
    if len(records) == 1:
        name = records[0].name
    else:
        name = f"{len(records)} runs"
    if models == [FLOWER_APP]:
        return f"{name}: a Flower app"
    return f"{name}: {', '.join(models)} on {', '.join(data)}"


def _warnings(records: Sequence[RunRecord]) -> Iterator[str]:
    number = len(records)
    if number == 1:
        of_all = "this run"
    else:
        of_all = f"{{}} of {number} runs"
    private = [record for record in records if record.plan.is_private]
    if seeded := sum(record.config.seed is not None for record in private):
        yield (
            f"The noise of {of_all.format(seeded)} was drawn from a seed and can be drawn "
            "again: it protects nobody, whatever epsilon says. Epsilon is what the same run "
            "would cost with secure randomness."
        )
    if bare := number - len(private):
        verb, not_private = ("has", "it is") if bare == 1 else ("have", "they are")
        said = f"{of_all.format(bare)} {verb} no guarantee at all: {not_private} not private."
        yield said[0].upper() + said[1:]
    if running := sum(record.privacy is None for record in records):
        said = f"{of_all.format(running)} had not ended when this was written."
        yield said[0].upper() + said[1:]
    if number == 1:
        yield from _about_the_model(records[0])
    elif weak := [record.name for record in records if record.no_better]:
        yield (
            f"{len(weak)} of {number} models {'does' if len(weak) == 1 else 'do'} not beat a "
            f"constant guess on the public test set: {', '.join(weak)}."
        )


def _about_the_model(record: RunRecord) -> Iterator[str]:
    if record.no_better:
        yield f"The model: {record.no_better}."
    if record.is_best_round:
        yield (
            f"The model is that of round {record.model_round}, which has the lowest loss of "
            f"{len(record.rounds)} on the public test set. This flatters its scores there; the "
            "choice costs no epsilon."
        )
    shapes = (record.shapes or {"shapes": []})["shapes"]
    moved = " ".join(filter(None, map(moved_words, shapes)))
    if moved:
        yield f"{moved} The scores of rounds are those of the models before that."
    if stopped := (record.privacy or {}).get("stopped"):
        yield f"The run was stopped: {stopped}."


def _cards(records: Sequence[RunRecord]) -> Iterator[dict[str, object]]:
    """A card for each distinct guarantee of the runs, including those that are off; `facts` is
    empty for these."""
    distinct: dict[tuple[str, ...], list[tuple[Statement, RunRecord]]] = {}
    for level in range(len(records[0].guarantees)):
        for record in records:
            each = record.guarantees[level]
            if each.enabled:
                words = [each.unit, each.adjacency, each.trusted]
            else:
                words = []
            distinct.setdefault((each.name, *words), []).append((each, record))
    for (name, *words), pairs in distinct.items():
        if len(pairs) == len(records):
            some = ""
        else:
            some = f" ({len(pairs)} of {len(records)} runs)"
        if words:
            facts = [("epsilon", _epsilon_words(name, [record for _, record in pairs]))]
        else:
            facts = []
        facts += [
            ("all runs", said)
            for said in _account_words([record for _, record in pairs])
            if name == USER
        ]
        facts += zip(("protects", "adjacency", "trusted"), words, strict=False)
        mechanisms = list(dict.fromkeys(each.mechanism for each, _ in pairs))
        gaps = [gap for each, _ in pairs for gap in each.not_covered]
        folded = [
            ("mechanism", "; or ".join(mechanisms)),
            ("not covered", "; ".join(dict.fromkeys(gaps))),
        ]
        yield {"title": f"{name}-level{some}", "facts": facts, "more": folded}


def _account_words(records: Sequence[RunRecord]) -> Iterator[str]:
    """The spending of each population with an account, at the end of the last run that charged
    it."""
    accounts = [account for record in records if (account := (record.privacy or {}).get("account"))]
    last = {
        account["population"]["name"]: account
        for account in sorted(accounts, key=lambda each: each["releases"])
    }
    for name, account in last.items():
        delta = account["population"]["delta"]
        yield (
            f"on {name}, {account['runs']} of them, at delta {delta:g}: {_each(account['epsilon'])}"
        )


def _epsilon_words(guarantee: str, records: Sequence[RunRecord]) -> str:
    deltas = ", ".join(sorted({f"{each.config.privacy.delta:g}" for each in records}))
    if len(records) > 1:
        values = [record.epsilon(guarantee) for record in records]
        ends = dict.fromkeys((f"{min(values):.4g}", f"{max(values):.4g}"))
        return f"{' to '.join(ends)} at delta {deltas}"
    privacy = records[0].config.privacy
    found = worst_epsilons(spent_by_data_owner(records[0], guarantee), privacy.delta)
    return (
        f"at delta {deltas}: {_each(found or {privacy.accountant: records[0].epsilon(guarantee)})}"
    )


def _each(found: Mapping[str, float]) -> str:
    return "; ".join(f"{value:.4g} ({name})" for name, value in found.items())
