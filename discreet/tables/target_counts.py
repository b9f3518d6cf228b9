"""What `discreet data check` says of a described target: rows without it, what its second class or
its event is, and classes that the test set lacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from discreet.data.cell_reading import Marks, number_in
from discreet.data.description import DataDescription
from discreet.data.empty_cells import is_empty
from discreet.data.examples import Task
from discreet.data.targets import CLASSES
from discreet.tables.target_proposal import EVENTS, event_advice


def untested_classes(task: Task, description: DataDescription) -> Iterator[str]:
    """A sentence on the classes that the training set has and the test set lacks."""
    if task.shape.target.kind != CLASSES or not len(task.test):
        return
    parts = (task.train, task.test)
    trained, tested = ({*part.targets.tolist()} for part in parts)
    words = description.classes or range(task.shape.num_classes)
    missing = [str(words[number]) for number in sorted(trained - tested)]
    if missing:
        yield (
            f"{description.test} has no row of class {', '.join(missing)}: nothing there can "
            "measure it. Split with a larger --test, or rate with evaluation.kind=private"
        )


def target_counts(
    description: DataDescription,
    cells: Mapping[str, Sequence[Any]],
    place_of: Callable[[int], str],
) -> Iterator[str]:
    """A sentence on the rows without a target, on the second of two classes, and on an input that
    may be the event of a time. `cells`: those of each target by its column. `place_of`: the words
    for a row."""
    for name in description.target_names:
        empty = [row for row, cell in enumerate(cells[name]) if _lacks(cell, description)]
        if empty:
            yield (
                f"{name} is empty in {len(empty)} of {len(cells[name])} rows, first in "
                f"{place_of(empty[0])}: leave them out, or fill them"
            )
    if description.event is not None:
        yield from _negative_times(description, cells, place_of)
        name = description.event
        yield (
            f"event: {_counted(cells[name], name, description)}. The other rows were seen without "
            f"it until {description.target}{_other_order(description)}"
        )
    elif max(len(description.classes), description.num_classes or 0) == 2:
        name = str(description.target)
        yield (
            f"second class: {_counted(cells[name], name, description)}. Probabilities, precision, "
            f"recall, f1 and curves are of it{_other_order(description)}"
        )
    elif description.target_low is not None and description.target is not None:
        for column in description.columns:
            has_two = len(column.levels) == 2 or (column.low, column.high) == (0, 1)
            if has_two and EVENTS.fullmatch(column.name):
                yield event_advice(description.target, column.name)


def _negative_times(
    description: DataDescription,
    cells: Mapping[str, Sequence[Any]],
    place_of: Callable[[int], str],
) -> Iterator[str]:
    name = str(description.target)
    marks = description.marks
    below = [row for row, cell in enumerate(cells[name]) if (_number(cell, marks) or 0) < 0]
    if below:
        yield (
            f"{name} is below 0 in {len(below)} of {len(cells[name])} rows, first in "
            f"{place_of(below[0])}: a time counts from 0, so correct them, or leave them out"
        )


def _number(cell: object, marks: Marks) -> float | None:
    with suppress(ValueError):
        return number_in(cell, marks)
    return None


def _lacks(cell: object, description: DataDescription) -> bool:
    """True for an empty cell that is no word of `classes`."""
    return is_empty(cell) and str(cell).strip() not in description.classes


def _counted(cells: Sequence[Any], name: str, description: DataDescription) -> str:
    """The second of two classes, and the number of rows that have it."""
    if not description.classes:
        count = sum(_number(cell, description.marks) == 1 for cell in cells)
        return f"{name} = 1 in {count} of {len(cells)} rows"
    second = description.classes[1].strip()
    meanings = {second: second} | description.class_words
    words = {word for word, known in meanings.items() if known.strip() == second}
    count = sum(str(cell).strip() in words for cell in cells)
    return f"{name} = {' or '.join(sorted(words))} in {count} of {len(cells)} rows"


def _other_order(description: DataDescription) -> str:
    """What to do if the other of two words is meant; empty for numbers."""
    if not description.classes:
        return ""
    return f". If {description.classes[0].strip()} is meant, list it second in classes"
