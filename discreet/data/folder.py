"""Users' own data: a folder with tables and a short description, `data.toml`.

    format = "csv"                  # csv, parquet, jsonl, npz, idx
    file = "train.csv"              # for idx: the file of the inputs
    target = "label"                # the column or array to predict; for idx: the labels' file
    inputs = ["p0", "p1"]           # columns in order, or the name of an array
                                    # (default: all other columns, but jsonl needs it or
                                    # [columns]; or the array "inputs")
    low = 0                         # public ranges, one for all inputs or one for each: low..high
    high = 16                       # is mapped to the range of the task's inputs, 0..1 or -1..1
    classes = ["benign", "malign"]  # if classes are words; each is numbered by its place here
    task = "digits"                 # left out: any task that they fit

and for `data.name=folder`, a task that only these data have (its inputs lie in -1..1 if low and
high are given):

    test = "test.csv"               # the public test set, of the same form; left out: there is none
    test_target = "test-labels"     # for idx: the file of its labels
    class_words = { ja = "yes" }    # how this site writes classes
    num_classes = 3                 # if classes are numbers
    target_low = 0                  # regression, in place of classes: the target's public range
    target_high = 500
    event = "died"                  # 1, or the second class, if an event ended the time in target
    times = [90, 365, 730]          # the ends of the intervals of a public grid
    targets = ["mild", "severe"]    # in place of target: several columns or arrays. They are
                                    # labels, each 0 or 1, or with target_low and target_high
                                    # (one or several) numbers
    shape = [1, 28, 28]             # of one input; left out: the array's, or the number of columns
    owner = "patient"               # the column or array of whose each row is, for
                                    # data.partition=natural or owners, and
                                    # privacy.example.unit=owner; left out, of npz: "owners" if
                                    # there is such an array
    ids = "folded"                  # spellings of an owner that differ by case, form, leading zeros
                                    # or a trailing .0 are one person; "exact": each text is one of
                                    # its own. Left out: refused
    model = "mine.model:build"      # at a node: the one model.name outside Discreet that may be
                                    # trained on these data
    public = true                   # nobody's data: discreet simulate --baseline may train on them
                                    # without privacy

in place of inputs, low and high, for the columns of a table as it is (docs/guide/csv.md; `discreet
data check` proposes them):

    separator = ";"                 # of CSV; left out: detected. A byte order mark is detected, too
    decimal = ","                   # left out: "."
    thousands = "."                 # left out: numbers have no separators of thousands
    encoding = "cp1252"             # left out: UTF-8, or what a byte order mark says
    unconfirmed = ["age"]           # columns whose range or levels were read from the data: no run
                                    # starts with any
    [columns]                       # `Column` in columns.py explains every key
    age = [0, 110]                  # short for { kind = "number", low = 0, high = 110 }
    sex = ["F", "M"]                # short for { kind = "category", levels = ["F", "M"] }
    hba1c = { kind = "number", low = 3, high = 14, missing = "middle" }
    sodium = { kind = "number", low = 110, high = 170, curves = 3 }  # a linear model bends
    dose = { kind = "number", low = 0, high = 10, named = "Dosis", factor = 0.001 }
                                    # how this site writes it (docs/guide/sites.md)
    crp = { kind = "number", low = 0, high = 500, empty = ["k.A."], below = "half", unit = "mg/l" }
    icd = { kind = "category", fold = "icd10" }  # codes count as their chapters
    [[pairs]]                       # what one column does depends on the other
    columns = ["age", "sex"]

and for sequences, a class for each position of an input:

    tokens = 30                     # inputs are whole numbers in 0..29, which a model reads as
                                    # int64, and no quantities
    padding = -1                    # at a position with this target there is nothing to predict;
                                    # `target` is an array (n, length), or `targets` a column each
    next_token = true               # in place of target: each position's target is the next token
                                    # of the inputs, which are one longer than the sequences; a
                                    # token equal to `padding` is no target

and for text, read by the tokenizer of a pretrained transformer:

    text = "message"                # the column of the texts, in place of inputs
    max_tokens = 64                 # of a row: longer texts are cut there, shorter ones padded
    model = "hf:../minilm"          # its folder, beside this one or absolute; at a node the one
                                    # whose weights it trains
    next_token = true               # in place of target, for a language model: padding is no target

A range, a number of classes or tokens, or the length of sequences is a constant that is known
without looking at the data: a minimum, a mean or a count of what occurs would be a release without
an account.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from discreet.data.cell_reading import CellError
from discreet.data.cells import (
    INDEX,
    encoded_cells,
    numbered,
    numbers_in,
    owner_cells,
    owner_numbers,
    same_names,
)
from discreet.data.csv_table import CsvTable, lines_of
from discreet.data.description import DESCRIPTION, DataDescription, read_description
from discreet.data.empty_cells import is_empty
from discreet.data.examples import SHAPES, Examples, Task, TaskShape
from discreet.data.table_files import file_in, open_table
from discreet.data.targets import CLASSES, SEQUENCES, Array, FolderError, targets_of
from discreet.per_example.objective import PADDING
from discreet.privacy.person import EXACT
from discreet.settings.data import FOLDER

logger = logging.getLogger("discreet")

SCALE = (-1.0, 1.0)
OWNERS = "owners"  # the array of an npz file that says whose each row is, unless `owner` does
# The contents of a file: inputs (n, ...), numbered targets (n,) or (n, targets), owners (n,); None
# if it has none.
_Table = tuple[Array, Array | None, Array | None]


def load_folder(path: str | None) -> Task:
    """The task that the folder `path` describes: training examples, public test set and owners if
    it names them."""
    if path is None:
        raise FolderError(f"data.path: data.name={FOLDER} needs a folder with {DESCRIPTION}")
    folder = Path(path).expanduser().resolve()
    description = with_inputs(folder, read_description(folder))
    train, shape, owners = _labelled(folder, description)
    test = train.subset(torch.zeros(0, dtype=torch.int64))
    if description.test is not None:
        test, tested = _test_of(folder, description, shape)
        if owners is not None and tested is not None:
            test_path = folder / description.test
            with lines_in(test_path, description):
                _refuse_shared(description, owners, tested)
    return Task(FOLDER, train, test, shape, description, folder)


def _test_of(
    folder: Path, description: DataDescription, shape: TaskShape
) -> tuple[Examples, Array | None]:
    """The public test set, with its owners if it has that column."""
    target = description.test_target or description.target
    changed: dict[str, Any] = {"file": description.test, "target": target, "owner": None}
    test = description.model_copy(update=changed)
    if description.owner is not None and description.format != "idx":
        there = opened(file_in(folder, test.file), test)
        test = test.model_copy(
            update={"owner": description.owner if description.owner in there else None}
        )
    examples, _, owners = _labelled(folder, test, shape)
    return examples, owners


def _refuse_shared(description: DataDescription, owners: Array, tested: Array) -> None:
    """Raises CellError for an owner with rows in both tables: the test set is public, so it
    protects nobody in it."""
    tested_names = same_names(tested, description.ids)
    shared = np.flatnonzero(np.isin(tested_names, same_names(owners, description.ids)))
    if len(shared):
        people = len(np.unique(tested_names[shared]))
        who = description.owner or OWNERS
        problem = f"this {who} has rows in {description.file} too, as {people} in all have"
        raise CellError(
            int(shared[0]),
            f"{problem}: nobody in the public test set may also be in the protected data",
        )


@lru_cache(maxsize=4)
def node_table(folder: Path, task: str) -> tuple[Examples, TaskShape]:
    """The training examples in a node's own folder, and their shape, for a task of `SHAPES` or the
    one that the folder describes (`data.name=folder`). Read once per process.

    Raises:
      FolderError: the problem, with the file, the row or the class.
    """
    folder = folder.expanduser().resolve()
    if task not in (*SHAPES, FOLDER):
        known = ", ".join(sorted((*SHAPES, FOLDER)))
        raise FolderError(f"there is no task {task!r}; a node's own data can be given for {known}")
    description = read_description(folder)
    # Else a server could name the task whose classes are too few for somebody's label.
    declared = description.task or FOLDER
    if task != declared:
        raise FolderError(
            f'{folder / DESCRIPTION} declares these data for {declared}: with task = "{task}" they '
            f"are for {task}, and for nothing else"
        )
    examples, shape, _ = _labelled(folder, description, SHAPES.get(task))
    return examples, shape


def _labelled(
    folder: Path, description: DataDescription, shape: TaskShape | None = None
) -> tuple[Examples, TaskShape, Array | None]:
    """A table with targets, its shape (computed unless given), and its owners if it has any."""
    path = folder / description.file
    with lines_in(path, description):
        inputs, targets, owners = _read(folder, description)
        if targets is None:
            raise FolderError(f"{path}: inputs must not name the target")
        shape = shape or _shape_of(folder, description, inputs, targets)
        read = _inputs_of(inputs, description, shape, str(path))
        predicted = _targets_of(targets, len(inputs), description, shape, str(path))
        if owners is None:
            return Examples(read, predicted), shape, None
        if owners.shape != (len(read),):
            raise FolderError(f"{path} has {len(read)} rows of inputs, but {len(owners)} owners")
        numbers = torch.from_numpy(owner_numbers(owners))
        return Examples(read, predicted, numbers), shape, owners


def of_file(path: Path, description: DataDescription) -> DataDescription:
    """The description for another file, whose format its ending tells."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in ("csv", "parquet", "jsonl", "npz"):
        raise FolderError(f"{path}: a file of inputs must end in .csv, .parquet, .jsonl or .npz")
    return description.model_copy(update={"format": kind, "file": path.name})


def read_file(
    path: Path, description: DataDescription, shape: TaskShape, *, id_column: str | None = None
) -> tuple[torch.Tensor, torch.Tensor | None, Array | None]:
    """Inputs (n, *input_shape) of a file that ends in .csv, .parquet, .jsonl or .npz, its targets
    if every row has them, and the cells of a column that identifies the rows. The description names
    the columns or arrays, and gives their range."""
    description = of_file(path, description).model_copy(update={"owner": id_column, "ids": EXACT})
    with lines_in(path, description):
        inputs, targets, ids = _read(path.parent, description, may_lack_targets=True)
        read = _inputs_of(inputs, description, shape, str(path))
        count = len(inputs)
        return (
            read,
            None if targets is None else _targets_of(targets, count, description, shape, str(path)),
            None if id_column is None else ids,
        )


def _shape_of(
    folder: Path, description: DataDescription, inputs: Array, targets: Array
) -> TaskShape:
    tokens = description.tokens or 0
    if not tokens and description.text is not None:
        from discreet.data.text import num_tokens_in

        tokens = num_tokens_in(_weights_of(description))
    counted = description.num_classes or len(description.classes) * (not description.times)
    target = description.predicted(targets)
    num_classes = counted or tokens * description.next_token
    if target.kind in (CLASSES, SEQUENCES) and num_classes < 2:
        rule = (
            "classes or num_classes (the number of classes that occur is not public), "
            "or for numbers target_low and target_high"
        )
        raise FolderError(f"{folder / DESCRIPTION} must give {rule}")
    return TaskShape(
        description.shape or tuple(inputs.shape[1:]), num_classes, SCALE, tokens, target
    )


def _targets_of(
    values: Array, count: int, description: DataDescription, shape: TaskShape, what: str
) -> torch.Tensor:
    if len(values) != count:
        raise FolderError(f"{what} has {count} rows of inputs, but {len(values)} targets")
    return targets_of(
        values, shape.target, num_classes=shape.num_classes, what=what, padding=description.mark
    )


def _inputs_of(
    values: Array, description: DataDescription, shape: TaskShape, what: str
) -> torch.Tensor:
    if values.ndim < 1 or values.dtype.kind not in "iufb":
        raise FolderError(f"{what}: inputs must be numbers, a row for each example")
    size = math.prod(shape.input_shape)
    found = math.prod(values.shape[1:])
    if found == 0:
        raise FolderError(f"{what} has no inputs: every column is a target or the owner")
    if found != size:
        raise FolderError(
            f"{what} do not fit: each row has {found} inputs, but the shape "
            f"{shape.input_shape} needs {size}"
        )
    if shape.num_tokens:
        with np.errstate(invalid="ignore"):  # of NaN, which is no whole number
            whole = np.asarray(values, np.int64)
        if not (
            np.array_equal(whole, values) and np.all((whole >= 0) & (whole < shape.num_tokens))
        ):
            raise FolderError(
                f"{what} do not fit: inputs must be whole numbers in [0, {shape.num_tokens})"
            )
        return torch.from_numpy(whole.reshape(-1, *shape.input_shape))
    numbers = np.asarray(values, np.float64).reshape(len(values), size)
    wrong = np.flatnonzero(~np.isfinite(numbers).all(axis=1))
    if len(wrong):
        raise CellError(int(wrong[0]), "an input is missing, NaN or infinite")
    if description.low is not None:
        share = _within_range(numbers, description, what)
        numbers = shape.scale[0] + share * (shape.scale[1] - shape.scale[0])
    large = np.flatnonzero(~(np.abs(numbers) <= np.finfo(np.float32).max).all(axis=1))
    if len(large):
        raise CellError(int(large[0]), "an input is too large for a model, which reads float32")
    return torch.from_numpy(numbers.astype(np.float32).reshape(-1, *shape.input_shape))


def _within_range(numbers: Array, description: DataDescription, what: str) -> Array:
    """Numbers (rows, inputs) as shares of the range `low`..`high`, in 0 .. 1."""
    low, high = (np.asarray(bound, np.float64) for bound in (description.low, description.high))
    size = numbers.shape[1]
    if not {low.size, high.size} <= {1, size}:
        raise FolderError(f"low and high must be one number or {size} of them")
    # Clamped: a value outside the public range must not reveal its distance from it.
    outside = np.count_nonzero((numbers < low) | (numbers > high))
    if outside:
        said = "%s: %d of %d values lie outside low..high, and are clamped"
        logger.warning(said, what, outside, numbers.size)
    return np.clip((numbers - low) / (high - low), 0.0, 1.0)


def _read_images(folder: Path, description: DataDescription) -> _Table:
    """The images and labels of two idx files."""
    if description.owner is not None or description.target is None:
        raise FolderError(
            "an idx file has one array: target must be given, without targets and owner"
        )
    from discreet.data.images import read_idx

    files = file_in(folder, description.file), file_in(folder, description.target)
    try:
        images, labels = (read_idx(file) for file in files)
    except (OSError, ValueError) as error:
        raise FolderError(str(error)) from error
    return images, numbered(labels, "target", description), None


def _targets_in(
    found: Mapping[str, Any], inputs: Sequence[str], description: DataDescription
) -> Array | None:
    """The targets of a table (rows,) or (rows, targets), None if it has none but its inputs."""
    wanted = description.target_names
    if not wanted or not all(name in found and name not in inputs for name in wanted):
        return None
    columns = [numbered(np.asarray(found[name]), name, description) for name in wanted]
    if description.target is not None and description.event is None:
        return columns[0]
    return np.stack(columns, axis=1)


def _rows_without_target(found: Mapping[str, Any], description: DataDescription) -> int:
    """The number of rows of a table in which a target is empty. A word of `classes` is a target,
    though it may look empty."""
    lacking = set[int]()
    for name in description.target_names:
        for row, cell in enumerate(np.asarray(found.get(name, ())).tolist()):
            is_scalar = not isinstance(cell, list | np.ndarray)
            if is_scalar and is_empty(cell) and str(cell).strip() not in description.classes:
                lacking.add(row)
    return len(lacking)


def _read(folder: Path, description: DataDescription, *, may_lack_targets: bool = False) -> _Table:
    """The inputs, targets and owners in a file. `may_lack_targets`: an empty target is no error,
    and the table then has no targets."""
    if description.format == "idx":
        return _read_images(folder, description)
    path = file_in(folder, description.file)
    found = opened(path, description)
    owner = description.owner
    if description.format == "npz" and owner is None and OWNERS in found:
        owner = OWNERS
    names = _input_names(found, description)
    needed = (*names, owner, *description.target_names * (not may_lack_targets))
    for name in needed:
        if name is not None and name not in found:
            raise FolderError(f"{path.name} has no column or array {name}")
    inputs, counted = _inputs_in(found, names, description)
    targets = None
    if may_lack_targets and (lacking := _rows_without_target(found, description)):
        said = "%s: %d of %d rows have no target, so nothing is rated"
        logger.warning(said, path, lacking, len(inputs))
    else:
        targets = _targets_in(found, names, description)
    if description.next_token:
        targets = np.asarray(np.where(counted, inputs, PADDING)[:, 1:])
        inputs = inputs[:, :-1]
    if owner is None:
        return inputs, targets, None
    return inputs, targets, owner_cells(found[owner], owner, description.ids)


def _inputs_in(
    found: Mapping[str, Any], names: Sequence[str], description: DataDescription
) -> tuple[Array, Array | bool]:
    """The inputs of a table, and a mask that is False for padding of texts."""
    if description.text is not None and description.max_tokens is not None:
        from discreet.data.text import tokens_of

        weights = _weights_of(description)
        return tokens_of(found[description.text], weights, length=description.max_tokens)
    if description.format == "npz":
        return found[names[0]], True
    if description.columns:
        return encoded_cells(found, description), True
    nothing = np.zeros((len(next(iter(found.values()), ())), 0))
    numbers = (numbers_in(found[name], name, description.marks) for name in names)
    return np.column_stack([nothing, *numbers]), True


def _weights_of(description: DataDescription) -> Path:
    from discreet.data.text import pretrained_folder

    return pretrained_folder(description.model or "", setting=f"model in {DESCRIPTION}")


def opened(path: Path, description: DataDescription) -> dict[str, Any]:
    """The columns or arrays of a file by their names; owners, texts and words of classes in a
    CSV file, and with [columns] all of its cells, as they are written. FolderError: it can't be
    read."""
    if description.format == "csv":
        texts = [description.owner, description.text]
        if description.classes:
            texts += description.target_names
        table = csv_table(path, description)
        return table.columns(as_text=bool(description.columns), texts=texts)
    return open_table(path, description.format)


def csv_table(path: Path, description: DataDescription) -> CsvTable:
    """A CSV file in the form that a description specifies."""
    return CsvTable(path, description.separator, description.encoding, description.decimal)


def lines_in(path: Path, description: DataDescription) -> AbstractContextManager[None]:
    return lines_of(path, csv_table(path, description) if description.format == "csv" else None)


def _input_names(found: Mapping[str, Any], description: DataDescription) -> tuple[str, ...]:
    """The inputs that the description names; by default all columns except target, owner and an
    index of pandas, or the array `inputs`."""
    if description.format == "npz":
        if isinstance(description.inputs, tuple):
            raise FolderError("inputs must be the name of one array in an npz file")
        return (description.inputs or "inputs",)
    if description.text is not None:
        return (description.text,)
    if description.columns:
        return tuple(column.in_file for column in description.columns)
    if description.inputs is None:
        if description.format == "jsonl":
            raise FolderError(
                f"{DESCRIPTION}: a jsonl file needs inputs, the columns in their order, or "
                "[columns]: each line may have its keys in another order"
            )
        taken = {*description.target_names, description.owner}
        # By their names alone: a row more or less must not decide how many inputs there are.
        return tuple(name for name in found if name not in taken and name not in INDEX)
    if isinstance(description.inputs, str):
        return (description.inputs,)
    return description.inputs


def with_inputs(folder: Path, description: DataDescription) -> DataDescription:
    """The description, completed with the input columns of a folder's training table if it names
    none."""
    if (
        description.inputs
        or description.columns
        or description.format in ("npz", "idx")
        or description.text is not None
    ):
        return description
    found = opened(file_in(folder, description.file), description)
    return description.model_copy(update={"inputs": _input_names(found, description)})
