"""Proposes a `data.toml` for a CSV file from its names, types and levels."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import date
from functools import partial
from itertools import combinations
from statistics import median

from discreet.data.cell_reading import Marks, day_in
from discreet.data.cells import INDEX, numbers_rows
from discreet.data.columns import ICD
from discreet.data.csv_table import CsvTable
from discreet.data.empty_cells import is_empty
from discreet.data.targets import FolderError
from discreet.privacy.person import KEY, OtherSpelling, person_keys
from discreet.tables.doubts import (
    EITHER_MARKS,
    SHORT_FORMATS,
    TWINS,
    doubt_in,
    excel_doubt,
    first_row,
    point_doubt,
)
from discreet.tables.header import column_place, names_in
from discreet.tables.target_proposal import (
    case_note,
    event_hint,
    listed,
    numbers_of,
    quoted,
    round_range,
    survival_lines,
    target_lines,
)
from discreet.tables.written_numbers import WORDS, marks_in, written_numbers

MOST_LEVELS = 20
# None: with or without a time, such as 2022-01-31 10:30:00, which a column reads without a format.
DATE_FORMATS = (
    None,
    "%Y-%m-%d",
    "%d.%m.%Y",
    "%d/%m/%Y",
    "%m/%d/%Y",
    "%Y/%m/%d",
    "%d-%m-%Y",
    "%m-%d-%Y",
    "%d.%m.%Y %H:%M",
    "%d.%m.%Y %H:%M:%S",
)
LIKE_DATE = re.compile(r"\d{1,4}([./-])\d{1,2}\1\d{1,4}", re.ASCII)
CODE = re.compile(r"\d+", re.ASCII)
WITH_DIGIT = re.compile(r"\d")
POWER_CODE = re.compile(r"\d+E\d+", re.ASCII | re.I)
LEADING_ZERO = re.compile(r"0\d+", re.ASCII)
ICD_CODE = re.compile(r"[A-Z]\d\d(\.?[\dA-Z]{1,4})?[+*!-]?", re.ASCII | re.I)
POST_CODES = re.compile(r"plz|postleitzahl|zip|(zip|post|postal)[_ ]?code", re.I)
# Numbers that stand for an empty cell in many tables, if they lie far from all others.
CODES = (-9, -99, -999, -9999, 99, 999, 9999, 99999)
OWNERS = re.compile(
    r"(patient|person|user|customer|client|member|subject|pupil|student)(_?(id|no|nr|number))?",
    re.I,
)
TARGETS = re.compile(
    r"(target|label|class|outcome|y|readmitted|churn|default|diagnosis|response)", re.I
)
IDENTIFIERS = re.compile(r"(^|id|no|nr|number|key|index)$", re.I)
CODES_WIDTH = 16  # of columns into which many codes are hashed

WARNING = """\
# Proposed by `discreet data check` from {file}, which it has READ: all words below come from the
# data: ranges, levels, classes, formats, also `missing` and `below`, which say that a cell is empty
# or below a limit. They are not private, and no epsilon covers them. Replace them, column by
# column, by what is public: a questionnaire, a guideline, the range of an instrument. Take the name
# of each column that you have replaced out of `unconfirmed`. Until it is empty, no run starts.
"""

CODES_AS_WORDS = 'if these are codes: { kind = "category", levels = [...] }'
DIFFERENT = "every row has a different number, like an identifier"
CURVES = 3  # of a number: enough for a U or an S
FEW_WORDS = 3  # among numbers
NO_INPUTS = "# No column is described, so a run has no inputs: do as these lines say"
FEW_NUMBERS = 3  # which a line or one bend describes
SKEWED = 0.2  # the share of its range below which the median of a skewed number lies
PAIRS_LINES = (
    "# A linear model adds up what each column does alone. Where one column changes what another",
    "# does, name the two:",
    "# [[pairs]]",
    '# columns = ["age", "diabetes"]',
)


@dataclass(frozen=True)
class Guess:
    """A guess at the kind of a column.

    Attributes:
      line: its line in data.toml, without its name; empty if the column is left out.
      why: a comment with the reason.
      wrong_row: a row, counted from 0, whose cell does not fit the kind of most other rows.
    """

    line: str
    why: str = ""
    wrong_row: int | None = None


def propose(
    table: CsvTable,
    *,
    target: str | None,
    owner: str | None,
    ids: str | None = None,
    event: str | None = None,
) -> str:
    """A proposed description of a CSV file, as text. `ids`: what two spellings of an owner mean,
    `exact` or `folded`; None: a comment asks if there are any. `event`: the column that says
    whether an event ended the time in `target`. Raises FolderError: the file can't be read, or
    `target`, `owner` or `event` is not one of its columns, or is another of the three."""
    names = names_in(table)
    columns = {name: column.to_pylist() for name, column in table.columns(as_text=True).items()}
    _check_given({"--target": target, "--owner": owner, "--event": event}, table)
    if not columns[names[0]]:
        raise FolderError(f"{table.path} has no rows below its header")
    owner = owner or _named(OWNERS, [name for name in names if name not in (target, event)])
    target = target or _named(TARGETS, [name for name in names if name != owner]) or names[-1]
    written = marks_in(columns)
    marks = written.chosen()
    taken = (target, owner, event)
    inputs = {name: cells for name, cells in columns.items() if name not in taken}
    guesses = {
        name: guessed_column(name, cells, marks, both_marks=written.both)
        for name, cells in inputs.items()
    }
    unconfirmed = [*(name for name, each in guesses.items() if each.line), target]
    lines = [WARNING.format(file=table.path.name), f"unconfirmed = {listed(unconfirmed)}", ""]
    lines += _head_lines(table, marks, target, owner)
    lines += _ids_lines(table, columns[owner] if owner else [], ids)
    try:
        if event is not None:
            lines += survival_lines(columns, target, event, marks)
        else:
            lines += target_lines(columns[target], target, marks, both_marks=written.both)
    except FolderError as error:
        raise FolderError(f"{table.path}: {error}") from None
    if any(line.startswith("target_low") for line in lines):
        lines += event_hint(inputs, target)
    lines += ["", "[columns]", *column_lines(guesses, table), *_last_lines(guesses)]
    return "\n".join(lines) + "\n"


def _last_lines(guesses: Mapping[str, Guess]) -> Sequence[str]:
    """The last lines of a description, which depend on how many columns are described."""
    described = sum(bool(each.line) for each in guesses.values())
    if not described:
        return (NO_INPUTS,)
    if described == 1:
        return ()
    return ("", *PAIRS_LINES)


def _check_given(given: Mapping[str, str | None], table: CsvTable) -> None:
    """Raises FolderError for a named column that there isn't, or that two options name."""
    options = dict[str, str]()
    for option, name in given.items():
        if name is None:
            continue
        column_place(name, table)
        if name in options:
            raise FolderError(f"{options[name]} and {option} are both {name}: name two columns")
        options[name] = option
    if given["--event"] is not None and given["--target"] is None:
        raise FolderError(
            "--event needs --target, the column of the time until the event: write both"
        )


def _named(pattern: re.Pattern[str], names: Sequence[str]) -> str | None:
    return next((name for name in names if pattern.fullmatch(name.strip())), None)


def _head_lines(table: CsvTable, marks: Marks, target: str, owner: str | None) -> Iterator[str]:
    """The first lines of a description: the file and its format, the target and the owner."""
    yield 'format = "csv"'
    yield f"file = {quoted(table.path.name)}"
    if table.path.with_name("test.csv").is_file() and table.path.name != "test.csv":
        yield 'test = "test.csv"          # public: nobody in it is protected'
    if table.separator is not None:
        yield f"separator = {json.dumps(table.separator)}"
    if table.encoding is not None:
        yield f"encoding = {json.dumps(table.encoding)}"
    if marks.decimal != ".":
        yield f"decimal = {json.dumps(marks.decimal)}"
    if marks.thousands:
        mark = marks.thousands
        yield f"thousands = {json.dumps(mark)}           # 1{mark}234 is read as 1234"
    yield f"target = {quoted(target)}"
    if owner is not None:
        yield f"owner = {quoted(owner)}       # each of them becomes a client"
    else:
        yield '# owner = "..."           # the column of whose each row is, if there is one'


def _ids_lines(table: CsvTable, owners: Sequence[str], ids: str | None) -> Iterator[str]:
    """The key that says what two spellings of an owner mean; a comment if nobody has said it."""
    if owners and ids is not None:
        yield KEY.format(ids)
        return
    try:
        person_keys(owners)
    except OtherSpelling as error:
        lines = f"{table.place_of(error.before)} and {table.place_of(error.row)}"
        yield f"# {lines}: {error}"


def column_lines(guesses: Mapping[str, Guess], table: CsvTable) -> Iterator[str]:
    """The line of each column in data.toml."""
    records: list[tuple[int, list[str]]] = []
    if any(each.wrong_row is not None for each in guesses.values()):
        records = table.records()
    for name, each in guesses.items():
        if re.fullmatch(r"[A-Za-z0-9_-]+", name):
            key = name
        else:
            key = quoted(name)
        why = each.why
        if each.wrong_row is not None:
            line, _ = records[each.wrong_row + 1]
            why = f"line {line} of {table.path.name} {why}"
        if not each.line:
            yield f"# {key} is left out: {why}"
        elif why:
            yield f"{key} = {each.line}  # {why}"
        else:
            yield f"{key} = {each.line}"


def guessed_column(
    name: str, cells: Sequence[str], marks: Marks, *, both_marks: bool = False
) -> Guess:
    """The most likely kind of a column, from its cells as text. `both_marks`: the table has decimal
    commas and decimal points."""
    full = [cell.strip() for cell in cells if not is_empty(cell)]
    if not full:
        return Guess("", "it is empty")
    if doubt := excel_doubt(cells):
        return Guess("", doubt.why, doubt.row)
    some_empty = len(full) < len(cells)
    if name in INDEX and numbers_rows(full):
        return Guess("", "it numbers the rows, as the index that pandas writes")
    found = _code_guess(name, full, some_empty) or _quantity_guess(name, cells, marks, both_marks)
    return found or _word_guess(cells, full, marks)


def _code_guess(name: str, full: Sequence[str], some_empty: bool) -> Guess | None:
    """The guess for codes, which are no quantities though they may be digits."""
    digits = all(map(CODE.fullmatch, full))
    zeros = digits and any(map(LEADING_ZERO.fullmatch, full))
    more = ', missing = "category"' * some_empty
    if all(map(ICD_CODE.fullmatch, full)) and len({*full}) > 2:
        line = f'{{ kind = "category", fold = "{ICD}"{more} }}'
        return Guess(line, "codes of ICD-10, each of which counts as its chapter")
    if not (zeros or (digits and POST_CODES.fullmatch(name))):
        return None
    known = sorted({*full})
    if len(known) == len(full) > MOST_LEVELS and IDENTIFIERS.search(name):
        return Guess("", DIFFERENT)
    if len(known) <= MOST_LEVELS:
        line = f'{{ kind = "category", levels = {listed(known)}{more} }}'
        return Guess(line, "codes, and no quantities")
    return Guess(f'{{ kind = "text", width = {CODES_WIDTH} }}', "codes, which are hashed")


def _quantity_guess(
    name: str, cells: Sequence[str], marks: Marks, both_marks: bool
) -> Guess | None:
    """The guess for a number or a date."""
    full = [cell.strip() for cell in cells if not is_empty(cell)]
    some_empty = len(full) < len(cells)
    found = written_numbers(full, marks)
    if found is not None:
        if both_marks and (doubt := point_doubt(cells)):
            return Guess("", doubt.why, doubt.row)
        if len({*full}) == len(cells) > MOST_LEVELS and IDENTIFIERS.search(name):
            return Guess("", DIFFERENT)
        guess = _number_guess(found.numbers, some_empty or found.some_empty, found.keys)
        if any(map(POWER_CODE.fullmatch, full)):
            return replace(guess, why=f"1E10 is read as 1 and ten zeros; {CODES_AS_WORDS}")
        return guess
    fitting = [form for form in DATE_FORMATS if _days(form, full)]
    for twins in TWINS:
        if {*twins} <= {*fitting} and _days(twins[0], full) != _days(twins[1], full):
            choice = " or ".join(map(quoted, twins))
            return Guess("", f"no day is above 12: write format = {choice} for it")
    if fitting:
        return _date_guess(fitting[:1], _days(fitting[0], full) or [], some_empty)
    if doubt := doubt_in(cells, marks):
        return Guess("", doubt.why, doubt.row)
    return _several_formats(full, some_empty) or _mixed_dates(cells)


def _several_formats(full: Sequence[str], some_empty: bool) -> Guess | None:
    """The guess for dates in two or three formats, if each cell is one day by all formats that read
    the column."""
    words = {*full}
    for count in (2, 3):
        found = dict[tuple[str, ...], list[date]]()
        for forms in combinations(filter(None, DATE_FORMATS), count):
            with suppress(ValueError):
                found[forms] = [date.fromordinal(int(day_in(cell, forms))) for cell in words]
        if found:
            forms, days = next(iter(found.items()))
            if any(others != days for others in found.values()):
                return None
            return _date_guess(forms, days, some_empty, f"dates in {count} formats")
    return None


def _mixed_dates(cells: Sequence[str]) -> Guess | None:
    """The guess for a column of which most cells are dates in several formats, if some may be two
    days or no date: it is left out."""
    words = {cell.strip() for cell in cells if not is_empty(cell)}
    words = {word for word in words if word.casefold() not in WORDS}
    like_dates = {word for word in words if LIKE_DATE.match(word)}
    if len(like_dates) <= len(words) / 2:
        return None
    forms, left = _formats_in(words)
    if len(forms) < 2 or len(left) >= len(words) / 2:
        return None
    listed_forms = ", ".join(forms)
    remedy = "write all in one, and check again"
    if left:
        why = f"is no date, and most are, in the formats {listed_forms}: {remedy}"
        return Guess("", why, first_row(cells, left.__contains__))
    why = f"dates in several formats, {listed_forms}, of which some may be another day in another"
    return Guess("", f"{why}: {remedy}")


def _formats_in(words: set[str]) -> tuple[list[str], set[str]]:
    """The formats of dates that read the most words together, and the words that none reads."""
    known = filter(None, (*DATE_FORMATS, *SHORT_FORMATS))
    fits = {form: {word for word in words if _days(form, [word])} for form in known}
    forms = list[str]()
    left = words
    while True:
        best = max(fits, key=lambda form: len(fits[form] & left))
        if not fits[best] & left:
            return forms, left
        forms.append(best)
        left = left - fits[best]


def _word_guess(cells: Sequence[str], full: Sequence[str], marks: Marks) -> Guess:
    known = sorted({*full})
    if len(known) <= MOST_LEVELS and len(known) < max(len(full) / 2, 3):
        levels = listed(known)
        note = case_note(known)
        if len(full) == len(cells):
            return Guess(levels, note)
        return Guess(f'{{ kind = "category", levels = {levels}, missing = "category" }}', note)
    return _nearly(cells, marks) or Guess(
        "", f'text of {len(known)} kinds: {{ kind = "text", width = 64 }} would hash its words'
    )


def _nearly(cells: Sequence[str], marks: Marks) -> Guess | None:
    """The guess for a column if most cells are numbers or dates: the first row that is not."""
    full = [
        (row, cell.strip())
        for row, cell in enumerate(cells)
        if not is_empty(cell) and cell.strip().casefold() not in WORDS
    ]
    kinds: dict[str, Callable[[list[str]], object]] = {
        "is not a number, as most are": partial(_numbers_by_any, marks=(marks, *EITHER_MARKS))
    }
    for form in filter(None, DATE_FORMATS):
        kinds[f"is not a date in the format {form}, as most are"] = partial(_days, form)
    for why, read in kinds.items():
        wrong = [row for row, cell in full if read([cell]) is None]
        if 0 < len(wrong) < len(full) / 2:
            words = {cells[row].strip() for row in wrong}
            remedy = "correct it, and check again"
            if len(words) <= FEW_WORDS and not any(map(WITH_DIGIT.search, words)):
                empty = f"empty = {listed(sorted(words))}"
                remedy = f"correct it, and check again; or describe the column, with {empty}"
            return Guess("", f"{why}: {remedy}", wrong[0])
    return None


def _numbers_by_any(cells: Sequence[str], marks: Sequence[Marks]) -> list[float] | None:
    """The numbers in cells, by the first marks that read all of them."""
    found = (numbers_of(cells, each) for each in marks)
    return next((numbers for numbers in found if numbers is not None), None)


def _number_guess(numbers: Sequence[float], some_empty: bool, keys: str) -> Guess:
    code = _code_in(numbers)
    why = ""
    if code is not None:
        numbers = [number for number in numbers if number != code]
        why = f"is {code:g} a code for an empty cell? Then write empty for it"
    low, high = (0.0, 1.0) if {*numbers} <= {0.0, 1.0} else round_range(numbers)
    more = ""
    if len({*numbers}) > FEW_NUMBERS:
        more += f", curves = {CURVES}"
        if not SKEWED < (median(numbers) - low) / (high - low) < 1 - SKEWED:
            why = why or "skewed: points = [...], public quantiles from low to high, spread it"
    if some_empty:
        more += ', missing = "middle"'
    more += keys
    if not more:
        return Guess(f"[{low:g}, {high:g}]", why)
    return Guess(f'{{ kind = "number", low = {low:g}, high = {high:g}{more} }}', why)


def _code_in(numbers: Sequence[float]) -> float | None:
    """The smallest or largest number, if it looks like a code for an empty cell.

    >>> _code_in([35.0, 80.0, -9.0, 51.0]), _code_in([-9.0, -8.0, 3.0])
    (-9.0, None)
    """
    known = sorted({*numbers})
    if len(known) < 3:
        return None
    ends = ((known[0], known[1], known[1:]), (known[-1], known[-2], known[:-1]))
    for end, nearest, others in ends:
        if end in CODES and abs(end - nearest) > (others[-1] - others[0]) / 4:
            return end
    return None


def _date_guess(
    forms: Sequence[str | None], days: Sequence[date], some_empty: bool, why: str = ""
) -> Guess:
    line = f'kind = "date", low = {min(days).year}-01-01, high = {max(days).year}-12-31'
    written = [form for form in forms if form is not None]
    if len(written) > 1:
        line += f", format = {listed(written)}"
    elif written:
        line += f", format = {quoted(written[0])}"
    if some_empty:
        line += ', missing = "middle"'
    return Guess(f"{{ {line} }}", why)


def _days(form: str | None, cells: Sequence[str]) -> list[date] | None:
    forms = () if form is None else (form,)
    with suppress(ValueError):
        return [date.fromordinal(int(day_in(cell, forms))) for cell in cells]
    return None
