"""The report as one HTML file: no script, nothing fetched, readable in light and dark and on a phone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape

from discreet.federated.guarantees import Guarantee
from discreet.reporting.choosing import ChoiceCost
from discreet.reporting.drawing import THEMES, Picture, series_variable, sign
from discreet.reporting.epsilons import epsilons, spent_by_holder, worst_holder
from discreet.reporting.records import RunRecord
from discreet.reporting.table import Table, repetitions_table, runs_table, swept_line

_STYLE = """
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 84rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0.5rem 0; } h2 { font-size: 1.2rem; margin: 2rem 0 0.5rem; }
h3, figcaption strong { font-size: 1rem; margin: 0 0 0.25rem; } main > h3 { margin-top: 1.25rem; }
p, li { max-width: 46rem; } .muted, figcaption p { color: var(--muted); font-size: 0.875rem; margin: 0.25rem 0; }
.scroll { overflow: auto; max-height: 32rem; border: 1px solid var(--grid); border-radius: 0.4rem; }
table { border-collapse: collapse; font-size: 0.875rem; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: 0.3rem 0.6rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--grid); }
td { white-space: nowrap; } td.words { white-space: normal; min-width: 11rem; } tr:last-child td { border-bottom: 0; }
th { color: var(--muted); font-weight: 600; white-space: nowrap; }
thead th { position: sticky; top: 0; background: var(--paper); }
td:first-child, th:first-child { position: sticky; left: 0; background: var(--paper); }
summary { cursor: pointer; color: var(--muted); font-size: 0.875rem; margin: 0.5rem 0; }
div.legend { max-height: 12rem; padding: 0 0.5rem; margin-bottom: 1rem; }
.pictures { display: grid; gap: 1rem; align-items: start;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 25rem), 1fr)); }
figure { margin: 0; padding: 0.75rem; border: 1px solid var(--grid); border-radius: 0.4rem; min-width: 0; }
figure svg { display: block; width: 100%; height: auto; }
ul.legend { list-style: none; margin: 0.25rem 0; padding: 0; display: flex; flex-wrap: wrap; gap: 0.1rem 1rem;
  font-size: 0.8125rem; }
ul.legend li { padding-left: 1.2em; text-indent: -1.2em; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.25rem 0.75rem; margin: 0; font-size: 0.875rem; }
dt { color: var(--muted); } dd { margin: 0; }
dl.facts { display: flex; flex-wrap: wrap; gap: 0.5rem 1.5rem; }
.warning { border-left: 0.25rem solid var(--series-1); padding-left: 0.75rem; }
"""

MOST_MECHANISMS = 3  # written out in a card
MOST_SHOWN = 6  # pictures; the others are folded


def page(records: Sequence[RunRecord], pictures: Sequence[Picture], costs: Sequence[ChoiceCost], now: datetime) -> str:
    """The whole page."""
    parts = [
        f"<h1>{escape(_title(records))}</h1>",
        f'<p class="muted">{len(records)} run{"s" * (len(records) > 1)}; written {now:%Y-%m-%d %H:%M} UTC</p>',
        _warnings(records),
        "<h2>Result</h2>" if len(records) == 1 else "<h2>Runs</h2>",
        _runs(records),
        _repetitions(records),
        "<h2>What is protected</h2>",
        _protection(records),
        "<h2>Pictures</h2>",
        _pictures(pictures),
        _choosing(records, costs),
        _settings(records) if len(records) == 1 else "",
    ]
    head = (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(_title(records))}</title><style>{THEMES}{_STYLE}</style></head>"
    )
    return f"{head}<body><main>{''.join(parts)}</main></body></html>\n"


def _title(records: Sequence[RunRecord]) -> str:
    data = sorted({record.config.data.name for record in records})
    models = sorted({record.config.model.name for record in records})
    what = f"{', '.join(models)} on {', '.join(data)}"
    return f"{records[0].name}: {what}" if len(records) == 1 else f"{len(records)} runs: {what}"


def _warnings(records: Sequence[RunRecord]) -> str:
    seeded = [record for record in records if record.protects_nobody]
    running = [record for record in records if record.privacy is None]
    lines = []
    if seeded:
        lines.append(
            f"The noise of {_how_many(seeded, records)} was drawn from a seed and can be drawn again: it protects "
            "nobody, whatever epsilon says. Epsilon is what the same run would cost with secure randomness."
        )
    if running:
        lines.append(f"{_how_many(running, records)} had not ended when this was written.".capitalize())
    return "".join(f'<p class="warning">{escape(line)}</p>' for line in lines)


def _how_many(some: Sequence[RunRecord], records: Sequence[RunRecord]) -> str:
    if len(some) == len(records):
        return "this run" if len(records) == 1 else "every run here"
    return f"{len(some)} of the {len(records)} runs"


def _protection(records: Sequence[RunRecord]) -> str:
    """A card for each distinct guarantee of the runs, those that are off included."""
    cards: dict[tuple[object, ...], list[tuple[Guarantee, RunRecord]]] = {}
    for level in range(len(records[0].guarantees)):
        for record in records:
            guarantee = record.guarantees[level]
            words = (guarantee.unit, guarantee.adjacency, guarantee.trusted) if guarantee.enabled else ()
            cards.setdefault((guarantee.name, *words), []).append((guarantee, record))
    return '<div class="pictures">' + "".join(_card(pairs, len(records)) for pairs in cards.values()) + "</div>"


def _card(pairs: Sequence[tuple[Guarantee, RunRecord]], num_runs: int) -> str:
    guarantee, members = pairs[0][0], [record for _, record in pairs]
    some = "" if len(pairs) == num_runs else f" ({len(pairs)} of {num_runs} runs)"
    if not guarantee.enabled:
        return f"<figure><h3>{guarantee.name}-level{some}</h3>none (epsilon = inf)</figure>"
    rows = {
        "epsilon": _epsilon_words(guarantee, members),
        "protects": guarantee.unit,
        "adjacency": guarantee.adjacency,
        "trusted": guarantee.trusted,
    }
    more = {
        "mechanism": "; or ".join(_first(list(dict.fromkeys(each.mechanism for each, _ in pairs)))),
        "not covered": "; ".join(guarantee.not_covered),
    }
    folded = f"<details><summary>Mechanism, and what is not covered</summary>{_listed(more)}</details>"
    return f"<figure><h3>{guarantee.name}-level{some}</h3>{_listed(rows)}{folded}</figure>"


def _listed(rows: Mapping[str, str]) -> str:
    return "<dl>" + "".join(f"<dt>{name}</dt><dd>{escape(text)}</dd>" for name, text in rows.items()) + "</dl>"


def _first(mechanisms: Sequence[str]) -> Sequence[str]:
    more = len(mechanisms) - MOST_MECHANISMS
    return (*mechanisms[:MOST_MECHANISMS], f"{more} more: see the settings of the runs") if more > 0 else mechanisms


def _epsilon_words(guarantee: Guarantee, records: Sequence[RunRecord]) -> str:
    delta = ", ".join(sorted({f"{record.config.privacy.delta:g}" for record in records}))
    if len(records) > 1:
        values = [record.epsilon(guarantee.name) for record in records]
        ends = dict.fromkeys((f"{min(values):.4g}", f"{max(values):.4g}"))
        return f"{' to '.join(ends)} at delta {delta}"
    record = records[0]
    spent = spent_by_holder(record, guarantee.name)
    worst = worst_holder(spent, record.config.privacy.delta)
    if worst is None:
        return f"{record.epsilon(guarantee.name):.4g} at delta {delta} ({record.config.privacy.accountant})"
    found = epsilons(spent[worst], record.config.privacy.delta)
    return f"at delta {delta}: " + "; ".join(f"{value:.4g} ({name})" for name, value in found.items())


def _runs(records: Sequence[RunRecord]) -> str:
    """A row a run; what is the same in every run is said once, so that the rest fits. One run needs no table."""
    table = runs_table(records)
    if len(records) == 1:
        facts = zip(table.columns, table.rows[0], strict=True)
        listed = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value or '-')}</dd></div>" for name, value in facts)
        return f'<dl class="facts">{listed}</dl>'
    same = ", ".join(f"{name} {value or '-'}" for name, value in table.same.items())
    note = f'<p class="muted">The same in every run: {escape(same)}.</p>' if same else ""
    swept = swept_line(records)
    note += f'<p class="muted">The runs differ in: {escape(swept)}.</p>' if swept else ""
    return _table(table.without(table.same)) + note


def _table(table: Table) -> str:
    return _html_table(table.columns, table.rows)


def _html_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in columns)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="table">'
        f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _cell(text: str) -> str:
    return f'<td class="words">{escape(text)}</td>' if len(text) > 28 else f"<td>{escape(text)}</td>"


def _repetitions(records: Sequence[RunRecord]) -> str:
    table = repetitions_table(records)
    return "<h3>Repetitions</h3>" + _table(table) if table else ""


def _pictures(pictures: Sequence[Picture]) -> str:
    """The legend that most pictures share, once; the first pictures, and the others folded."""
    shared = Counter(picture.legend for picture in pictures if picture.legend).most_common(1)
    common = shared[0][0] if shared and shared[0][1] > 1 else ()
    drawn = [_figure(picture, common) for picture in sorted(pictures, key=lambda picture: picture.aside)]
    shown, more = drawn[:MOST_SHOWN], drawn[MOST_SHOWN:]
    folded = f"<details><summary>{len(more)} more pictures</summary>{_grid(more)}</details>" if more else ""
    return (f'<div class="scroll legend">{_legend(common)}</div>' if common else "") + _grid(shown) + folded


def _grid(figures: Sequence[str]) -> str:
    return '<div class="pictures">' + "".join(figures) + "</div>"


def _legend(legend: Sequence[tuple[int, str]]) -> str:
    rows = "".join(
        f'<li><span style="color: var({series_variable(number)})">{sign(number)}</span> {escape(label)}</li>'
        for number, label in legend
    )
    return f'<ul class="legend">{rows}</ul>' if legend else ""


def _figure(picture: Picture, common: Sequence[tuple[int, str]]) -> str:
    note = f"<p>{escape(picture.note)}</p>" if picture.note else ""
    caption = f"<figcaption><strong>{escape(picture.title)}</strong></figcaption>"
    rows = "" if picture.legend == common else _legend(picture.legend)
    return f"<figure>{caption}{picture.svg}{rows}<figcaption>{note}</figcaption></figure>"


def _choosing(records: Sequence[RunRecord], costs: Sequence[ChoiceCost]) -> str:
    chosen = "".join(_selection(record) for record in records if record.selection)
    if not costs and not chosen:
        return ""
    head = ("level", "one run, the dearest", "all of them together", "best of a number drawn at random", "delta")
    body = [
        (
            cost.guarantee,
            f"{cost.one_run:.4g}",
            f"not stated: {cost.why_not}" if cost.all_runs is None else f"{cost.all_runs:.4g} ({cost.num_runs} runs)",
            "; ".join(f"{value:.4g} ({name})" for name, value in cost.drawn.items()) or _does_not_apply(cost),
            f"{cost.delta:g}",
        )
        for cost in costs
    ]
    return f"<h2>What choosing costs</h2>{chosen}" + (_CHOOSING + _html_table(head, body) if body else "")


def _does_not_apply(cost: ChoiceCost) -> str:
    return "" if cost.all_runs is None else f"does not apply: {cost.why_not}"


_CHOOSING = (
    "<p>Picking the best of several runs is a release about the same data, and costs more than the run that is picked. "
    "The epsilon of all runs together holds whatever is picked or published. It is less where the number of runs was "
    "drawn at random before the first one, and nothing but the best is published (Papernot and Steinke 2022): the "
    "fourth column says what that would have cost with a mean of as many runs, and <code>python -m scripts.tune</code> "
    "does it. All numbers here are by the RDP accountant.</p>"
)


def _selection(record: RunRecord) -> str:
    selection = record.selection or {}
    return (
        f"<p>{escape(record.name)} was chosen by scripts.tune among a number of trials drawn from the "
        f"{escape(str(selection.get('distribution')))} distribution of mean {_float(selection.get('mean'))}: epsilon "
        f"{_float(selection.get('epsilon'))} with the choice, {_float(selection.get('epsilon_of_one_trial'))} for one "
        f"trial, at delta {_float(selection.get('delta'))} (RDP). It holds for whoever sees the chosen run and neither "
        "the number of trials nor the others.</p>"
    )


def _float(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) and math.isfinite(value) else escape(str(value))


def _settings(records: Sequence[RunRecord]) -> str:
    rows = [(name, str(value)) for name, value in records[0].settings.items()]
    table = _html_table(("setting", "value"), rows)
    return f"<h2>Settings</h2><details><summary>All {len(rows)}</summary>{table}</details>"
