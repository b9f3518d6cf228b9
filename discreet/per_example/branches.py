"""Numbers that a forward reads, such as a branch does, of which each example has its own.

Examples with other numbers are then run apart (`Split`), so that no example steers what is done
with another. But a question may have one answer for all batches, if the gradients of made-up
examples stay as they are with it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from discreet.per_example.refusals import Unserved

Question = tuple[int, str]  # its number in the pass, and its line
_MOST_GROUPS = 8
_FEWEST_IN_A_GROUP = 8


@dataclass(frozen=True, slots=True)
class Questions:
    """Questions that made-up examples have answered differently (`asked`), and those that have one
    answer for every batch (`settled`)."""

    asked: dict[Question, None] = field(default_factory=dict)
    settled: dict[Question, bool] = field(default_factory=dict)


class Split(Exception):
    """Examples answer differently: `answers`, (n, ...), are to be run apart. `question`: of those
    that may have one answer for all."""

    def __init__(self, answers: Tensor, where: str, question: Question | None = None) -> None:
        super().__init__(where)
        self.answers = answers
        self.where = where
        self.question = question

    def groups(self, count: int) -> list[Tensor]:
        """The places of the examples, `count` of them, that answer alike. Raises Unserved for too
        many groups: of eight at least on average, if there are many."""
        answers = self.answers[:count].reshape(count, -1)
        if answers.is_floating_point():  # NaN is an answer too
            answers = torch.cat([answers.nan_to_num(), answers.isnan().to(answers)], 1)
        kinds, groups = torch.unique(answers, dim=0, return_inverse=True)
        if len(kinds) > max(_MOST_GROUPS, count // _FEWEST_IN_A_GROUP):
            raise Unserved(f"examples have {len(kinds)} answers to {self.where}")
        return [(groups == group).nonzero().squeeze(1) for group in range(len(kinds))]


def are_alike(answers: Tensor) -> bool:
    """True if all rows are the same, NaN too: else an example that answers NaN would be parted from
    itself."""
    first = answers[:1]
    same = answers == first
    if answers.is_floating_point():
        same |= answers.isnan() & first.isnan()
    return bool(same.all())
