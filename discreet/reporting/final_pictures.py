"""Pictures of one model on the public test set: a confusion matrix, the ROC curve, and
calibration."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from discreet.reporting.svg_style import INK, MUTED, SERIES, Picture, picture

LONGEST = 14  # most characters of a class name at an axis
_CHANCE = {"color": MUTED, "linewidth": 0.9, "linestyle": "dotted"}


def final_pictures(results: Mapping[str, Any]) -> Iterator[Picture]:
    """The pictures for which test_set.json has numbers."""
    yield _confusion(results["classes"], results["confusion"])
    if results.get("roc"):
        yield _roc(results["roc"])
    if results["calibration"]:
        yield _calibration(results["calibration"], results["classes"])


def _confusion(classes: list[str], counts: list[list[int]]) -> Picture:
    shares = [[count / max(1, sum(row)) for count in row] for row in counts]
    named = [name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}." for name in classes]

    def draw(axes: Any) -> str:
        from matplotlib.colors import to_rgba

        shades = [[to_rgba(SERIES[0], 0.65 * share) for share in row] for row in shares]
        axes.pcolormesh([0, *range(1, len(classes) + 1)], [0, *range(1, len(classes) + 1)], shades)
        for row, numbers in enumerate(counts):
            for column, count in enumerate(numbers):
                axes.text(column + 0.5, row + 0.5, str(count), ha="center", va="center", color=INK)
        middles = [place + 0.5 for place in range(len(classes))]
        axes.set_xticks(middles, named, rotation=45 if len(classes) > 4 else 0)
        axes.set_yticks(middles, named)
        axes.invert_yaxis()
        axes.grid(visible=False)
        axes.set_xlabel("predicted")
        axes.set_ylabel("true")
        return (
            "Examples of the public test set; the stronger a cell's colour, the larger its share "
            "of the row."
        )

    return picture("Confusion matrix of the model", draw)


def _roc(points: list[list[float]]) -> Picture:
    def draw(axes: Any) -> str:
        axes.plot([0, 1], [0, 1], **_CHANCE)
        axes.plot(*zip(*points, strict=True), color=SERIES[0])
        axes.set_xlabel("false positive rate")
        axes.set_ylabel("true positive rate")
        return "On the public test set, over all thresholds. Dotted: chance."

    return picture("ROC curve of the model", draw)


def _calibration(rows: list[list[float]], classes: list[str]) -> Picture:
    if len(classes) == 2:
        whose = f"of {classes[1]}"
    else:
        whose = "of the likeliest class"

    def draw(axes: Any) -> str:
        axes.plot([0, 1], [0, 1], **_CHANCE)
        axes.plot([row[0] for row in rows], [row[1] for row in rows], color=SERIES[0], marker="o")
        axes.set_xlabel(f"predicted probability {whose}")
        axes.set_ylabel("share that is so")
        return (
            "On the public test set, by tenths of the probability. Dotted: a model whose "
            "probabilities are true."
        )

    return picture("Calibration of the model", draw)
