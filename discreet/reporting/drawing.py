"""Pictures as SVG whose colours are CSS variables: the page sets them for light and for dark."""

from __future__ import annotations

import io
import re
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any

# Colours that matplotlib draws with, and the variables that take their places in the SVG.
INK, MUTED, GRID, PAPER = "#00fe01", "#00fe02", "#00fe03", "#00fe04"
SERIES = tuple(f"#00fe1{number}" for number in range(8))
_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", PAPER: "--paper"} | {
    colour: f"--series-{number}" for number, colour in enumerate(SERIES)
}
_LIGHT = ("#1c2024", "#5f6872", "#e3e6ea", "#ffffff", "#2a6fcf", "#d1491f", "#0f8a66", "#8a5cd6", "#a36a00")
_DARK = ("#e8eaed", "#9aa4af", "#333a42", "#14171a", "#6aa8ff", "#ff8a5c", "#3ecf9f", "#b99bff", "#e0b040")
_LIGHT_REST, _DARK_REST = ("#c2357f", "#4d6a1e", "#5b6470"), ("#ff86c0", "#a9cf5f", "#a9b4c2")
MARKERS = "os^DvPXp"  # tell the series apart for readers who can't tell the colours apart
SIZE = (4.2, 2.7)  # inches: about as wide as a phone, so that text keeps its size there
LEGEND_LINE = 0.17  # inches

_STYLE: Any = {
    **{"svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9, "legend.fontsize": 8},
    **{"axes.edgecolor": MUTED, "axes.labelcolor": INK, "axes.facecolor": "none", "axes.grid": True},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "legend.frameon": False},
    **{"figure.facecolor": "none", "grid.color": GRID, "grid.linewidth": 0.7, "text.color": INK},
    **{"lines.linewidth": 1.6, "lines.markersize": 4, "xtick.color": MUTED, "ytick.color": MUTED},
    **{"xtick.labelcolor": INK, "ytick.labelcolor": INK},
}


@dataclass(frozen=True)
class Picture:
    """A drawing with its title, and a note that says how to read it; the note may be empty."""

    title: str
    svg: str
    note: str = ""


@contextmanager
def canvas(*, rows: int = 1) -> Iterator[tuple[Any, list[Any]]]:
    """A figure with `rows` axes below each other, in the style of the report.

    matplotlib is imported here, because it takes a second: only a program that draws pays for it.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(SIZE[0], SIZE[1] * (1 + rows) / 2), layout="constrained")
        axes = figure.subplots(rows, 1, sharex=True, squeeze=False)
        yield figure, [row[0] for row in axes]


def to_svg(figure: Any, title: str) -> str:
    """The figure, with the legend of its first axes below it, as an SVG element that a screen reader calls `title`.

    Identifiers depend on the title, so that two pictures of one page share none.
    """
    from matplotlib import rc_context

    handles, labels = figure.axes[0].get_legend_handles_labels()
    if len(labels) > 1:
        figure.set_figheight(figure.get_figheight() + LEGEND_LINE * len(labels))
        figure.legend(handles, labels, loc="outside lower left")
    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": title}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    # Coordinates to a hundredth of a point.
    text = re.sub(r' (d|x|y|transform)="[^"]*"', lambda found: re.sub(r"(\d\.\d\d)\d+", r"\1", found[0]), text)
    prefix = re.sub(r"\W+", "-", title.lower())
    text = re.sub(r'(id="|href="#|url\(#)', rf"\1{prefix}-", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)


def alone(picture: Picture) -> str:
    """The picture as an SVG file, in light or dark as the reader's system asks."""
    head, body = picture.svg.split(">", 1)
    style = f"<style>{THEMES} svg {{ background: var(--paper); font-family: system-ui, sans-serif; }}</style>"
    return f"{head}>{style}{body}\n"


def log_axis(axes: Any, side: str, values: Sequence[float]) -> None:
    """Makes the `x` or `y` axis logarithmic, with plain numbers at more ticks if `values` span under two decades."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    positive = [value for value in values if value > 0]
    narrow = bool(positive) and max(positive) < 100 * min(positive)
    getattr(axes, f"set_{side}scale")("log")
    axis = getattr(axes, f"{side}axis")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def look(number: int) -> dict[str, Any]:
    """The colour and the marker of series `number`; beyond the eighth, a thin grey line behind the others."""
    if number >= len(SERIES):
        return {"color": MUTED, "linewidth": 0.6, "alpha": 0.5, "zorder": 1}
    return {"color": SERIES[number], "marker": MARKERS[number]}


def draw_line(axes: Any, pairs: Sequence[tuple[float, float]], number: int, label: str, **more: Any) -> None:
    """A line in the look of series `number`, with some eight markers, and a label for the legend if it has a colour."""
    if pairs:
        xs, ys = zip(*pairs, strict=True)
        named = {"label": label} if number < len(SERIES) else {}
        axes.plot(xs, ys, **{**look(number), "markevery": max(1, len(xs) // 8), **named, **more})


def draw_spread(axes: Any, place: float, values: Sequence[float]) -> None:
    """A bar of one standard deviation to either side of the mean of repetitions; nothing for a single run."""
    if len(values) > 1:
        mean, deviation = statistics.fmean(values), statistics.stdev(values)
        axes.errorbar([place], [mean], yerr=[deviation], color=INK, linewidth=0.9, capsize=3, fmt="none", zorder=3)


def _theme(colours: Sequence[str]) -> str:
    return " ".join(f"{name}: {colour};" for name, colour in zip(_VARIABLES.values(), colours, strict=True))


THEMES = (
    f":root {{ color-scheme: light dark; {_theme(_LIGHT + _LIGHT_REST)} }} "
    f"@media (prefers-color-scheme: dark) {{ :root {{ {_theme(_DARK + _DARK_REST)} }} }}"
)
