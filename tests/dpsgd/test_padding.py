"""Padding to the longest example of a batch: refused if it changes the gradients of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_sequence
from torch.utils.data import DataLoader

from discreet.dpsgd.dpsgd import DPSGD
from tests.dpsgd.loops import private, run

WORDS, CLASSES, COUNT, MASK, PROMPT = 20, 4, 24, 19, 4
Example = tuple[Tensor, int]
REFUSED = "collate_fn: it pads .* which changes their gradients"


def texts(lengths: list[int]) -> list[Example]:
    draws = torch.Generator().manual_seed(1)
    return [
        (torch.randint(1, MASK, (length,), generator=draws), place % CLASSES)
        for place, length in enumerate(lengths)
    ]


TEXTS = texts([3 + place % 4 for place in range(COUNT)])


def behind(pairs: list[Example]) -> tuple[Tensor, Tensor]:
    rows = pad_sequence([row for row, _ in pairs], batch_first=True)
    return rows, torch.tensor([target for _, target in pairs])


def longest_first(pairs: list[Example]) -> tuple[Tensor, Tensor]:
    return behind(sorted(pairs, key=lambda pair: -len(pair[0])))


def before(pairs: list[Example]) -> tuple[Tensor, Tensor]:
    rows, targets = behind([(row.flip(0), target) for row, target in pairs])
    return rows.flip(1), targets


def with_lengths(pairs: list[Example]) -> tuple[tuple[Tensor, Tensor], Tensor]:
    rows, targets = behind(pairs)
    return (rows, torch.tensor([len(row) for row, _ in pairs])), targets


def cut(pairs: list[Example]) -> tuple[Tensor, Tensor]:
    rows, targets = behind(pairs)
    return rows[:, : min(len(row) for row, _ in pairs)], targets


def cut_and_masked(pairs: list[Example]) -> tuple[Tensor, Tensor]:
    rows, targets = cut(pairs)
    return rows.where(torch.rand(rows.shape) < 0.5, MASK), targets


def without_the_last_of_the_longest(pairs: list[Example]) -> tuple[Tensor, Tensor]:
    """The longest text loses a word to padding, if others are shorter."""
    rows, targets = behind(pairs)
    lengths = (rows > 0).sum(1)
    is_last = torch.arange(rows.shape[1]) == rows.shape[1] - 1
    is_lost = is_last & (lengths.min() < rows.shape[1])
    return rows.where(~is_lost, 0), targets


def masked_at_random(pairs: list[Example]) -> tuple[Tensor, Tensor]:
    """As for masked language modelling."""
    rows, _ = behind(pairs)
    is_hidden = (torch.rand(rows.shape) < 0.5) & (rows > 0)
    return rows.where(~is_hidden, MASK), rows.where(is_hidden, -100)


def next_words(pairs: list[Example]) -> tuple[Tensor, Tensor]:
    rows, _ = behind(pairs)
    return rows[:, :-1], rows[:, 1:].where(rows[:, 1:] > 0, -100)


def answers(pairs: list[Example]) -> tuple[Tensor, Tensor]:
    """Texts whose first words are a prompt, which no loss counts: some have no others."""
    rows, _ = behind(pairs)
    is_counted = (rows > 0) & (torch.arange(rows.shape[1]) >= PROMPT)
    return rows, rows.where(is_counted, -100)


def some_answers(pairs: list[Example]) -> tuple[Tensor, Tensor]:
    rows, targets = answers(pairs)
    return rows, targets.where(torch.rand(rows.shape) < 0.9, -100)


class Reader(nn.Module):
    """A model of texts: `kind` says how it reads their positions."""

    def __init__(self, kind: str, out: int = CLASSES) -> None:
        super().__init__()
        self.kind = kind
        self.words = nn.Embedding(WORDS, 8)
        self.places = nn.Embedding(64, 8)
        self.memory = nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, out)

    def forward(self, rows: Tensor, lengths: Tensor | None = None) -> Tensor:
        found: Tensor = getattr(self, self.kind)(rows, self.words(rows), lengths)
        return found

    def mean(self, rows: Tensor, words: Tensor, _: object) -> Tensor:
        return self.head(words.mean(1))

    def masked_mean(self, rows: Tensor, words: Tensor, _: object) -> Tensor:
        is_word = (rows > 0).unsqueeze(2)
        return self.head((words * is_word).sum(1) / is_word.sum(1))

    def barely_masked_mean(self, rows: Tensor, words: Tensor, _: object) -> Tensor:
        return self.masked_mean(rows, words, None) + 1e-5 * self.head(words.mean(1))

    def mean_in_float32(self, rows: Tensor, words: Tensor, _: object) -> Tensor:
        return self.mean(rows, self.narrow(words), None)

    def masked_mean_in_float32(self, rows: Tensor, words: Tensor, _: object) -> Tensor:
        return self.masked_mean(rows, self.narrow(words), None)

    def narrow(self, words: Tensor) -> Tensor:
        if words.dtype != torch.float32:
            raise TypeError("a kernel of float32")
        return words

    def last_step(self, rows: Tensor, words: Tensor, _: object) -> Tensor:
        return self.head(self.memory(words)[0][:, -1])

    def packed(self, rows: Tensor, words: Tensor, lengths: Tensor) -> Tensor:
        some = pack_padded_sequence(words, lengths, batch_first=True, enforce_sorted=False)
        return self.head(self.memory(some)[1][0][-1])

    def by_threes(self, rows: Tensor, words: Tensor, _: object) -> Tensor:
        """The mean over all places that have two neighbours."""
        if rows.shape[1] < 3:
            raise RuntimeError("a kernel of three words")
        return self.head(words.unfold(1, 3, 1).mean((1, 3)))

    def attended(self, rows: Tensor, words: Tensor, _: object) -> Tensor:
        """Attention with a mask, and the first position's output."""
        words = words + self.places(torch.arange(rows.shape[1]))
        found, _ = self.attention(words, words, words, key_padding_mask=rows == 0)
        return self.head(found[:, 0])

    def attended_by_all(self, rows: Tensor, words: Tensor, _: object) -> Tensor:
        return self.head(self.attention(words, words, words)[0][:, 0])

    def each_word(self, rows: Tensor, words: Tensor, _: object) -> Tensor:
        """Logits of each position, by those before it alone."""
        return self.head(self.memory(words)[0]).transpose(1, 2)

    def filled_in(self, rows: Tensor, words: Tensor, _: object) -> Tensor:
        found, _ = self.attention(words, words, words, key_padding_mask=rows == 0)
        return self.head(found).transpose(1, 2)

    def filled_in_by_all(self, rows: Tensor, words: Tensor, _: object) -> Tensor:
        return self.head(self.attention(words, words, words)[0]).transpose(1, 2)


OF_CLASSES = (
    behind,
    before,
    longest_first,
    with_lengths,
    cut,
    cut_and_masked,
    without_the_last_of_the_longest,
)


def loop_of(
    kind: str, collate: Callable[[Any], Any], data: list[Example] = TEXTS, **how: Any
) -> DPSGD:
    torch.manual_seed(0)
    out = CLASSES if collate in OF_CLASSES else WORDS
    usual = {"batch_size": len(data), "steps": 2}
    return private(Reader(kind, out), dataset=data, collate_fn=collate, **(usual | how))


@pytest.mark.parametrize(
    ("kind", "collate"),
    [
        ("mean", behind),
        ("mean", before),
        ("mean", longest_first),
        ("barely_masked_mean", behind),
        ("mean_in_float32", behind),
        ("last_step", behind),
        ("attended_by_all", behind),
        ("attended", before),
        ("filled_in_by_all", masked_at_random),
        ("masked_mean", cut),
        ("masked_mean", cut_and_masked),
        ("masked_mean", without_the_last_of_the_longest),
    ],
)
def test_a_model_that_reads_padding_is_refused_at_no_cost(kind: str, collate: Any) -> None:
    loop = loop_of(kind, collate)
    for _ in range(2):
        with pytest.raises(ValueError, match=REFUSED):
            run(loop)
    assert (loop.epsilon(), loop.steps_taken) == (0, 0)


@pytest.mark.parametrize(
    ("kind", "collate"),
    [
        ("masked_mean", behind),
        ("masked_mean", before),
        ("masked_mean", longest_first),
        ("masked_mean_in_float32", behind),
        ("attended", behind),
        ("packed", with_lengths),
        ("each_word", next_words),
        ("filled_in", masked_at_random),
    ],
)
@pytest.mark.parametrize("most", [None, 5])
def test_a_model_that_masks_padding_is_accepted(kind: str, collate: Any, most: int | None) -> None:
    loop = loop_of(kind, collate, max_physical_batch=most)
    assert run(loop).steps_taken == 2


def test_what_is_accepted_moves_by_at_most_the_clip_norm_when_a_long_example_joins() -> None:
    data = texts([3 + place % 4 for place in range(COUNT)] + [60])
    sums = list[Tensor]()
    for count in (COUNT, COUNT + 1):
        loop = loop_of("masked_mean", behind, data, clip_norm=1.0)
        loop._batches.drawn[0] = torch.arange(count)
        inputs, targets = next(iter(loop))
        sums.append(loop._clipped_sums(inputs, targets, None)[0])
    assert 0 < float((sums[0] - sums[1]).norm()) <= 1 + 1e-4


def test_the_trial_waits_for_a_batch_in_which_lengths_differ() -> None:
    data = texts([4] * (COUNT - 1) + [40])
    loop = loop_of("mean", behind, data, steps=6)
    for step in range(6):
        loop._batches.drawn[step] = torch.arange(COUNT - 1 if step < 3 else COUNT)
    with pytest.raises(ValueError, match=REFUSED):
        run(loop)
    assert loop.steps_taken == 3


def test_one_short_example_among_long_ones_is_found_and_one_length_is_fine() -> None:
    assert run(loop_of("mean", behind, texts([4] * COUNT))).steps_taken == 2
    with pytest.raises(ValueError, match=REFUSED):
        run(loop_of("mean", behind, texts([4] * (COUNT - 1) + [3])))


@pytest.mark.parametrize("collate", [answers, some_answers])
@pytest.mark.parametrize(
    "lengths", [[2, 3, 4] * 3 + [8, 9, 10] * 5, [3, 8, 3, 9, 3, 3, 3, 3], [4, 2, 60, 3, 6]]
)
def test_texts_without_a_gradient_tell_nothing_of_the_others(
    collate: Any, lengths: list[int]
) -> None:
    with pytest.raises(ValueError, match=REFUSED):
        run(loop_of("filled_in_by_all", collate, texts(lengths)))
    assert run(loop_of("filled_in", collate, texts(lengths))).steps_taken == 2


def test_of_one_length_too_texts_without_a_gradient_tell_nothing() -> None:
    data = texts([6] * 20 + [9])
    for row, _ in data[:18]:
        row[PROMPT:] = 0  # no target counts it
    with pytest.raises(ValueError, match=REFUSED):
        run(loop_of("filled_in_by_all", answers, data))


def test_texts_that_are_too_short_alone_do_not_end_the_trial() -> None:
    with pytest.raises(ValueError, match=REFUSED):
        run(loop_of("by_threes", behind, texts([1, 2, 1, 2, 2, 6, 7, 8])))


def test_a_model_that_later_reads_padding_is_refused_later() -> None:
    loop = loop_of("masked_mean", behind, steps=20)
    for inputs, targets in loop:
        if loop.steps_taken == 4:
            loop._model.kind = "mean"
        try:
            loop.step(inputs, targets)
        except ValueError as error:
            assert "which changes their gradients" in str(error)  # noqa: PT017
            break
    assert 4 < loop.steps_taken < 20


def test_a_collate_fn_of_a_dataloader_with_workers_is_tried_too() -> None:
    loader = DataLoader(TEXTS, COUNT, collate_fn=behind, num_workers=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=REFUSED):
        run(private(Reader("mean"), dataset=loader, steps=2))
    run(private(Reader("masked_mean"), dataset=loader, steps=2))
