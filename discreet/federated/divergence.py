"""When training is lost: the loss on the public test set says so."""

from __future__ import annotations

import math
from collections.abc import Sequence

PATIENCE = 5  # rounds in a row: one bad round of a noisy run, or of its start, is not yet the end
FACTOR = 2.0  # times the loss of a model that gives 0 throughout


def divergence(losses: Sequence[float], *, chance_loss: float) -> str | None:
    """Why training is lost after rounds with these losses, in words; None while it is not.

    It is lost if the last loss is not finite, or if the last `PATIENCE` are all above `FACTOR` times `chance_loss` and
    the last of them is above the first: a model that starts badly and gets better is not lost. `chance_loss` is the
    loss of a model that gives 0 throughout: every class the same chance, or the middle of every range.

    A function of public numbers alone, so that a run that is resumed comes to the same end.

    >>> divergence([2.2, 1.9, 5.1, 9.7, 31.0, 44.0, 38.0], chance_loss=2.3)
    'the loss on the public test set diverged: 38 after round 7, 1.9 after round 2'
    >>> divergence([2.2, math.nan], chance_loss=2.3)
    'the loss on the public test set is nan after round 2'
    >>> divergence([50.0, 40.0, 30.0, 20.0, 10.0], chance_loss=2.3) is None
    True
    """
    last, best = losses[-PATIENCE:], min(losses, default=0.0)
    if last and not math.isfinite(last[-1]):
        return f"the loss on the public test set is {last[-1]} after round {len(losses)}"
    if len(last) < PATIENCE or min(last) <= FACTOR * chance_loss or last[-1] <= last[0]:
        return None
    return (
        f"the loss on the public test set diverged: {last[-1]:.4g} after round {len(losses)}, "
        f"{best:.4g} after round {losses.index(best) + 1}"
    )
