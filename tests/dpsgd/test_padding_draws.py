"""Models that draw, over padding: what they draw must not decide how far padding is read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Beta, Gamma

from discreet.dpsgd.dpsgd import DPSGD
from discreet.dpsgd.draws_at import DrawsAt
from tests.dpsgd.loops import private, run
from tests.dpsgd.test_padding import REFUSED, TEXTS, WORDS, behind, with_lengths

CROP = 3  # words; no text is shorter
Rule = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def crop(start: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    """A few neighbouring words from a place on."""
    return words[:, int(start) : int(start) + CROP], torch.ones(len(words), CROP, 1)


def chosen(places: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
    picked = words.gather(1, places.unsqueeze(2).expand(-1, -1, words.shape[2]))
    return picked, torch.ones(len(words), places.shape[1], 1)


def seldom_centred(words: Tensor, is_word: Tensor, drawn: Tensor) -> tuple[Tensor, Tensor]:
    return torch.where(drawn[:, None, None], words - words.mean(1, keepdim=True), words), is_word


def _starts(words: Tensor) -> int:
    return words.shape[1] - CROP + 1


# Each takes words (n, positions, width), and which are no padding, (n, positions, 1).
READ_PADDING: dict[str, Rule] = {
    "randint": lambda x, _: crop(torch.randint(_starts(x), (1,)), x),
    "randint of two bounds": lambda x, _: crop(torch.randint(0, _starts(x), size=(1,)), x),
    "randint by name": lambda x, _: crop(torch.randint(low=0, high=_starts(x), size=(1,)), x),
    "random_": lambda x, _: crop(torch.empty(1).random_(0, _starts(x)), x),
    "randint_like": lambda x, _: crop(torch.randint_like(torch.zeros(1), _starts(x)), x),
    "uniform_": lambda x, _: crop(torch.empty(1).uniform_(0, _starts(x)), x),
    "randperm": lambda x, _: chosen(torch.randperm(x.shape[1])[None, :2].expand(len(x), -1), x),
    "multinomial": lambda x, _: chosen(torch.ones(x.shape[:2]).multinomial(2), x),
    "an order by rand": lambda x, _: chosen(torch.rand(x.shape[:2]).argsort(1)[:, :2], x),
    "the largest of rand": lambda x, _: chosen(torch.rand(x.shape[:2]).argmax(1, keepdim=True), x),
    "the largest of exponential_": lambda x, _: chosen(
        torch.empty(x.shape[:2]).exponential_().argmax(1, keepdim=True), x
    ),
    "the smallest of uniform_": lambda x, _: chosen(
        torch.empty(x.shape[:2]).uniform_(1, 2).argmin(1, keepdim=True), x
    ),
    "normal": lambda x, is_word: (
        x * torch.normal(x.detach().mean((1, 2), keepdim=True), 1.0),
        is_word,
    ),
    "gamma": lambda x, is_word: (
        x * Gamma(x.detach().mean((1, 2), keepdim=True).exp(), 1.0).sample(),
        is_word,
    ),
    "rand": lambda x, is_word: seldom_centred(x, is_word, torch.rand(len(x)) < 0.1),
    "randn": lambda x, is_word: seldom_centred(x, is_word, torch.randn(len(x)) > 1.5),
    "bernoulli": lambda x, is_word: seldom_centred(
        x, is_word, torch.full((len(x),), 0.1).bernoulli() > 0
    ),
}
MASK_IT: dict[str, Rule] = {
    "noise": lambda x, is_word: (x + 0.1 * torch.randn_like(x), is_word),
    "words hidden": lambda x, is_word: (x * (torch.rand(x.shape[:2]) < 0.8)[..., None], is_word),
    "a place among one's own": lambda x, is_word: chosen(is_word.squeeze(2).multinomial(2), x),
    "an order of one's own": lambda x, is_word: chosen(
        torch.rand(x.shape[:2]).masked_fill(is_word.squeeze(2) == 0, 2.0).argsort(1)[:, :2], x
    ),
    "some of one's own": lambda x, is_word: (x, torch.bernoulli(0.9 * is_word) + 1e-9 * is_word),
    "counts of one's own": lambda x, is_word: (x, torch.poisson(is_word) + 1e-9 * is_word),
    "successes of one's own": lambda x, is_word: (
        x,
        torch.binomial(3 * torch.ones_like(is_word), 0.5 * is_word) + 1e-9 * is_word,
    ),
    "a beta of one's own": lambda x, is_word: (
        x * Beta(1 + (is_word.sum((1, 2))), 2.0).sample()[:, None, None],
        is_word,
    ),
    "a factor": lambda x, is_word: (x * torch.randint(1, 9, (len(x), 1, 1)), is_word),
    "counts": lambda x, is_word: (
        x * torch.poisson(torch.ones(len(x), 1, 1)).add(torch.empty(1).geometric_(0.5)),
        is_word,
    ),
    "successes": lambda x, is_word: (
        x * torch.binomial(torch.full((len(x), 1, 1), 3.0), torch.full((len(x), 1, 1), 0.5)),
        is_word,
    ),
}


class Drawing(nn.Module):
    """The mean of words by a rule that draws."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.rule = rule
        self.words = nn.Embedding(WORDS, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, rows: Tensor, lengths: Tensor) -> Tensor:
        is_word = torch.arange(rows.shape[1]) < lengths[:, None]
        words, weights = self.rule(self.words(rows), is_word.unsqueeze(2).float())
        return self.head((words * weights).sum(1) / weights.sum(1))


def loop_of(rule: Rule) -> DPSGD:
    torch.manual_seed(0)
    how = {"dataset": TEXTS, "collate_fn": with_lengths, "batch_size": len(TEXTS), "steps": 2}
    return private(Drawing(rule), **how)


@pytest.mark.parametrize("name", READ_PADDING)
def test_a_model_that_reads_padding_by_chance_is_refused_at_no_cost(name: str) -> None:
    loop = loop_of(READ_PADDING[name])
    with pytest.raises(ValueError, match=REFUSED):
        run(loop)
    assert (loop.epsilon(), loop.steps_taken) == (0, 0)


@pytest.mark.parametrize("name", MASK_IT)
def test_a_model_that_draws_and_masks_padding_is_accepted(name: str) -> None:
    assert run(loop_of(MASK_IT[name])).steps_taken == 2


def test_padding_that_few_texts_feel_is_seen_by_the_first_trial() -> None:
    """The largest output of a convolution lies beside the padding in few texts."""

    class Largest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(WORDS, 8)
            self.near = nn.Conv1d(8, 1, 3, padding=1)
            self.head = nn.Linear(1, 4)

        def forward(self, rows: Tensor) -> Tensor:
            words = self.words(rows).transpose(1, 2)
            return self.head(self.near(words).masked_fill(rows[:, None] == 0, -9.0).amax(2))

    draws = torch.Generator().manual_seed(0)
    data = [
        (torch.randint(1, WORDS, (length,), generator=draws), 0)
        for length in [*[18 + place % 3 for place in range(20)], 30]
    ]
    torch.manual_seed(0)
    loop = private(Largest(), dataset=data, collate_fn=behind, batch_size=len(data), steps=1)
    with pytest.raises(ValueError, match=REFUSED):
        run(loop)


@pytest.mark.parametrize(
    ("draw", "least", "most"),
    [
        (lambda: torch.randint(3, 7, (5,)), 3, 6),
        (lambda: torch.randint(7, (5,)), 0, 6),
        (lambda: torch.randint(high=7, size=(5,)), 0, 6),
        (lambda: torch.empty(5).random_(7), 0, 6),
        (lambda: torch.empty(5).random_(to=7), 0, 6),
        (lambda: torch.randint_like(torch.zeros(5), 3, 7), 3, 6),
        (lambda: torch.empty(5).uniform_(-2, 2), -1.996, 1.996),
        (lambda: torch.tensor([0.0, 1.0, 3.0, 0.0]).multinomial(5, replacement=True), 1, 2),
        (lambda: torch.binomial(torch.full((5,), 3.0), torch.full((5,), 0.5)), 0, 3),
        (lambda: torch.full((5,), 0.5).bernoulli(), 1, 0),
        (lambda: torch.zeros(5).bernoulli_(0.5), 1, 0),
        (lambda: torch.zeros(5).bernoulli_(), 1, 0),
        (lambda: torch.tensor([0.0]).bernoulli(), 0, 0),
        (lambda: torch.bernoulli(torch.tensor([1.0])), 1, 1),
        (lambda: torch.normal(1.0, 2.0, (5,)), -5.18, 7.18),
        (lambda: torch.normal(torch.ones(5), std=2.0), -5.18, 7.18),
        (lambda: torch.zeros(5).normal_(1.0, std=2.0), -5.18, 7.18),
        (lambda: torch.randn(5), -3.09, 3.09),
        (lambda: torch.rand(5), 0.001, 0.999),
        (lambda: torch.randperm(5)[:1], 4, 0),
    ],
)
def test_a_share_of_what_is_drawn(draw: Callable[[], Tensor], least: float, most: float) -> None:
    for share, wanted in ((0.001, least), (0.999, most)):
        with DrawsAt(share):
            found = draw()
        assert found.tolist() == pytest.approx([wanted] * len(found), abs=1e-3)
