"""A model card in Hugging Face's format: the model, its training data, its guarantees, and its
scores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import yaml  # type: ignore[import-untyped]

from discreet.mechanisms.mechanism import Statement
from discreet.privacy.person import FOLDED
from discreet.reporting.records import RunRecord
from discreet.run_files.metrics_table import score_columns
from discreet.run_files.score_intervals import interval_words
from discreet.run_files.shapes import moved_words
from discreet.settings.data import SITE

SHAPES_FOLDER = "shapes"
# Whom a client is, by data.partition, and for any other.
OF_OWNERS = {
    "natural": "a client is {}, with all its rows",
    "owners": "{} is at one client, with all its rows",
    SITE: "{} is at one client, with all its rows",
}
SPREAD = "rows of {} may be at several clients: no guarantee here is for all of them together"
HELD_OUT = "held-out examples of the clients, noised"
TASKS = {
    "classes": "tabular-classification",
    "labels": "tabular-classification",
    "numbers": "tabular-regression",
    "survival": "tabular-regression",
}


def model_card(record: RunRecord, facts: Mapping[str, Any], *, example: str, said: str) -> str:
    """README.md of an exported model. `example`: the code that was run; `said`: its output."""
    scores = _scores(record)
    head = yaml.safe_dump(_metadata(record, facts, scores), sort_keys=False, allow_unicode=True)
    how = "with differential privacy" if _is_private(record) else "without a guarantee of privacy"
    parts = [
        f"---\n{head}---",
        f"# {record.config.model.name} on {record.config.data.name}, trained {how}",
        "\n".join(_trained(record, facts)),
        "## Guarantees\n\n" + "\n".join(_guarantees(record)),
        "## Scores\n\n" + "\n".join(_score_lines(record, scores)),
        *(["## Shapes\n\n" + "\n".join(_shape_lines(record.shapes))] if record.shapes else []),
        "## Use\n\nIn this folder, with torch, numpy, pandas and "
        f"scikit-learn:\n\n```python\n{example}```",
        f"It was run when the folder was written, and printed:\n\n```\n{said.rstrip()}\n```",
        "`encoding.py`, with the files that it imports, turns the cells of a table into "
        "the numbers that the model reads, by what `model.json` says of each column. "
        "`model.safetensors` holds the parameters alone.",
    ]
    return "\n\n".join(parts) + "\n"


def _is_private(record: RunRecord) -> bool:
    """True if noise that nobody can draw again gives the run an epsilon."""
    epsilons = (record.epsilon(each.name) for each in record.guarantees if each.enabled)
    return record.config.seed is None and any(map(math.isfinite, epsilons))


def _scores(record: RunRecord) -> dict[str, float]:
    names = [*score_columns(record.rounds), "loss"]
    found = {name: record.of_model(name) for name in names}
    found |= {name: value for name, (value, *_) in record.intervals.items()}
    return {
        name: value for name, value in found.items() if value is not None and math.isfinite(value)
    }


def _metadata(
    record: RunRecord, facts: Mapping[str, Any], scores: Mapping[str, float]
) -> dict[str, Any]:
    task = TASKS[facts["target"]["kind"]]
    metrics = [{"type": name, "value": round(value, 4)} for name, value in scores.items()]
    named = HELD_OUT if record.is_rated else "public test set"
    data = {"name": named, "type": record.config.data.name}
    result = {"task": {"type": task}, "dataset": data, "metrics": metrics}
    return {
        "library_name": "pytorch",
        "pipeline_tag": task,
        "tags": [
            *(["differential-privacy"] if _is_private(record) else []),
            "federated-learning",
            "discreet",
        ],
        "model-index": [{"name": record.name, "results": [result]}] if metrics else [],
    }


def _trained(record: RunRecord, facts: Mapping[str, Any]) -> Iterator[str]:
    count = sum(math.prod(shape) for shape in facts["parameters"].values())
    data = record.config.data
    described = facts["description"] or {}
    yield f"- model: `{record.config.model.name}`, {count} parameters, Discreet {facts['discreet']}"
    most = record.plan.run.user.population_size
    yield f"- trained in a federation of at most {most} clients, in {record.model_round} rounds"
    if described.get("owner"):
        value = f"one value of the column `{described['owner']}`"
        if described.get("ids") == FOLDED:
            value += " in all its spellings"
        yield f"- {OF_OWNERS.get(data.partition, SPREAD).format(value)}"
    if facts["inputs"]:
        yield f"- inputs: {', '.join(facts['inputs'])}"
    if described.get("target"):
        if described.get("classes"):
            classes = f": {', '.join(described['classes'])}"
        else:
            classes = ""
        if "event" in described:
            times = ", ".join(f"{end:g}" for end in described["times"])
            classes = f", the time until `{described['event']}`, on the grid {times}"
        yield f"- predicts `{described['target']}`{classes}"


def _guarantees(record: RunRecord) -> Iterator[str]:
    privacy = record.config.privacy
    if record.config.seed is not None:
        yield "**The noise was drawn from a seed and can be drawn again: it protects nobody.**\n"
    yield "| level | epsilon | delta | protects | neighbours | trusted |"
    yield "|---|---|---|---|---|---|"
    for each in record.guarantees:
        yield _guarantee_row(each, record.epsilon(each.name), privacy.delta)
    on = [each for each in record.guarantees if each.enabled]
    if on:
        yield (
            f"\nEpsilon by the accountant {privacy.accountant}. Not covered: "
            f"{'; '.join(dict.fromkeys(gap for each in on for gap in each.not_covered))}."
        )
    if record.selection is not None:
        yield (
            "\n`discreet tune` chose the run among trials: epsilon holds for whoever sees neither "
            "their number, nor the other trials, nor how long they took."
        )


def _guarantee_row(each: Statement, epsilon: float, delta: float) -> str:
    if not (each.enabled and math.isfinite(epsilon)):
        return f"| {each.name} | none (infinite) | | | | |"
    return (
        f"| {each.name} | {epsilon:.4g} | {delta:g} | {each.unit} | {each.adjacency} | "
        f"{each.trusted} |"
    )


def _score_lines(record: RunRecord, scores: Mapping[str, float]) -> Iterator[str]:
    if not scores:
        yield "The model was not rated."
        return
    if record.is_rated:
        yield from _rating_lines(record)
        return
    chosen = ""
    if record.is_best_round:
        chosen = ", which had the least loss there, so these scores flatter it"
    elif record.model_round < len(record.rounds):
        chosen = ", which was chosen by its scores there as later rounds diverged"
    yield f"On the public test set, after round {record.model_round}{chosen}:\n"
    known = record.intervals
    yield "| score | value | 95 % by bootstrap |\n|---|---|---|"
    for name, value in scores.items():
        within = interval_words(known[name]) if name in known else ""
        yield f"| {name.replace('_', ' ')} | {value:.4f} | {within} |"
    if constant := record.constant:
        yield f"| accuracy of always the most frequent class | {constant['share']:.4f} | |"
        if constant["loss"] is not None:
            yield f"| loss of the best constant guess | {constant['loss']:.4f} | |"
    if record.no_better:
        yield f"\n**Limits:** {record.no_better}."


def _rating_lines(record: RunRecord) -> Iterator[str]:
    yield (
        f"After round {record.model_round} clients rated the model on examples that they hold out, "
        "with noise:\n"
    )
    yield "| score | value | standard error |\n|---|---|---|"
    for number, rated in record.ratings:
        if number == record.model_round and rated.known:
            yield f"| {rated.name.replace('_', ' ')} | {rated.value:.4f} | {rated.error:.4f} |"


def _shape_lines(found: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "The model adds up an intercept and a shape for each column (`shapes.csv`). The table has "
        "the range of each shape, and how far noise alone moves it in 95 % of runs at most.\n"
    )
    yield "| predicts | column | from | to | noise |\n|---|---|---|---|---|"
    for name, value in found["intercepts"].items():
        yield f"| {name} | intercept | {value:.3g} | | |"
    for shape in found["shapes"]:
        noise = f"{max(shape['noise']):.2g}" if shape["noise"] else "not known"
        ends = f"{min(shape['effect']):.3g} | {max(shape['effect']):.3g}"
        yield f"| {shape['target']} | {' and '.join(shape['columns'])} | {ends} | {noise} |"
    for said in filter(None, map(moved_words, found["shapes"])):
        yield f"\n{said} The noise is that of the shape before."
    yield ""
    for number, shape in enumerate(found["shapes"], start=1):
        yield f"![{' and '.join(shape['columns'])}]({SHAPES_FOLDER}/{number}.svg)"
