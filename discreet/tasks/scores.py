"""The names of what a round says of its model beside the loss. Read by commands that do without PyTorch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

# What a round's row says beside the loss, and by which of them models are compared: larger is better.
SCORES = ("accuracy", "auc", "r2", "mae")
MAIN = ("accuracy", "r2")


def main_score(names: Iterable[str]) -> str:
    """The name of the score by which models with these columns are compared; accuracy if there is none yet."""
    given = {*names}
    return next((name for name in MAIN if name in given), MAIN[0])


def score_columns(rows: Iterable[Mapping[str, object]]) -> list[str]:
    """The scores that any of these rows has, in the order of `SCORES`; accuracy if none has one."""
    given = {name for row in rows for name in row}
    return [name for name in SCORES if name in given] or [MAIN[0]]
