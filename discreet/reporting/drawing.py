"""Pictures as SVG whose colours are CSS variables: the page sets them for light and for dark."""

from __future__ import annotations

import io
import math
import re
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any

Pairs = Sequence[tuple[float, float]]
REST = -1  # the number of a series that has no colour of its own

# Stand-ins that matplotlib can draw with, and the variables that take their places in the SVG.
INK, MUTED, GRID, PAPER = "#00fe01", "#00fe02", "#00fe03", "#00fe04"
SERIES = tuple(f"#00fe1{number}" for number in range(8))
_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", PAPER: "--paper"} | {
    colour: f"--series-{number}" for number, colour in enumerate(SERIES)
}
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
SIGNS = ("\u25cf", "\u25a0", "\u25b2", "\u25c6", "\u25bc", "\u271a", "\u2716", "\u2b1f")  # the same in text
DASHES = ("solid", "dashed", "dotted", "dashdot", (0, (1, 4)))

# Ink, muted, grid, paper, and eight series of similar weight on white and on black. Markers tell the series apart as
# well, for readers who can't tell the colours apart.
_LIGHT_GREYS, _DARK_GREYS = ("#1c2024", "#5f6872", "#e3e6ea", "#ffffff"), ("#e8eaed", "#9aa4af", "#333a42", "#14171a")
LIGHT = (*_LIGHT_GREYS, "#2a6fcf", "#d1491f", "#0f8a66", "#8a5cd6", "#a36a00", "#c2357f", "#4d6a1e", "#5b6470")
DARK = (*_DARK_GREYS, "#6aa8ff", "#ff8a5c", "#3ecf9f", "#b99bff", "#e0b040", "#ff86c0", "#a9cf5f", "#a9b4c2")
LETTER = 5.0  # points: about the width of a letter in a legend
TICK_GAP = 6.0  # points between the labels of two ticks
AXIS_POINTS = 240.0  # about the length of an x axis
SIZE = (4.2, 2.7)  # inches: about as wide as a phone, so that text keeps its size there

_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "figure.facecolor": "none",
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
}


@dataclass(frozen=True)
class Picture:
    """A picture for a page.

    Attributes:
      title: what it shows.
      svg: the drawing.
      legend: (number of the series, its label); the page writes it as text.
      note: how to read it; may be empty.
      aside: whether the page shows it after the others.
    """

    title: str
    svg: str
    legend: tuple[tuple[int, str], ...] = ()
    note: str = ""
    aside: bool = False


@contextmanager
def canvas(*, rows: int = 1, height: float = SIZE[1]) -> Iterator[tuple[Any, list[Any]]]:
    """A figure with `rows` axes below each other, in the style of the report.

    matplotlib is imported here, because it takes a second: only a program that draws pays for it.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(SIZE[0], height), layout="constrained")
        axes = figure.subplots(rows, 1, sharex=True, squeeze=False)
        yield figure, [row[0] for row in axes]


def to_svg(figure: Any, title: str) -> str:
    """The figure as an SVG element; a screen reader calls it `title`.

    Identifiers depend on the title, so that two pictures of one page share none.
    """
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": title}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    text = re.sub(r' (d|x|y|transform)="[^"]*"', lambda found: _shortened(found[0]), text)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    prefix = re.sub(r"\W+", "-", title.lower())
    text = re.sub(r'(id="|href="#|url\(#)', rf"\1{prefix}-", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)


def _shortened(attribute: str) -> str:
    """Coordinates to a hundredth of a point."""
    return re.sub(r"(\d\.\d\d)\d+", r"\1", attribute)


def log_axis(axes: Any, side: str, values: Sequence[float]) -> None:
    """Makes the `x` or `y` axis logarithmic, with plain numbers at the ticks.

    There are more ticks if `values` span less than two decades.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    positive = [value for value in values if value > 0]
    narrow = bool(positive) and max(positive) < 100 * min(positive)
    getattr(axes, f"set_{side}scale")("log")
    axis = getattr(axes, f"{side}axis")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def place_ticks(axes: Any, values: Sequence[float]) -> None:
    """Ticks of the x axis at these values: the first, the last, and those between that have room for a label.

    >>> with canvas() as (_, (axes,)):
    ...     place_ticks(axes, [0.01, 0.02, 1, 2, 3])
    ...     [float(value) for value in axes.get_xticks()]
    [0.01, 1.0, 2.0, 3.0]
    """
    places = [math.log(value) if axes.get_xscale() == "log" else value for value in values]
    points = AXIS_POINTS / ((places[-1] - places[0]) or 1.0)

    def clear(one: int, other: int) -> bool:
        letters = len(f"{values[one]:g}") + len(f"{values[other]:g}")
        return abs(places[one] - places[other]) * points >= LETTER * letters / 2 + TICK_GAP

    last, kept = len(values) - 1, [0]
    for index in range(1, last):
        if clear(index, kept[-1]) and clear(index, last):
            kept.append(index)
    ticks = [values[index] for index in dict.fromkeys([*kept, last])]
    axes.set_xticks(ticks, [f"{value:g}" for value in ticks])
    axes.set_xticks([], minor=True)


def draw_line(axes: Any, pairs: Pairs, number: int, **more: Any) -> None:
    """A line in the colour of series `number`; a thin grey one behind the others if that is `REST`."""
    if not pairs:
        return
    xs, ys = zip(*pairs, strict=True)
    if number == REST:
        axes.plot(xs, ys, **({"color": MUTED, "linewidth": 0.6, "alpha": 0.5, "zorder": 1} | more))
        return
    every = max(1, len(xs) // 8)
    look = {"color": SERIES[number], "marker": MARKERS[number], "markevery": (number % every, every)}
    axes.plot(xs, ys, **(look | more))


def draw_dots(axes: Any, pairs: Pairs, number: int) -> None:
    """Points in the colour and with the marker of series `number`."""
    if pairs:
        xs, ys = zip(*pairs, strict=True)
        colour, marker = (MUTED, ".") if number == REST else (SERIES[number], MARKERS[number])
        axes.plot(xs, ys, color=colour, marker=marker, linestyle="none", markersize=5)


def draw_spread(axes: Any, place: float, values: Sequence[float]) -> None:
    """A bar of one standard deviation to either side of the mean of repetitions; nothing for a single run."""
    if len(values) > 1:
        mean, deviation = statistics.fmean(values), statistics.stdev(values)
        axes.errorbar([place], [mean], yerr=[deviation], color=INK, linewidth=0.9, capsize=3, fmt="none", zorder=3)


def _theme(colours: Sequence[str]) -> str:
    return " ".join(f"{name}: {colour};" for name, colour in zip(_VARIABLES.values(), colours, strict=True))


THEMES = (
    f":root {{ color-scheme: light dark; {_theme(LIGHT)} }} "
    f"@media (prefers-color-scheme: dark) {{ :root {{ {_theme(DARK)} }} }}"
)


def sign(number: int) -> str:
    """The marker of a series as text; a dash if it has none."""
    return SIGNS[number] if number >= 0 else "-"


def series_variable(number: int) -> str:
    """The CSS variable of a series' colour."""
    return f"--series-{number}" if number >= 0 else "--muted"


def alone(picture: Picture) -> str:
    """The picture as an SVG file with its legend below it, in light or dark as the reader's system asks."""
    width, height = (float(number) for number in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', picture.svg)[0])
    lines = [
        f'<text x="12" y="{height + 12 * (line + 1):.0f}" style="font-size: 9px; fill: var(--ink)">'
        f'<tspan style="fill: var({series_variable(number)})">{sign(number)}</tspan> {escape(label)}</text>'
        for line, (number, label) in enumerate(picture.legend)
    ]
    # Points of the inner drawing are the units of the outer one.
    drawing = re.sub(r'(width|height)="([\d.]+)pt"', r'\1="\2"', picture.svg, count=2)
    whole = height + 12 * len(lines) + 8 * bool(lines)
    wide = max([width, *(24 + LETTER * len(label) for _, label in picture.legend)])
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:g} {whole:g}" width="{wide:g}pt">'
    style = f"<style>{THEMES} text {{ font-family: system-ui, sans-serif; }}</style>"
    paper = '<rect width="100%" height="100%" style="fill: var(--paper)"/>'
    return f"{head}{style}{paper}{drawing}{''.join(lines)}</svg>\n"
