"""Proposes the lines of `data.toml` about what is predicted: classes, a range, or the time until an
event."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from discreet.data.cell_reading import Marks, number_in
from discreet.data.columns import LARGEST
from discreet.data.empty_cells import is_empty
from discreet.data.targets import FolderError
from discreet.tables.doubts import doubt_in, point_doubt
from discreet.tables.written_numbers import WORDS, written_numbers

MOST_CLASSES = 10  # of numbers: a target with more is a quantity
MOST_TEXT_CLASSES = 1000
INTERVALS = 5  # of a proposed grid
EVENTS = re.compile(
    r"(event|died|dead|death|deceased|relapsed?|status|verstorben|gestorben|tot|tod)(_?\d)?", re.I
)
# Words that say that something is so, or is not. Of two classes the second is the outcome.
YES = frozenset(
    (
        *("yes", "y", "ja", "j", "oui", "si", "sì", "sí", "sim", "true", "t", "wahr", "1", "+"),
        *("positive", "positiv", "pos", "dead", "died", "deceased", "tot", "verstorben", "event"),
    )
)
NO = frozenset(
    (
        *("no", "n", "nein", "non", "não", "false", "falsch", "0", "-", "none"),
        *("negative", "negativ", "neg", "alive", "lebt", "lebend", "censored", "zensiert"),
    )
)


def target_lines(
    cells: Sequence[str], name: str, marks: Marks, *, both_marks: bool
) -> Iterator[str]:
    """The range or the classes of the target, and a comment on rows without it. FolderError: it is
    neither a quantity nor classes, or its cells may mean several things."""
    known = sorted({cell.strip() for cell in cells if not is_empty(cell)})
    numbers = numbers_of(known, marks)
    doubt = point_doubt(known) if numbers and both_marks else None
    if numbers is None:
        doubt = doubt_in(known, marks)
    if doubt is not None:
        raise FolderError(f"the column {name} {doubt.why}")
    if numbers is None and len(known) > MOST_CLASSES and written_numbers(known, marks):
        odd = next(cell for cell in known if numbers_of([cell], marks) is None)
        raise FolderError(
            f"the column {name} has {odd!r} among its numbers: a target is read without units, "
            "limits and words, so write plain numbers, or leave such rows out"
        )
    if numbers is not None and len(known) > MOST_CLASSES:
        low, high = round_range(numbers)
        yield f"target_low = {low:g}"
        yield f"target_high = {high:g}"
    else:
        _check_classes(known, numbers, name)
        yield from _class_lines(cells, known)
    yield from empty_lines(cells, name)


def _check_classes(known: Sequence[str], numbers: Sequence[float] | None, name: str) -> None:
    if numbers is not None and len({*numbers}) < len(known):
        raise FolderError(
            f"the column {name} writes one number in several ways, such as 1 and 1.0: write it in "
            "one"
        )
    if len(known) < 2:
        raise FolderError(
            f"the column {name} says the same in every row, so there is nothing to predict: name "
            "another with --target"
        )
    if len(known) > MOST_TEXT_CLASSES:
        raise FolderError(
            f"the column {name} has {len(known)} different texts, too many for classes: name "
            "another with --target"
        )


def _class_lines(cells: Sequence[str], known: Sequence[str]) -> Iterator[str]:
    words = outcome_second(known)
    line = f"classes = {listed(words)}"
    if note := case_note(words):
        line += f"  # {note}"
    yield line
    if len(words) == 2:
        count = sum(cell.strip() == words[1] for cell in cells)
        yield (
            f"# {words[1]}, in {count} of {len(cells)} rows, is the second class: the one of "
            "probabilities, precision and curves"
        )
    for word in sorted({word for word in words if word.casefold() in WORDS} - {"-", "none"}):
        count = sum(cell.strip() == word for cell in cells)
        yield (
            f"# does {word}, in {count} of {len(cells)} rows, say that nothing is known? Then "
            "leave these rows out of the table, and the word out of classes"
        )


def outcome_second(words: Sequence[str]) -> list[str]:
    """Two words with that for the outcome second, where one of them means yes or no; others as they
    are.

    >>> outcome_second(["ja", "nein"]), outcome_second(["benign", "malign"])
    (['nein', 'ja'], ['benign', 'malign'])
    """
    if len(words) != 2:
        return [*words]
    one, other = (word.casefold() for word in words)
    if (one in YES and other not in YES) or (other in NO and one not in NO):
        return [words[1], words[0]]
    return [*words]


def survival_lines(
    columns: Mapping[str, Sequence[str]], target: str, event: str, marks: Marks
) -> Iterator[str]:
    """The event, its two words, and a grid of times. FolderError: the column `target` is no time,
    or `event` does not say one of two things."""
    times = numbers_of([cell for cell in columns[target] if not is_empty(cell)], marks)
    if not times or min(times) < 0:
        raise FolderError(
            f"the column {target} must be the time until {event}, as numbers of at least 0: "
            "correct it, or name another with --target"
        )
    words = outcome_second(sorted({cell.strip() for cell in columns[event] if not is_empty(cell)}))
    if len(words) != 2:
        raise FolderError(
            f"the column {event} says {len(words)} different things, and must say two: whether the "
            f"event ended the time in {target}, or it was seen no longer. Name another with --event"
        )
    count = sum(cell.strip() == words[1] for cell in columns[event])
    yield f"event = {quoted(event)}"
    yield (
        f"classes = {listed(words)}  # the second, in {count} of {len(columns[event])} rows, is "
        "the event"
    )
    _, high = round_range(times)
    ends = ", ".join(f"{high * part / INTERVALS:g}" for part in range(1, INTERVALS + 1))
    yield f"times = [{ends}]  # the ends of intervals: write those that a guideline has"
    yield from empty_lines(columns[target], target)
    yield from empty_lines(columns[event], event)


def event_hint(columns: Mapping[str, Sequence[str]], target: str) -> Iterator[str]:
    """A comment on a column of two words that may say whether an event ended the time in the
    target, which is a number."""
    for name, cells in columns.items():
        words = {cell.strip() for cell in cells if not is_empty(cell)}
        if name != target and EVENTS.fullmatch(name) and len(words) == 2:
            yield f"# {event_advice(target, name)}"


def event_advice(target: str, event: str) -> str:
    """What to do if a column says whether an event ended the time in the target."""
    return (
        f"if {target} is the time until {event}, {event} is no input: move data.toml away, and "
        f"check with --target {target} --event {event}"
    )


def empty_lines(cells: Sequence[str], name: str) -> Iterator[str]:
    """A comment on the rows in which a target is empty."""
    count = sum(map(is_empty, cells))
    if count:
        yield f"# {name} is empty in {count} of {len(cells)} rows: leave them out, or fill them"


def case_note(words: Sequence[str]) -> str:
    """The question about words that differ only in capitals; empty if there are none."""
    if len({word.casefold() for word in words}) == len(words):
        return ""
    return "some differ only in capitals: if they are the same, make them one in the table"


def numbers_of(cells: Sequence[str], marks: Marks) -> list[float] | None:
    """The cells as numbers; None if one is none."""
    with suppress(ValueError):
        return [number_in(cell, marks) for cell in cells]
    return None


def round_range(numbers: Sequence[float]) -> tuple[float, float]:
    """A range with round ends that contains the numbers, so that it reveals less about the smallest
    and the largest.

    >>> round_range([19, 93])
    (10.0, 100.0)
    """
    low = max(min(numbers), -LARGEST / 10)
    high = min(max(numbers), LARGEST / 10)
    unit = 10 ** math.floor(math.log10(max(high - low, abs(high) / 10, 1e-9)))
    return math.floor(low / unit) * unit * 1.0, (math.floor(high / unit) + 1) * unit * 1.0


def listed(words: Sequence[str]) -> str:
    """A list of texts as TOML has it."""
    return f"[{', '.join(map(quoted, words))}]"


def quoted(word: str) -> str:
    """A text as TOML has it."""
    return json.dumps(word, ensure_ascii=False)
