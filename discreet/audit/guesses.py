"""Guesses at who was in, from the scores of one run; and how many guesses to make, decided before a score is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from discreet.audit.canary_scores import CanaryScores

TRIED = 12  # plans that are compared


@dataclass(frozen=True)
class Guesses:
    """How an auditor did.

    Attributes:
      canaries: m, each in or out by its own fair coin.
      made: r, within [1, m]; the auditor says nothing of the other canaries.
      correct: v, within [0, r].
    """

    canaries: int
    made: int
    correct: int

    def __post_init__(self) -> None:
        if not 0 <= self.correct <= self.made <= self.canaries or self.made == 0:
            raise ValueError(f"needs 0 <= correct <= made <= canaries, made at least 1 (got {self})")


def guess(scores: CanaryScores, *, made: int) -> Guesses:
    """Says "in" of the highest scores and "out" of the lowest, half of `made` each (one more "in" if it is odd).

    Which canaries are guessed at, and how, is a function of the scores alone. Of equal scores the first come first:
    the coins decide nothing.
    """
    order = np.argsort(scores.scores, kind="stable")
    out = made // 2
    correct = int(np.sum(~scores.included[order[:out]])) + int(
        np.sum(scores.included[order[len(order) - made + out :]])
    )
    return Guesses(len(order), made, correct)


def planned_number(canaries: int, *, shift: float, bound: Callable[[Guesses], float]) -> int:
    """How many guesses to make so that `bound` is largest if scores are N(shift, 1) in and N(0, 1) out.

    The plan reads no score, so a bound from that many guesses needs no correction for having chosen. It costs power,
    never correctness, if scores are distributed in another way.
    """
    best, number = -1.0, canaries
    for cut in shift / 2 + np.linspace(0, 2.5, TRIED):
        right, wrong = ndtr(shift - cut), ndtr(-cut)
        made = int(canaries * (right + wrong))  # two tails, and each canary is in with probability 1/2
        correct = int(canaries * right)
        if correct < 1:
            break
        found = bound(Guesses(canaries, made, correct))
        if found > best:
            best, number = found, made
    return number
