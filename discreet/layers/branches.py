"""Numbers that a forward reads, for instance in a branch, and that differ between examples.

Examples with different numbers are run apart (`AnswersDiffer`), so that no example steers the
computation of another. But a question is settled with one answer for all batches if that does not
change the gradients of made-up examples.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from discreet.layers.refusals import Unserved

Question = tuple[int, str]  # its index in the pass, and its line of code
_MOST_GROUPS = 8
_FEWEST_IN_A_GROUP = 8


@dataclass(frozen=True, slots=True)
class Questions:
    """Questions that made-up examples answered differently (`asked`), and those with one answer for
    every batch (`settled`) while the model's other numbers stay as they are (`numbers`). `filling`:
    the writes for which each example needs new tensors of its own."""

    asked: dict[Question, None] = field(default_factory=dict)
    settled: dict[Question, bool] = field(default_factory=dict)
    filling: dict[str, None] = field(default_factory=dict)
    numbers: list[object] = field(default_factory=list)


NOTHING_ASKED = Questions()


class AnswersDiffer(Exception):
    """Examples answer differently, by `answers`, (n, ...), and must be run apart. `question`: set
    if the question may be settled with one answer for all."""

    def __init__(self, answers: Tensor, where: str, question: Question | None = None) -> None:
        super().__init__(where)
        self.answers = answers
        self.where = where
        self.question = question

    def groups(self, count: int) -> list[Tensor]:
        """The indices of the `count` examples, grouped by equal answers. Raises Unserved for too
        many groups: many groups must have eight examples or more on average."""
        answers = self.answers[:count].reshape(count, -1)
        if answers.is_floating_point():  # NaN counts as an answer
            answers = torch.cat([answers.nan_to_num(), answers.isnan().to(answers)], 1)
        kinds, groups = torch.unique(answers, dim=0, return_inverse=True)
        if len(kinds) > max(_MOST_GROUPS, count // _FEWEST_IN_A_GROUP):
            raise Unserved(f"examples have {len(kinds)} answers to {self.where}")
        return [(groups == group).nonzero().squeeze(1) for group in range(len(kinds))]


def are_alike(answers: Tensor) -> bool:
    """True if all rows are the same. NaN equals NaN, or an example with NaN would be split from
    itself."""
    first = answers[:1]
    same = answers == first
    if answers.is_floating_point():
        same |= answers.isnan() & first.isnan()
    return bool(same.all())
