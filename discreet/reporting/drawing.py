"""Pictures as SVG whose colours are CSS variables: the page decides what they are in light and in dark."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# Stand-ins that matplotlib can draw with, and the variables that take their places in the SVG.
INK, MUTED, GRID, PAPER = "#00fe01", "#00fe02", "#00fe03", "#00fe04"
SERIES = tuple(f"#00fe1{number}" for number in range(8))
_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid", PAPER: "--paper"} | {
    colour: f"--series-{number}" for number, colour in enumerate(SERIES)
}
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
SIGNS = ("\u25cf", "\u25a0", "\u25b2", "\u25c6", "\u25bc", "\u271a", "\u2716", "\u2b1f")  # the same in text
DASHES = ("solid", "dashed", "dotted", "dashdot", (0, (1, 4)))

# Colours of similar weight on white and on black, told apart with colour blindness too (and by their markers).
LIGHT = ("#2a6fcf", "#d1491f", "#0f8a66", "#8a5cd6", "#a36a00", "#c2357f", "#4d6a1e", "#5b6470")
DARK = ("#6aa8ff", "#ff8a5c", "#3ecf9f", "#b99bff", "#e0b040", "#ff86c0", "#a9cf5f", "#a9b4c2")
LETTER = 5.0  # the width of one in a legend, about
TICK_GAP = 6.0  # between the labels of two ticks
AXIS_POINTS = 240.0  # the length of an x axis, about
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
      legend: (number of the series, what it is), for a legend in the page's own text.
      note: how to read it; may be empty.
      aside: it stands after the others.
    """

    title: str
    svg: str
    legend: tuple[tuple[int, str], ...] = ()
    note: str = ""
    aside: bool = False


@contextmanager
def canvas(*, rows: int = 1, height: float = SIZE[1]) -> Iterator[tuple[Any, list[Any]]]:
    """A figure with `rows` axes below each other, in the style of the report.

    matplotlib is imported here: it costs a second, and only who draws pays it.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=(SIZE[0], height), layout="constrained")
        axes = figure.subplots(rows, 1, sharex=True, squeeze=False)
        yield figure, [row[0] for row in axes]


def to_svg(figure: Any, title: str) -> str:
    """The figure as an SVG element of its own size, for reading aloud called `title`.

    Identifiers depend on the title: two pictures of one page must not share them.
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
    return text.replace("<svg ", f'<svg role="img" aria-label="{_attribute(title)}" ', 1)


def _shortened(attribute: str) -> str:
    """Coordinates to a hundredth of a point."""
    return re.sub(r"(\d\.\d\d)\d+", r"\1", attribute)


def log_axis(axes: Any, side: str, values: Sequence[float]) -> None:
    """Makes the `x` or `y` axis logarithmic, with plain numbers for ticks.

    They are finer where `values` span less than two decades.
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
    """Ticks of the x axis at these values: the first, the last, and those between whose labels have room.

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


def variables(colours: tuple[str, ...], ink: str, *, muted: str, grid: str, paper: str) -> str:
    """The declarations that give a theme its colours."""
    named = {"--ink": ink, "--muted": muted, "--grid": grid, "--paper": paper}
    named |= {f"--series-{number}": colour for number, colour in enumerate(colours)}
    return " ".join(f"{name}: {value};" for name, value in named.items())


_LIGHT_THEME = variables(LIGHT, "#1c2024", muted="#5f6872", grid="#e3e6ea", paper="#ffffff")
_DARK_THEME = variables(DARK, "#e8eaed", muted="#9aa4af", grid="#333a42", paper="#14171a")
THEMES = (
    f":root {{ color-scheme: light dark; {_LIGHT_THEME} }} "
    f"@media (prefers-color-scheme: dark) {{ :root {{ {_DARK_THEME} }} }}"
)


def sign(number: int) -> str:
    """The marker of a series as text; a dash for those without one."""
    return SIGNS[number] if number >= 0 else "-"


def series_variable(number: int) -> str:
    """The CSS variable of a series' colour."""
    return f"--series-{number}" if number >= 0 else "--muted"


def alone(picture: Picture) -> str:
    """The picture as a file of its own, with its legend below it, in light and dark as the reader's system asks."""
    width, height = (float(number) for number in re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', picture.svg)[0])
    lines = [
        f'<text x="12" y="{height + 12 * (line + 1):.0f}" style="font-size: 9px; fill: var(--ink)">'
        f'<tspan style="fill: var({series_variable(number)})">{sign(number)}</tspan> {_attribute(label)}</text>'
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


def _attribute(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
