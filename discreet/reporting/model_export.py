"""A run's model as a folder that PyTorch and scikit-learn load without Discreet."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from discreet.data import cell_reading, columns, empty_cells, encoding
from discreet.data.columns import CATEGORY, DATE, TEXT, Column
from discreet.data.description import DataDescription
from discreet.data.targets import CLASSES, LABELS, NUMBERS, SURVIVAL
from discreet.reporting.interpret_form import interpret_form
from discreet.reporting.model_card import SHAPES_FOLDER, model_card
from discreet.reporting.records import read_runs
from discreet.reporting.shape_pictures import shape_pictures
from discreet.run_files.csv_text import csv_text
from discreet.run_files.model_description import FILE, read_facts
from discreet.run_files.predictions import SavedModel, load_model
from discreet.run_files.shapes import shape_rows
from discreet.run_files.whole_files import new_folder
from discreet.settings.data import NormaliserConfig
from discreet.settings.rules import ConfigError, require_extra

TEMPLATES = Path(__file__).parent / "exported"
PT2 = "model.pt2"
# The lines of the example for classes, which are replaced for other targets.
OF_CLASSES = (
    "print(model.classes_, model.predict_proba(rows))",
    "print(network(inputs).softmax(dim=1))",
)
LINES = {
    CLASSES: OF_CLASSES,
    LABELS: ("print(model.predict_proba(rows))", "print(network(inputs).sigmoid())"),
    NUMBERS: (
        "print(model.predict(rows))",
        "print(network(inputs))  # in -1..1 of each number's public range",
    ),
    SURVIVAL: (
        "print(model.predict_proba(rows))  # of no event until each time",
        "print((1 - network(inputs).sigmoid()).cumprod(dim=1))",
    ),
}
EXAMPLES = 2  # rows of example.csv, made up from public facts


class Normalised(nn.Module):
    """A model after its normaliser, so that the exported model reads encoded rows."""

    def __init__(self, model: nn.Module, by: NormaliserConfig, dimensions: int) -> None:
        super().__init__()
        shape = (1, -1, *(1,) * (dimensions - 1))
        self.model = model
        self.register_buffer("means", torch.tensor(by.means).reshape(shape))
        self.register_buffer("deviations", torch.tensor(by.deviations).reshape(shape))

    def forward(self, inputs: Tensor) -> Tensor:
        """The outputs for inputs (n, *input_shape)."""
        outputs: Tensor = self.model(
            (inputs - self.get_buffer("means")) / self.get_buffer("deviations")
        )
        return outputs


def export_model(run: Path, folder: Path) -> str:
    """Writes the folder, runs its example, and returns the example's output.

    Raises ConfigError: the run has no model, or one of an older version or a kind that can't be
    exported; the folder exists already; or the exported model gives other numbers.
    """
    saved = load_model(run)
    facts = read_facts(run)
    _check(saved, facts, folder)
    assert facts is not None
    try:
        with new_folder(folder) as made:
            return _fill(made, run, saved, facts)
    except OSError as error:
        raise ConfigError(f"{folder} can't be made: {error}") from error


def _fill(folder: Path, run: Path, saved: SavedModel, facts: dict[str, Any]) -> str:
    """Writes the files, and returns the example's output."""
    for name in ("model.safetensors", FILE):
        shutil.copy(run / name, folder)
    for module in (cell_reading, columns, empty_cells, encoding):
        _copy_code(Path(str(module.__file__)), folder)
    shutil.copy(TEMPLATES / "classifier.txt", folder / "classifier.py")
    example = _example_for(saved.shape.target.kind)
    (folder / "example.py").write_text(example)
    _save_program(saved, folder / PT2)
    (folder / "example.csv").write_text(_example_rows(saved.description, facts))
    said = _run_example(folder)
    (record,) = read_runs([run.resolve()])
    if record.shapes is not None:
        _write_shapes(record.shapes, folder)
    card = model_card(record, facts, example=example, said=said)
    (folder / "README.md").write_text(card)
    return said


def _copy_code(path: Path, folder: Path) -> None:
    """Copies a file that imports only files that are copied, too."""
    alone = path.read_text().replace("from discreet.data.", "from ")
    (folder / path.name).write_text(alone)


def _write_shapes(found: Mapping[str, Any], folder: Path) -> None:
    """Writes the shapes as numbers, in the form of the package interpret, and as pictures."""
    (folder / "shapes.csv").write_text(csv_text(shape_rows(found)))
    (folder / "interpret.json").write_text(json.dumps(interpret_form(found), ensure_ascii=False))
    (folder / SHAPES_FOLDER).mkdir()
    for number, each in enumerate(shape_pictures(found), start=1):
        (folder / SHAPES_FOLDER / f"{number}.svg").write_text(each.svg)


def _check(saved: SavedModel, facts: dict[str, Any] | None, folder: Path) -> None:
    if facts is None:
        raise ConfigError(f"the run has no {FILE}: an older version of Discreet wrote it")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty: name a folder that is not there yet")
    if saved.shape.target.kind not in LINES or saved.shape.num_tokens:
        raise ConfigError(
            "texts and sequences are not exported: their model folder is Hugging Face's own"
        )
    require_extra("pandas", why="discreet export, which runs the example that it writes,")


def _example_for(kind: str) -> str:
    text = (TEMPLATES / "example.txt").read_text()
    for old, new in zip(OF_CLASSES, LINES[kind], strict=True):
        text = text.replace(old, new)
    return text


def _save_program(saved: SavedModel, path: Path) -> None:
    """Saves the network with its normaliser by torch.export, for any number of rows; it is checked
    on made-up rows."""
    by = saved.normaliser
    shape = saved.shape.input_shape
    model = Normalised(saved.model, by, len(shape)) if by.means else saved.model
    inputs = torch.rand(3, *shape, generator=torch.Generator().manual_seed(20753)) * 2 - 1
    program = torch.export.export(
        model.eval(), (inputs,), dynamic_shapes=({0: torch.export.Dim("rows")},)
    )
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it names places of this machine
    torch.export.save(program, str(path))
    with torch.no_grad():
        wanted = model(inputs[:2])
        found = torch.export.load(str(path)).module()(inputs[:2])
    if not torch.allclose(wanted, found, atol=1e-5):
        raise ConfigError("the exported model gives other numbers than the model of the run")


def _example_rows(description: DataDescription | None, facts: dict[str, Any]) -> str:
    """Rows made up from the public facts of the columns, or zeros."""
    if description is not None and description.columns:
        names = [column.in_file for column in description.columns]
        cells = [_cell(column, description.decimal) for column in description.columns]
        return csv_text([names, *(cells,) * EXAMPLES])
    names = facts["inputs"] or [f"x{place}" for place in range(int(np.prod(facts["input_shape"])))]
    return csv_text([names, *([0.0] * len(names),) * EXAMPLES])


def _cell(column: Column, decimal: str) -> object:
    if column.kind == CATEGORY:
        return column.levels[0]
    if column.kind == TEXT:
        return "words"
    if column.kind == DATE:
        return _written_day(column)
    return str(column.low).replace(".", decimal)


def _written_day(column: Column) -> str:
    day = date.fromisoformat(str(column.low))
    if column.format:
        return day.strftime(column.format[0])
    return day.isoformat()


def _run_example(folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "example.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    if done.returncode:
        raise ConfigError(f"{folder / 'example.py'} failed: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout
