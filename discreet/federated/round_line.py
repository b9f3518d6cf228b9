"""A round in one line of the log."""

from __future__ import annotations

import math

from discreet.tasks.scores import SCORES

COLUMNS = 100  # of a terminal
# What a line that is too long leaves out, one after the other; metrics.csv has it.
LEFT_OUT = ("seconds", "clip", "loss", *SCORES[1:])


def round_line(row: dict[str, object], *, rounds: int) -> str:
    """A round in one line: what a person watches, in at most `COLUMNS` characters. Guarantees that are off have no
    epsilon here; a run names them when it starts and when it ends.

    >>> row = {"round": 2, "loss": 0.5, "cohort": 9, "replies": 8, "epsilon_user": 1.5, "seconds": 0.25}
    >>> round_line(row, rounds=30)
    'round 2/30  loss 0.5000  replies 8/9  epsilon user 1.500  0.2 s'
    """
    shown = (*((name, name, ".4f") for name in (*SCORES, "loss")), ("clip", "clip_norm", ".3g"))
    spent = {name: row.get(f"epsilon_{name}") for name in ("user", "example", "local")}
    on = [f"{name} {value:.3f}" for name, value in spent.items() if isinstance(value, float) and math.isfinite(value)]
    parts = {"round": f"round {row['round']}/{rounds}"}
    parts |= {name: f"{name} {row[column]:{form}}" for name, column, form in shown if row.get(column) is not None}
    parts |= {"replies": f"replies {row['replies']}/{row['cohort']}", "epsilon": f"epsilon {' '.join(on) or 'none'}"}
    parts["seconds"] = f"{row.get('seconds', math.nan):.1f} s"
    for name in LEFT_OUT:
        if len("  ".join(parts.values())) > COLUMNS:
            parts.pop(name, None)
    return "  ".join(parts.values())
