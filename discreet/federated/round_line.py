"""A round in one line of the log."""

from __future__ import annotations

import math

from discreet.tasks.scores import SCORES


def round_line(row: dict[str, object], *, rounds: int) -> str:
    """A round in one line: what a person watches."""

    def number(name: str, form: str) -> str:
        value = row.get(name)
        return "-" if value is None else format(value, form)

    spent = " ".join(f"{name} {_epsilon(row.get(f'epsilon_{name}'))}" for name in ("user", "example", "local"))
    good = "  ".join(f"{name} {number(name, '.4f')}" for name in SCORES if name in row)
    return (
        f"round {row['round']}/{rounds}  {good}  loss {number('loss', '.4f')}  "
        f"clip {number('clip_norm', '.4g')}  below {number('fraction_below', '.2f')}  "
        f"cohort {row['cohort']} replies {row['replies']}  epsilon {spent}  {number('seconds', '.2f')} s"
    )


def _epsilon(value: object) -> str:
    return "none" if not isinstance(value, float) or math.isinf(value) else f"{value:.3f}"
