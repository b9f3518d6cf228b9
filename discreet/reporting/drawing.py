"""Pictures as SVG whose colours are CSS variables: the page sets them for light and for dark."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import Any

# The colours of the page, for light and for dark, and what matplotlib draws with in their place.
_COLOURS = {
    "--ink": ("#1c2024", "#e8eaed"),
    "--muted": ("#5f6872", "#9aa4af"),
    "--grid": ("#e3e6ea", "#333a42"),
    "--paper": ("#ffffff", "#14171a"),
    "--series-0": ("#2a6fcf", "#6aa8ff"),
    "--series-1": ("#d1491f", "#ff8a5c"),
    "--series-2": ("#0f8a66", "#3ecf9f"),
    "--series-3": ("#8a5cd6", "#b99bff"),
    "--series-4": ("#a36a00", "#e0b040"),
    "--series-5": ("#c2357f", "#ff86c0"),
    "--series-6": ("#4d6a1e", "#a9cf5f"),
    "--series-7": ("#5b6470", "#a9b4c2"),
}
_DRAWN = {variable: f"#00fe{number:02x}" for number, variable in enumerate(_COLOURS)}
INK, MUTED, GRID, _, *SERIES = _DRAWN.values()
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


def _theme(*, dark: bool) -> str:
    return f":root {{ {' '.join(f'{variable}: {pair[dark]};' for variable, pair in _COLOURS.items())} }}"


_THEMES = (_theme(dark=False), f"@media (prefers-color-scheme: dark) {{ {_theme(dark=True)} }}")
THEMES = " ".join([":root { color-scheme: light dark; }", *_THEMES])


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
    for variable, colour in _DRAWN.items():
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
    from matplotlib.ticker import LogLocator, NullFormatter

    narrow = max(values) < 100 * min(values)
    getattr(axes, f"set_{side}scale")("log")
    axis = getattr(axes, f"{side}axis")
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,)))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def draw_line(axes: Any, pairs: Sequence[tuple[float, float]], number: int, label: str, **more: Any) -> None:
    """A line in the colour of series `number`, with some eight markers; beyond the last colour, thin and grey."""
    look: dict[str, Any] = {"color": MUTED, "linewidth": 0.6, "alpha": 0.5, "zorder": 1}
    if number < len(SERIES):
        look = {"color": SERIES[number], "marker": MARKERS[number], "label": label}
    if pairs:
        axes.plot(*zip(*pairs, strict=True), **look, markevery=max(1, len(pairs) // 8), **more)
