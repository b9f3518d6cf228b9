"""The shapes of a linear model of a table: what each column adds to the log odds, or to a number.

The model's output is an intercept plus the sum of its shapes. Everything here follows from the
released parameters and from public facts, so it costs no epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import date
from itertools import pairwise, product
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, Field

from discreet.data.columns import CATEGORY, DATE, TEXT, Column
from discreet.data.description import DataDescription
from discreet.data.encoding import column_names, encoded_columns
from discreet.data.targets import CLASSES, NUMBERS, SURVIVAL, Array, Target

FILE = "shapes.json"
PLACES = 41  # of a curve
PLACES_OF_PAIRS = 9  # of each number in a pair
NOISE = 1.96  # deviations: 95 % of runs that differ in their noise alone
ANOTHER = "another"
EMPTY = "empty"
BELOW = "below"
FLAGS = (BELOW, EMPTY)  # places of a number that are no values


class _Shape(BaseModel):
    target: str
    columns: Annotated[list[str], Field(min_length=1, max_length=2)]
    kind: Literal["curve", "bars", "map"]
    places: list[list[str | float]]
    effect: Annotated[list[float], Field(min_length=1)]
    noise: list[float] | None


class _Shapes(BaseModel):
    intercepts: Annotated[dict[str, float], Field(min_length=1)]
    shapes: list[_Shape]


def check_shapes(found: object) -> None:
    """Raises ValueError if this is not the content of shapes.json."""
    for shape in _Shapes.model_validate(found).shapes:
        rows = len(shape.effect)
        counts = [len({*each}) for each in zip(*shape.places, strict=True)]
        are_all = len(counts) == len(shape.columns) and math.prod(counts) == rows
        lengths = {len(shape.places), len(shape.noise or shape.effect), rows}
        if not are_all or len(lengths) > 1:
            raise ValueError(f"the shape of {shape.columns[0]} is incomplete")


@dataclass(frozen=True, eq=False)
class LinearWeights:
    """A linear model.

    Attributes:
      weight, bias: (outputs, inputs) and (outputs,).
      stddev: the standard deviation of each parameter by noise alone; None if it is not known.
      target: what is predicted.
      classes: the names of the classes.
    """

    weight: Array
    bias: Array
    stddev: float | None
    target: Target
    classes: tuple[str, ...] = ()

    def effects(self) -> Iterator[tuple[str, Array, float, float | None]]:
        """(name, weights, intercept, deviation of a weight) of each output that people read: the
        log odds of the second of two classes, of each of several against their mean, or of a
        label; or a number in its own units."""
        if self.target.kind == CLASSES and len(self.weight) == 2:
            one = self._combined(np.array([-1.0, 1.0]))
            yield (f"log odds of {self._name(1)}", *one)
            return
        for place in range(len(self.weight)):
            signs = np.eye(len(self.weight))[place]
            name = self._name(place)
            if self.target.kind == CLASSES:
                yield (
                    f"log odds of {name} against the mean",
                    *self._combined(signs - signs.mean()),
                )
            elif self.target.kind == NUMBERS:
                low = self.target.low[place]
                high = self.target.high[place]
                weights, intercept, stddev = self._combined(signs * (high - low) / 2)
                yield name, weights, intercept + (low + high) / 2, stddev
            elif self.target.kind == SURVIVAL:
                yield (f"log odds of the event by {name}, if not before", *self._combined(signs))
            else:
                yield (f"log odds of {name}", *self._combined(signs))

    def _name(self, place: int) -> str:
        names = self.target.names or self.classes
        return names[place] if names else f"class {place}"

    def _combined(self, signs: Array) -> tuple[Array, float, float | None]:
        spread = None if self.stddev is None else self.stddev * float(np.linalg.norm(signs))
        return signs @ self.weight, float(signs @ self.bias), spread


def shapes_of(model: LinearWeights, description: DataDescription) -> dict[str, Any]:
    """The content of shapes.json. A text has no shape; its words are part of the intercept's
    rest."""
    known = {column.name: column for column in description.columns}
    names = column_names(known.values(), description.pairs)
    shapes = list[dict[str, Any]]()
    intercepts = {}
    for name, weights, intercept, stddev in model.effects():
        start = 0
        for columns in [*((each,) for each in known), *description.pairs]:
            parts = _Parts(tuple(known[each] for each in columns))
            own = weights[start : start + parts.width]
            start += parts.width
            if not parts.readable:
                continue
            effect = parts.encoded @ own
            centre = parts.encoded[parts.ordinary].mean(axis=0)
            intercept += float(centre @ own)
            band = None
            if stddev is not None:
                band = NOISE * stddev * np.linalg.norm(parts.encoded - centre, axis=1)
            shapes.append(parts.facts(name, effect - float(centre @ own), band))
        assert start == len(names)
        intercepts[name] = intercept
    return {"intercepts": intercepts, "shapes": shapes}


class _Parts:
    """The places at which the shape of a column, or of a pair of columns, is read."""

    def __init__(self, columns: tuple[Column, ...]) -> None:
        self.columns = columns
        pair = len(columns) == 2
        self.readable = all(column.kind != TEXT for column in columns)
        self.width = int(np.prod([len(each.crossed if pair else each.outputs) for each in columns]))
        if not self.readable:
            return
        shares = np.linspace(0, 1, PLACES_OF_PAIRS if pair else PLACES)
        chosen = list(product(*(cells_of(column, shares, flags=not pair) for column in columns)))
        self.labels = [[label for label, _ in place] for place in chosen]
        cells = zip(*([cell for _, cell in place] for place in chosen), strict=True)
        table = {column.name: list(each) for column, each in zip(columns, cells, strict=True)}
        pairs = [(columns[0].name, columns[1].name)] if pair else []
        plain = [site_free(column) for column in columns]
        self.encoded = encoded_columns(table, plain, pairs)[:, -self.width :]
        self.ordinary = [not {*FLAGS} & {*labels} for labels in self.labels]

    def facts(self, target: str, effect: Array, band: Array | None) -> dict[str, Any]:
        """The shape as JSON has it."""
        kinds = {True: "bars", False: "curve"}
        bars = self.columns[0].kind == CATEGORY or bool(self.columns[0].bins)
        return {
            "target": target,
            "columns": [column.name for column in self.columns],
            "kind": "map" if len(self.columns) == 2 else kinds[bars],
            "places": self.labels,
            "effect": effect.round(6).tolist(),
            "noise": None if band is None else band.round(6).tolist(),
        }


def site_free(column: Column) -> Column:
    """A column without what one site writes otherwise: its cells are in the run's own words."""
    return replace(column, named=None, words=(), factor=1.0, format=(), empty=(), unit=None)


_Place = tuple[str | float, Any]  # a label, and the cell at which a column is read


def cells_of(column: Column, shares: Array, *, flags: bool) -> list[_Place]:
    """The places at which a column is read, in order: these shares of a range, and with `flags` one
    below a limit and an empty one, if there may be any."""
    found: list[_Place]
    empty = flags and column.missing is not None
    if column.kind == CATEGORY:
        found = [*((level, level) for level in column.levels), (ANOTHER, "\0")]
        empty = column.missing == CATEGORY
    elif column.bins:
        ends = (float(column.low or 0), *column.bins, float(column.high or 0))
        _, *cuts, _ = _short(np.array(ends))
        between = [f"{low} to {high}" for low, high in pairwise(cuts)]
        groups = [f"below {cuts[0]}", *between, f"from {cuts[-1]}"]
        found = list(zip(groups, ends[:-1], strict=True))
    elif column.kind == DATE:
        first, last = (
            date.fromisoformat(str(end)).toordinal() for end in (column.low, column.high)
        )
        days = (first + shares * (last - first)).round().astype(int).tolist()
        found = [(str(day), day) for day in map(date.fromordinal, dict.fromkeys(days))]
    else:
        ends = column.points or (float(column.low or 0), float(column.high or 0))
        values = np.unique(np.interp(shares, np.linspace(0, 1, len(ends)), ends))
        labels = np.array(_short(values), np.float64).clip(values[0], values[-1])
        found = list(zip(labels.tolist(), values.tolist(), strict=True))
    if column.below is not None and flags:
        found.append((BELOW, f"<{2 * float(column.low or 0)}"))
    if empty:
        found.append((EMPTY, None))
    return found


def _short(values: Array) -> list[str]:
    """Rising values with the fewest digits, six at least, that move none by more than a hundredth
    of a step."""
    steps = np.diff(values)
    allowed = np.minimum(np.append(steps, np.inf), np.append(np.inf, steps)) / 100
    for digits in range(6, 17):
        texts = [f"{value:.{digits}g}" for value in values]
        if (np.abs(np.array(texts, np.float64) - values) <= allowed).all():
            return texts
    return [f"{value:.17g}" for value in values]


def moved_words(shape: Mapping[str, Any]) -> str:
    """A sentence on a shape that was projected after training; empty for others."""
    if "way" not in shape:
        return ""
    return (
        f"{shape['columns'][0]} was made to {shape['way']} after training ({shape['target']}), "
        f"which moved it by at most {shape['moved']:.2g}."
    )


def shape_rows(found: Mapping[str, Any]) -> Iterator[list[object]]:
    """The rows of shapes.csv, with a header; a pair has a second place."""
    yield ["target", "column", "place", "second_column", "second_place", "effect", "noise"]
    for name, value in found["intercepts"].items():
        yield [name, "intercept", "", "", "", value, ""]
    for shape in found["shapes"]:
        bands = shape["noise"] or [""] * len(shape["effect"])
        for labels, effect, noise in zip(shape["places"], shape["effect"], bands, strict=True):
            names = [*shape["columns"], ""][:2]
            first, second = [*labels, ""][:2]
            yield [shape["target"], names[0], first, names[1], second, effect, noise]
