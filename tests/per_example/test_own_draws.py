"""Random numbers of an example follow from a key, its identity and the number of the draw: no other
example moves them, in whatever way examples run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn
from torch.nn import functional

from discreet.layers.draws import drawn_from, own_draws
from discreet.per_example.per_example import (
    clipped_gradient_sum,
    clipped_sum_by_owner,
)
from discreet.privacy.row_words import RowWords, spread
from tests.per_example.in_turn import sequential_sum
from tests.per_example.key_masks import CPU, KEY

COUNT = 12
DRAWS = torch.Generator().manual_seed(7703)
INPUTS = torch.randn(COUNT, 6, generator=DRAWS)
TARGETS = torch.randint(0, 3, (COUNT,), generator=DRAWS)
IDENTITIES = torch.tensor([3, 50, 7, 8, 2**40, 11, 12, 40, 41, 90, 91, 5])
C = 0.01


def drop_path(hidden: Tensor) -> Tensor:
    return hidden * hidden.new_empty(len(hidden), 1).bernoulli_(0.5)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda hidden: functional.dropout(hidden, 0.5),
    "in place": lambda hidden: functional.dropout(1.0 * hidden, 0.5, inplace=True),
    "alpha dropout": lambda hidden: functional.alpha_dropout(hidden, 0.5, training=True),
    "channels": lambda hidden: functional.dropout1d(hidden.view(-1, 8, 2), 0.5).flatten(1),
    "rand": lambda hidden: hidden * torch.rand(hidden.shape),
    "rand_like": lambda hidden: hidden * (torch.rand_like(hidden) > 0.5),
    "randn_like": lambda hidden: hidden + torch.randn_like(hidden),
    "bernoulli": lambda hidden: hidden * torch.bernoulli(torch.full_like(hidden, 0.5)),
    "drop path": drop_path,
    "empty, normal_": lambda hidden: hidden * torch.empty(16).normal_(),
    "randint": lambda hidden: hidden * torch.randint(0, 3, hidden.shape),
    "randperm": lambda hidden: hidden[:, torch.randperm(16)],
    "a distribution": lambda hidden: torch.distributions.Gamma(hidden.exp(), 1.0).rsample(),
    "attention": lambda hidden: functional.scaled_dot_product_attention(
        *[hidden.view(-1, 1, 4, 4)] * 3, dropout_p=0.5
    ).flatten(1),
}


class Drawing(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.first, self.last, self.form = nn.Linear(6, 16), nn.Linear(16, 3), FORMS[form]

    def forward(self, inputs: Tensor) -> Tensor:
        # twice: the second draw must not depend on how much the first one took
        return self.last(self.form(self.form(self.first(inputs).tanh())))


def model_of(form: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(4451)
        return Drawing(form)


def summed(model: nn.Module, rows: Any, key: bytes = KEY) -> Tensor:
    with drawn_from(key, IDENTITIES[rows]):
        return clipped_gradient_sum(model, INPUTS[rows], targets=TARGETS[rows], clip_norm=C)[0]


@pytest.mark.parametrize("form", FORMS)
def test_an_absent_example_moves_a_sum_of_drawing_models_by_its_clip_norm_alone(form: str) -> None:
    model = model_of(form)
    whole = summed(model, slice(None))
    for absent in (0, 5, COUNT - 1):
        rows = [place for place in range(COUNT) if place != absent]
        assert float((whole - summed(model, rows)).norm()) <= 1.0001 * C
    assert not torch.allclose(whole, summed(model, slice(None), key=KEY[::-1]))


@pytest.mark.parametrize("form", FORMS)
def test_order_and_the_way_in_which_examples_run_move_nothing(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of(form)
    whole = summed(model, slice(None))
    turned = summed(model, list(range(COUNT))[::-1])
    torch.testing.assert_close(turned, whole, rtol=1e-4, atol=1e-6)
    monkeypatch.setattr(
        "discreet.per_example.per_example._tried", lambda *_: ("one after the other", None)
    )
    torch.testing.assert_close(summed(model, slice(None)), whole, rtol=1e-4, atol=1e-6)


def test_owners_and_sums_of_examples_alone_have_draws_of_their_own() -> None:
    model = model_of("dropout")
    owners = torch.arange(COUNT) // 2
    found = []
    for rows in (slice(None), slice(2, None)):
        with drawn_from(KEY):
            batch = INPUTS[rows], TARGETS[rows]
            found.append(clipped_sum_by_owner(model, batch, owners[rows], clip_norm=C)[0])
    assert float((found[0] - found[1]).norm()) <= 1.0001 * C
    with drawn_from(KEY, IDENTITIES):
        alone = sequential_sum(model, INPUTS, targets=TARGETS, clip_norm=C)
    torch.testing.assert_close(alone, summed(model, slice(None)), rtol=1e-4, atol=1e-6)


def test_two_sums_of_a_key_draw_other_masks_and_so_do_two_examples() -> None:
    model, one = model_of("dropout"), INPUTS[:1].expand(2, -1)
    with drawn_from(KEY):
        sums = [
            clipped_gradient_sum(model, INPUTS, targets=TARGETS, clip_norm=9.0)[0] for _ in range(2)
        ]
        _, norms = clipped_gradient_sum(model, one, targets=TARGETS[:2], clip_norm=9.0)
    assert not torch.allclose(*sums)
    assert float(norms[0]) != float(norms[1])


def test_two_calls_of_a_pass_draw_other_numbers() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3, bias=False)

        def forward(self, inputs: Tensor) -> Tensor:
            ones = torch.ones_like(inputs)
            same = functional.dropout(ones, 0.5) == functional.dropout(ones, 0.5)
            return self.layer(same.to(inputs))

    _, norms = clipped_gradient_sum(Twice(), INPUTS, targets=TARGETS, clip_norm=C)
    # With the same numbers all are equal; by chance once in 2^72.
    assert len(norms.unique()) > 3


def test_what_a_forward_does_to_the_generators_ends_with_the_sum() -> None:
    class Rare(Drawing):
        """Seeds the generator for an example that no made-up one is like."""

        def forward(self, inputs: Tensor) -> Tensor:
            if (inputs > 300).any():
                torch.manual_seed(3)
            return super().forward(inputs)

    model, inputs = Rare("dropout"), INPUTS.clone()
    usual = clipped_gradient_sum(model, inputs, targets=TARGETS, clip_norm=C)[0]
    inputs[4] = 900.0
    found = []
    for _ in range(2):
        found.append(clipped_gradient_sum(model, inputs, targets=TARGETS, clip_norm=C)[0])
    assert not torch.allclose(usual, found[0])
    assert not torch.allclose(found[0], found[1])  # else the key of a later sum is known
    quiet: Any = Rare("dropout")
    quiet.form = torch.tanh
    before = torch.get_rng_state()
    clipped_gradient_sum(quiet, inputs, targets=TARGETS, clip_norm=C)
    assert torch.equal(torch.get_rng_state(), before)


def test_words_are_uniform_for_every_row_draw_and_way() -> None:
    words = RowWords(KEY)(torch.arange(200), 3, 50)
    for some in (words, spread(words[:, :1], 50)):
        values = (some.numpy().view(np.uint64) / 2.0**64).ravel()
        assert stats.kstest(values, "uniform").pvalue > 1e-9
        assert len(np.unique(values)) == 10_000
    assert torch.equal(RowWords(KEY)(torch.tensor([9]), 3, 50)[0], words[9])
    with drawn_from(KEY), own_draws(400, CPU) as draws:
        normal = draws.sampled("randn", lambda _: torch.empty(25))
        uniform = draws.sampled("rand", lambda _: torch.empty(25))
    assert stats.kstest(normal.flatten().numpy(), "norm").pvalue > 1e-9
    assert stats.kstest(uniform.flatten().numpy(), "uniform").pvalue > 1e-9


SEEDED: dict[str, Callable[[Any, Tensor], Tensor]] = {}


def seeding(function: Callable[[Any, Tensor], Tensor]) -> None:
    SEEDED[function.__name__] = function


@seeding
def manual_seed(model: Any, hidden: Tensor) -> Tensor:
    torch.manual_seed(3)
    return functional.dropout(hidden, 0.5)


@seeding
def forked(model: Any, hidden: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return functional.dropout(hidden, 0.5)


@seeding
def default_generator(model: Any, hidden: Tensor) -> Tensor:
    torch.default_generator.manual_seed(int(hidden.shape[-1]))
    return hidden * (torch.rand_like(hidden) > 0.5)


@seeding
def restored(model: Any, hidden: Tensor) -> Tensor:
    torch.set_rng_state(model.state)
    return functional.dropout(hidden, 0.5)


@seeding
def seeded_and_unused(model: Any, hidden: Tensor) -> Tensor:
    torch.manual_seed(3)
    return hidden


@pytest.mark.parametrize("name", SEEDED)
def test_a_forward_that_sets_the_state_of_a_generator_is_refused(name: str) -> None:
    model: Any = model_of("dropout")
    model.form, model.state = (lambda hidden: SEEDED[name](model, hidden)), torch.get_rng_state()
    with pytest.raises(ValueError, match="state of PyTorch's random generator"):
        clipped_gradient_sum(model, INPUTS, targets=TARGETS, clip_norm=C)


@pytest.mark.parametrize("how", ["forked without a seed", "a generator of its own"])
def test_a_forward_that_leaves_the_generators_alone_is_accepted(how: str) -> None:
    def form(hidden: Tensor) -> Tensor:
        if how == "a generator of its own":
            generator = torch.Generator().manual_seed(41)
            return hidden @ torch.rand(16, 16, generator=generator)
        with torch.random.fork_rng():
            return functional.dropout(hidden, 0.5)

    model: Any = model_of("dropout")
    model.form = form
    before = torch.get_rng_state()
    clipped_gradient_sum(model.eval(), INPUTS, targets=TARGETS, clip_norm=C)
    if how == "a generator of its own":
        assert torch.equal(torch.get_rng_state(), before)


def test_a_row_of_an_owner_that_no_trial_has_seen_leaves_nothing_in_a_buffer() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 3)
            self.register_buffer("kept", torch.zeros(6))

        def forward(self, inputs: Tensor) -> Tensor:
            if any(row[0] > 300 for row in inputs.tolist()):
                self.kept.add_(inputs.detach().mean(0))
            return self.layer(inputs)

    # So many owners run one after the other, where only a look at the buffers sees a write.
    inputs, targets = INPUTS.repeat(4, 1) + torch.rand(48, 1, generator=DRAWS), TARGETS.repeat(4)
    inputs[5, 0] = 900.0
    with pytest.raises(ValueError, match="forward changes kept"):
        clipped_sum_by_owner(Keeps(), (inputs, targets), torch.arange(48) // 2, clip_norm=C)
