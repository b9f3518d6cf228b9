"""Numbers of which each example has its own, and on which a forward branches, sorts or packs.

Examples with other numbers are then run apart (`Split`), so that no example steers what is done with another.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from discreet.per_example.calls import COMPARED, READS, Call
from discreet.per_example.layouts import CONSTANT, FIRST, PLACES, Layout, Mixed, Unserved, place

TOGETHER = {"all": False, "any": True}  # of examples that answer differently
_MOST_GROUPS, _FEWEST_IN_A_GROUP = 8, 8
LENGTHS = ("sort", "pack_padded_sequence")


Question = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Answers:
    """One value for each example, (n,), of which a forward wants a single one. `drawn`: random numbers are in it;
    `together`: the answer of examples that answer differently, if it is the same for all such batches."""

    values: Tensor
    drawn: bool
    together: bool | None = None


class Split(Exception):
    """Examples answer differently to a question of the forward: `answers`, (n,), are to be run apart. `question`: of
    those that may have one answer for all, by its number in the pass and its line."""

    def __init__(self, answers: Tensor, where: str, question: Question | None = None) -> None:
        super().__init__(where)
        self.answers, self.where, self.question = answers, where, question

    def groups(self, count: int) -> list[Tensor]:
        """The places of the examples, `count` of them, that answer alike. Raises Unserved for too many groups: of eight
        at least on average, if there are many."""
        answers, groups = torch.unique(self.answers[:count], return_inverse=True)
        if len(answers) > max(_MOST_GROUPS, count // _FEWEST_IN_A_GROUP):
            raise Unserved(f"examples have {len(answers)} answers to {self.where}")
        return [(groups == group).nonzero().squeeze(1) for group in range(len(answers))]


def answered(call: Call) -> Any:
    """A number for each example: reads it if all are alike, works on all of them, or does not know it any more."""

    def of_each(value: Any) -> Any:
        tag = call.watch.tag(value) if isinstance(value, Tensor) else None
        return tag.values if isinstance(tag, Answers) else value

    if call.name in READS:
        (answers,) = [tag for tag in call.tags if isinstance(tag, Answers)]
        if answers.drawn:  # a second pass would draw others: its branch would choose among the draws
            raise Unserved(f"{call.name} reads what was drawn at random{place()}")
        where, question = f"{call.name}{place()}", None
        if answers.together is not None:
            call.watch.questions += 1
            question = (call.watch.questions, where)
            if question in call.watch.settled:
                return call.func(torch.full_like(answers.values[0], answers.together))
        if _is_one(answers.values):
            return call.func(answers.values[0])
        raise Split(answers.values, where, question)
    result = call.run()
    if call.name not in COMPARED or not all(isinstance(tag, Answers) or tag is CONSTANT for tag in call.tags):
        return call.watch.give(result, Mixed(f"{call.name} of all examples together{place()}"))
    values = call.func(*map(of_each, call.args), **{key: of_each(value) for key, value in call.named.items()})
    return call.watch.give(result, Answers(values, call.drawn))


def _is_one(values: Tensor) -> bool:
    """True if all values are the same, NaN too: else an example that answers NaN would be parted from itself."""
    first = values[0]
    return bool(((values == first) | (values.isnan() & first.isnan())).all())


def of_lengths(call: Call, lengths: Tensor) -> Any:
    """Sorts or packs sequences by their lengths, which have to be equal: examples of equal lengths run together."""
    if call.drawn:
        raise Unserved(f"{call.name} of lengths that were drawn at random{place()}")
    if not _is_one(lengths):
        raise Split(lengths.detach(), f"{call.name}{place()}")
    if call.name == "sort":
        found = torch.sort(lengths, stable=True)
        call.watch.give(found[0], FIRST)
        call.watch.give(found[1], PLACES)
        return found
    if call.tags[0] != Layout(0 if call.args[2] else 1):
        raise Unserved(f"{call.name} of examples in another dimension{place()}")
    data, sizes = call.run()
    call.watch.lengths[call.count] = call.watch  # sizes counts examples
    return call.watch.give(data, Layout(0, len(sizes), drawn=call.tags[0].drawn)), call.watch.give(sizes, CONSTANT)


def number_of_examples(call: Call) -> Any:
    """Numbers that follow from those of the examples alone: they are the same again, or not known."""
    result = call.run()
    if call.name == "empty_like" or not isinstance(result, Tensor):
        return call.watch.give(result, CONSTANT) if isinstance(result, Tensor) else result
    is_one_each = result.shape[:1] == (call.count,) == (result.numel(),)
    same = is_one_each and bool((result.flatten() == torch.arange(call.count, device=result.device)).all())
    return call.watch.give(result, PLACES if same else Mixed(f"{call.name} of the numbers of the examples{place()}"))
