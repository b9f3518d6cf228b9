"""A CSV file: its separator, encoding and byte order mark, the line numbers of its rows, and its
columns."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from discreet.data.cell_reading import CellError
from discreet.data.targets import FolderError
from discreet.settings.foreign_files import one_line
from discreet.settings.rules import require_extra

SEPARATORS = ",;\t|"
MOST_COLUMNS = 100_000
NUMBER = re.compile(r"\s*[+-]?\d[\d.,]*\s*")
SEPARATOR_LINE = re.compile(r"\Asep=(.)\r?\n")  # Excel's first line, which is no part of the table
EXCEL = (b"PK\x03\x04", b"\xd0\xcf\x11\xe0")
# The longer marks come first: that of UTF-32 begins with that of UTF-16.
MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def _misreads(encoding: str, content: bytes) -> bool:
    """True if bytes are UTF-8 with letters beyond ASCII, which no text in another encoding is by
    chance, and `encoding` is another one; or if they are no UTF-16 or UTF-32, in which separators
    have zero bytes, and `encoding` is."""
    try:
        name = codecs.lookup(encoding).name
        content.decode("utf-8")
    except (LookupError, ValueError):  # no name of an encoding, or no UTF-8
        return False
    if name.startswith(("utf-16", "utf-32")):
        return b"\0" not in content
    return name not in ("utf-8", "utf-8-sig") and not content.isascii()


@dataclass(frozen=True)
class CsvTable:
    """A CSV file.

    Attributes:
      separator, encoding: None: detected.
      decimal: the decimal mark in its numbers.
    """

    path: Path
    separator: str | None = None
    encoding: str | None = None
    decimal: str = "."

    @cached_property
    def text(self) -> str:
        """The text, with an empty line in place of one that names the separator as Excel does."""
        return SEPARATOR_LINE.sub("\n", self._written)

    @cached_property
    def _written(self) -> str:
        """The whole text of the file. FolderError: it has another encoding."""
        with one_line(self.path, FolderError):
            content = self.path.read_bytes()
        if content.startswith(EXCEL):
            raise FolderError(f"{self.path} is an Excel file: save it as CSV (UTF-8)")
        marked = next((name for mark, name in MARKS if content.startswith(mark)), None)
        encoding = marked or self.encoding or "utf-8"
        if encoding == self.encoding and _misreads(encoding, content):
            raise FolderError(
                f"{self.path} is UTF-8, and not {encoding}: leave the encoding out (what `discreet "
                "data split` writes is UTF-8)"
            )
        other = "cp1252"
        text = None
        with suppress(ValueError, LookupError):
            text = content.decode(encoding)
        if text is not None:
            zeros = text.count("\0")
            if not zeros:
                return text
            if zeros < len(text) / 4:
                line = text[: text.index("\0")].count("\n") + 1
                raise FolderError(f"{self.path}, line {line} has a zero byte: it is damaged")
            other = "utf-16-le"
        if self.encoding is None:
            written = f'encoding = "{other}"'
        else:
            written = "the encoding that it was written in"
        raise FolderError(
            f"{self.path} can't be read because it is not {encoding}: write {written} in "
            "data.toml, or --encoding with `discreet data`, `discreet predict` and `discreet site "
            "split`"
        )

    @cached_property
    def mark(self) -> str:
        """The given separator, or the one that splits the header into the most cells."""
        if self.separator is not None:
            return self.separator
        if named := SEPARATOR_LINE.match(self._written):
            return named[1]
        header = next((line for line in self.text.splitlines() if line.strip()), "")
        return max(SEPARATORS, key=lambda mark: _cells_in(header, mark))

    def _reader(self) -> Any:
        lines = io.StringIO(self.text, newline="")
        return csv.reader(lines, delimiter=self.mark, strict=True)

    def records(self) -> list[tuple[int, list[str]]]:
        """The records, header first, each with the number of its last line, from 1. Empty lines are
        skipped. FolderError: quotes do not end where they should, or a cell is too long."""
        reader = self._reader()
        found = list[tuple[int, list[str]]]()
        before = 0
        try:
            for row in reader:
                self._check_quotes(before, reader.line_num, len(row))
                before = reader.line_num
                if row:
                    found.append((before, row))
        except csv.Error as error:
            lines = f"line {before + 1}"
            if reader.line_num > before + 1:
                lines += f" to {reader.line_num}"
            raise FolderError(f"{self.path}, {lines}: {error}") from None
        return found

    def _check_quotes(self, before: int, last: int, cells: int) -> None:
        """Raises FolderError if the lines of one record would each be a record of as many cells: a
        quote that begins a cell and does not end takes the rows of others into it. Lines of three
        cells may be prose, unless a column of them has numbers."""
        if last - before < 2 or cells < 3:
            return
        lines = [line.split(self.mark) for line in self._each_line[before:last]]
        if any(len(line) != cells for line in lines):
            return
        has_numbers = any(all(map(NUMBER.fullmatch, column)) for column in zip(*lines, strict=True))
        if cells > 3 or has_numbers:
            raise FolderError(
                f"{self.path}, line {before + 1} to {last}: a quote makes one row of lines that "
                "look like rows: write a quote within a cell twice, or none"
            )

    @cached_property
    def _each_line(self) -> list[str]:
        return list(io.StringIO(self.text, newline=""))

    def rows(self) -> Iterator[tuple[int, list[str]]]:
        """The records below the header. FolderError: one has too few or too many cells, which are
        not shown."""
        (_, header), *rows = self.records()
        for line, row in rows:
            if len(row) != len(header):
                wrong = f"{len(row)} columns, but the header has {len(header)}"
                raise FolderError(f"{self.path}, line {line}: {wrong}")
            yield line, row

    @cached_property
    def written_header(self) -> list[str]:
        """The names of the columns as they are written. FolderError: there are none, or one occurs
        twice."""
        try:
            written = next((row for row in self._reader() if row), list[str]())
        except csv.Error as error:
            raise FolderError(f"{self.path} can't be read: {error}") from None
        names = [name.strip() for name in written]
        if not any(names):
            raise FolderError(f"{self.path} can't be read: the CSV file is empty")
        if len(names) > MOST_COLUMNS:
            raise FolderError(f"{self.path} has more than {MOST_COLUMNS} columns")
        for name, count in Counter(names).items():
            if count > 1:
                raise FolderError(f"{self.path}: the column {name!r} occurs twice: rename one")
        return written

    def header(self) -> list[str]:
        """The names of the columns, without spaces around them."""
        return [name.strip() for name in self.written_header]

    def with_rows(self, rows: Iterable[Sequence[str]]) -> str:
        """The text of a table with this header and separator, and with these rows."""
        text = io.StringIO(newline="")
        writer = csv.writer(text, delimiter=self.mark, lineterminator="\n")
        writer.writerows([self.written_header, *rows])
        return text.getvalue()

    def columns(
        self, *, as_text: bool = False, texts: Collection[str | None] = ()
    ) -> dict[str, Any]:
        """Columns of pyarrow by name. `as_text`, `texts`: all or some with cells as they are
        written. FolderError: the file can't be read."""
        require_extra("pyarrow", why=self.path.name)
        import pyarrow  # type: ignore[import-untyped]
        from pyarrow import csv as reader

        names = self.header()
        written = zip(self.written_header, names, strict=True)
        plain = [name for name, bare in written if as_text or bare in texts]
        kinds = dict.fromkeys(plain, pyarrow.string())
        if '"' in self.text:
            list(self.rows())  # pyarrow takes quotes that do not end
        with one_line(self.path, FolderError), self._naming_lines():
            table = reader.read_csv(
                io.BytesIO(self.text.encode()),
                # A thread of pyarrow that still runs when Python ends aborts it now and then.
                read_options=reader.ReadOptions(use_threads=False),
                parse_options=reader.ParseOptions(delimiter=self.mark, newlines_in_values=True),
                convert_options=reader.ConvertOptions(
                    column_types=kinds, decimal_point=self.decimal
                ),
            )
        return dict(zip(names, table.columns, strict=True))

    def place_of(self, row: int) -> str:
        """The words for a row, counted from 0: its line in the file."""
        return f"line {self._lines[row + 1]}"

    @cached_property
    def _lines(self) -> list[int]:
        return [line for line, _ in self.records()]

    @contextmanager
    def _naming_lines(self) -> Iterator[None]:
        """Turns an error about a row with too few or too many cells into one that names its line,
        without its content."""
        try:
            yield
        except (OSError, ValueError):
            wrong = self._wrong_row()
            if wrong is None:
                raise
            raise wrong from None  # the reader's own message has cells

    def _wrong_row(self) -> FolderError | None:
        try:
            for _ in self.rows():
                pass
        except FolderError as error:
            return error
        return None


def _cells_in(header: str, mark: str) -> int:
    """The number of cells of a header; 0 if they are too long."""
    try:
        return len(next(csv.reader([header], delimiter=mark), []))
    except csv.Error:
        return 0


@contextmanager
def lines_of(path: Path, table: CsvTable | None = None) -> Iterator[None]:
    """Adds the file to an error about a row, and the line in it if it is CSV."""
    try:
        yield
    except CellError as error:
        rows = [row for row in (error.row, error.other) if row is not None]
        places = [f"row {row}" for row in rows]
        if table is not None:
            with suppress(IndexError, FolderError):
                places = [table.place_of(row) for row in rows]
        raise FolderError(f"{path}, {' and '.join(places)}: {error.problem}") from None
