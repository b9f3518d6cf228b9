"""A picture as SVG, in the common style."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from textwrap import fill
from typing import Any

INK = "#1c2024"
MUTED = "#5f6872"
SERIES = ("#2a6fcf", "#d1491f", "#0f8a66", "#8a5cd6", "#a36a00", "#c2357f", "#4d6a1e", "#5b6470")
# The page replaces these colours in its dark scheme: ink, muted ink, lines and series.
GRID = "#e3e6ea"
PAPER = "#ffffff"
DARK = {INK: "#e8ebef", MUTED: "#a6b0bb", GRID: "#39414a", PAPER: "#15181c"} | dict(
    zip(
        SERIES,
        ("#6ea8ff", "#ff8a61", "#3fcf9f", "#b795ff", "#e0a53a", "#ff7fc0", "#9cc25c", "#aab4bf"),
        strict=True,
    )
)
MARKERS = "os^DvPXp"  # distinguish the series for colour-blind readers
SIZE = (4.2, 2.7)  # inches: about the width of a phone, so that text keeps its size there
# inches
LEGEND_LINE = 0.18
LEGEND_EDGE = 0.1
LEGEND_CHARACTERS = 46  # in a line; longer labels are wrapped

_STYLE: Any = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "legend.fontsize": 8,
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "grid.color": GRID,
    "text.color": INK,
    "axes.labelcolor": INK,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
}


@dataclass(frozen=True)
class Picture:
    """A drawing with its title and a note on how to read it, which may be empty."""

    title: str
    svg: str
    note: str = ""


def picture(title: str, draw: Callable[..., str], *, rows: int = 1) -> Picture:
    """A picture that a function draws on `rows` axes below each other; the function returns the
    note. It is an SVG element with the accessible name `title`, and the legend of the first axes
    below it. Identifiers depend on the title, so that two pictures of one page share none."""
    from matplotlib import rc_context  # it takes a second: only a program that draws pays for it
    from matplotlib.figure import Figure

    buffer = io.StringIO()
    with rc_context({**_STYLE, "svg.hashsalt": title}):
        figure = Figure(figsize=(SIZE[0], SIZE[1] * (1 + rows) / 2), layout="constrained")
        axes = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
        note = draw(*axes).strip()
        handles, labels = axes[0].get_legend_handles_labels()
        if len(labels) > 1:
            wrapped = [fill(label, LEGEND_CHARACTERS) for label in labels]
            lines = sum(label.count("\n") + 1 for label in wrapped)
            figure.set_figheight(figure.get_figheight() + LEGEND_LINE * lines + LEGEND_EDGE)
            figure.legend(handles, wrapped, loc="outside lower left", labelspacing=0.3)
        figure.savefig(
            buffer,
            format="svg",
            metadata={"Date": None, "Creator": None, "Format": None, "Type": None},
        )
    text = buffer.getvalue()
    prefix = re.sub(r"\W+", "-", title.lower())
    text = re.sub(r'(id="|href="#|url\(#)', rf"\1{prefix}-", text[text.index("<svg") :])
    return Picture(
        title, text.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1), note
    )


def on_page(svg: str) -> str:
    """A picture for the page, whose colours it takes, also in the dark scheme."""
    clear = svg.replace(f"fill: {PAPER}", "fill: none")
    return re.sub(r": (#[0-9a-f]{6})", lambda found: f": var(--{found[1][1:]}, {found[1]})", clear)
