"""The stopping rule: ends training that is lost, and warns of a clip norm that lets a model learn little."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from discreet.mechanisms.central_gaussian import UserPrivacy

PATIENCE = 5  # rounds in a row: one bad round of a noisy run, or of its start, is not yet the end
FACTOR = 2.0  # times the loss of a model that gives 0 throughout
CUT_ROUNDS, CUT_SHARE = 3, 0.2  # rounds in a row with a smaller share of norms within the clip norm


def stopping_reason(losses: Sequence[float], *, chance_loss: float) -> str | None:
    """The reason to end training after rounds with these losses, in words; None to go on.

    Training is lost if the last loss is not finite, or if the last `PATIENCE` are all above `FACTOR` times
    `chance_loss` and the last of them is above the first: a model that starts badly and gets better is not lost.
    `chance_loss` is the loss of a model that gives 0 throughout: every class the same chance, or the middle of every
    range.

    A function of public numbers alone, so that a run that is resumed comes to the same end.

    >>> stopping_reason([2.2, 1.9, 5.1, 9.7, 31.0, 44.0, 38.0], chance_loss=2.3)
    'the loss on the public test set diverged: 38 after round 7, 1.9 after round 2'
    >>> stopping_reason([2.2, math.nan], chance_loss=2.3)
    'the loss on the public test set is nan after round 2'
    >>> stopping_reason([50.0, 40.0, 30.0, 20.0, 10.0], chance_loss=2.3) is None
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


@dataclass
class ClipWatch:
    """Looks at an adaptive clip norm after each round, and says each of two things once. It reads released numbers
    alone.

    Attributes:
      user: None if user-level privacy is off: nothing is said.
      shares: the noised share of norms within the clip norm, of each round that has one.
    """

    user: UserPrivacy | None
    shares: list[float]
    said: set[str] = field(default_factory=set)

    def notes(self, clip_norm: float, share: float | None) -> Iterator[str]:
        """Yields the warnings that are new after a round with this share, which moved the clip norm to `clip_norm`."""
        user = self.user
        if user is None or share is None:
            return
        self.shares.append(share)
        last, least = self.shares[-CUT_ROUNDS:], min(CUT_SHARE, user.target_quantile / 2)
        if len(last) == CUT_ROUNDS and max(last) < least and "cut" not in self.said:
            self.said.add("cut")
            yield (
                f"in {CUT_ROUNDS} rounds in a row a share below {least:g} of the updates was within the clip norm, "
                f"which is {clip_norm:.3g} now: nearly all are cut, and the model learns little. Begin with a larger "
                f"privacy.user.clip.norm, such as {10 * clip_norm:.1g}"
            )
        if clip_norm >= user.clip_max and "ceiling" not in self.said:
            self.said.add("ceiling")
            yield (
                f"the clip norm has reached privacy.user.clip.max={user.clip_max:g} and grows no further: either noise "
                "drives the model, or privacy.user.clip.norm, the first one, was far too small"
            )
