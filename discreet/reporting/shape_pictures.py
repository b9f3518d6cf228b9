"""Pictures of the shapes of a linear model: curves with a band of noise, bars, and maps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import date
from typing import Any

import numpy as np

from discreet.reporting.svg_style import INK, MUTED, SERIES, Picture, picture
from discreet.run_files.shapes import BELOW, EMPTY, FLAGS, moved_words

_BAND = "Shaded or barred: at least 95 % of runs that differ in their noise alone lie within."
_NO_BAND = "How far noise moves it is not known in advance for this mechanism."
_SUM = "The model is the intercept plus the sum of its shapes."


def shape_pictures(found: Mapping[str, Any]) -> Iterator[Picture]:
    """A picture of each shape."""
    draw = {"curve": _curve, "bars": _bars, "map": _map}
    several = len(found["intercepts"]) > 1
    for shape in found["shapes"]:
        title = " and ".join(shape["columns"])
        if several:
            title += f": {shape['target'].removeprefix('log odds of ')}"
        yield draw[shape["kind"]](f"Shape of {title}", shape)


def _note(shape: Mapping[str, Any]) -> str:
    band = _BAND if shape["noise"] else _NO_BAND
    return " ".join(filter(None, (moved_words(shape), band, _SUM)))


def _curve(title: str, shape: Mapping[str, Any]) -> Picture:
    rows = [row for row in _rows(shape) if row[0][0] not in FLAGS]
    flags = {row[0][0]: row[1] for row in _rows(shape) if row[0][0] in FLAGS}

    def draw(axes: Any) -> str:
        places = [_place(labels[0]) for labels, _, _ in rows]
        effects = [effect for _, effect, _ in rows]
        low = [effect - noise for _, effect, noise in rows]
        high = [effect + noise for _, effect, noise in rows]
        axes.axhline(0, color=MUTED, linewidth=0.9, linestyle="dotted")
        axes.fill_between(places, low, high, color=SERIES[0], alpha=0.2, linewidth=0)
        axes.plot(places, effects, color=SERIES[0])
        axes.set_xlabel(shape["columns"][0])
        axes.set_ylabel(shape["target"])
        said = ""
        if BELOW in flags:
            said += f"A cell below a limit adds {flags[BELOW]:.2g} at the low end. "
        if EMPTY in flags:
            said += f"An empty cell adds {flags[EMPTY]:.2g}. "
        return said + _note(shape)

    return picture(title, draw)


def _place(label: str | float) -> Any:
    return date.fromisoformat(label) if isinstance(label, str) else label


def _bars(title: str, shape: Mapping[str, Any]) -> Picture:
    def draw(axes: Any) -> str:
        rows = _rows(shape)
        labels = [str(labels[0]) for labels, _, _ in rows]
        places = range(len(rows))
        axes.bar(places, [effect for _, effect, _ in rows], color=SERIES[0], width=0.6)
        errors = [noise for *_, noise in rows]
        axes.errorbar(places, [row[1] for row in rows], errors, fmt="none", ecolor=INK, capsize=3)
        axes.set_xticks(places, labels, rotation=45 if len(rows) > 4 else 0)
        axes.set_xlabel(shape["columns"][0])
        axes.set_ylabel(shape["target"])
        return _note(shape)

    return picture(title, draw)


def _map(title: str, shape: Mapping[str, Any]) -> Picture:
    def draw(axes: Any) -> str:
        first, second = (
            list(dict.fromkeys(labels[place] for labels in shape["places"])) for place in (0, 1)
        )
        fields = np.array(shape["effect"]).reshape(len(first), len(second))
        largest = float(np.abs(fields).max()) or 1.0
        drawn = axes.pcolormesh(fields, cmap="coolwarm", vmin=-largest, vmax=largest)
        axes.figure.colorbar(drawn, ax=axes)
        axes.set_xticks(np.arange(len(second)) + 0.5, _texts(second))
        axes.set_yticks(np.arange(len(first)) + 0.5, _texts(first))
        axes.set_ylabel(shape["columns"][0])
        axes.set_xlabel(shape["columns"][1])
        noise = ""
        if shape["noise"]:
            noise = f"Noise moves a field by at most {max(shape['noise']):.2g}. "
        return f"{shape['target']}. {noise}It comes on top of the shapes of both columns."

    return picture(title, draw)


def _texts(labels: list[str | float]) -> list[str]:
    """The labels, of numbers with the fewest digits, three at least, that keep them apart."""
    for digits in range(3, 17):
        texts = [each if isinstance(each, str) else f"{each:.{digits}g}" for each in labels]
        if len({*texts}) == len(labels):
            return texts
    return list(map(str, labels))


def _rows(shape: Mapping[str, Any]) -> list[tuple[list[Any], float, float]]:
    """(labels, effect, noise) of each place; no noise where it is not known."""
    noise = shape["noise"] or [0.0] * len(shape["effect"])
    return list(zip(shape["places"], shape["effect"], noise, strict=True))
