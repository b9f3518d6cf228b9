"""Masks of dropout: whose they are, that a seeded run draws them again, and that they touch nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from discreet.models.models import masks_from
from discreet.privacy.randomness import secure_source, seeded_source
from discreet.training.local_training import ExamplePrivacy, LocalSettings, local_update
from tests.node.clients import examples, params_of

PLAIN, BY_EXAMPLE = LocalSettings(2, 3, 0.2, 0.5), LocalSettings(2, 3, 0.2, 0.5, ExamplePrivacy(0.4, 0.7))


def sequence(shape: tuple[int, ...], num_classes: int) -> nn.Module:
    size = shape[0] if len(shape) == 1 else 64
    layers = [nn.Linear(size, 8), nn.ReLU(), nn.Dropout(0.4), nn.Linear(8, num_classes)]
    return nn.Sequential(nn.Flatten(), *layers)


def built(seed: int = 6029) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return sequence((5,), 3)


def trained(settings: LocalSettings, seed: int, model: nn.Module | None = None) -> Tensor:
    start = params_of(built())
    return local_update(model or built(), start, examples(7), settings=settings, source=seeded_source(seed))


@pytest.mark.parametrize("settings", [PLAIN, BY_EXAMPLE])
def test_a_seeded_client_draws_the_same_masks_whatever_was_drawn_before(settings: LocalSettings) -> None:
    first, model = trained(settings, 811), built()
    torch.rand(5)
    assert torch.equal(trained(settings, 811, model), first)
    assert torch.equal(trained(settings, 811, model), first)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(3)
        assert torch.equal(trained(settings, 811), first)


def test_training_with_masks_is_that_of_a_loop_by_hand() -> None:
    data, source, model = examples(7), seeded_source(5119), built()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    orders = [source.child("epoch", epoch).permutation(7) for epoch in range(2)]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(int(source.child("dropout").words(1)[0]))
        for batch in [part for order in orders for part in torch.split(order, 3)]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model.train()(data.inputs[batch]), data.targets[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    torch.testing.assert_close(trained(PLAIN, 5119), params_of(model) - params_of(built()))
    without = built()
    without[3] = nn.Identity()
    assert not torch.allclose(trained(PLAIN, 5119, without), trained(PLAIN, 5119), atol=1e-3)


def test_the_generator_is_left_as_it_was_and_untouched_without_dropout() -> None:
    plain, before = nn.Linear(2, 2), torch.random.get_rng_state()
    with masks_from(seeded_source(1), built()):
        assert not torch.equal(torch.random.get_rng_state(), before)
        torch.rand(3)
    assert torch.equal(torch.random.get_rng_state(), before)
    with masks_from(seeded_source(1), plain):
        assert torch.equal(torch.random.get_rng_state(), before)
    drawn, source = list[Tensor](), secure_source()
    for _ in range(2):
        with masks_from(source, built()):
            drawn.append(torch.rand(4))
    assert not torch.equal(*drawn)  # of two seeds of 64 bits
