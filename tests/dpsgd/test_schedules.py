"""Noise and clip norms that change from step to step: each step's noise is for its own clip, and is
charged."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant
from torch import Tensor

from discreet import AdaptiveClipping
from discreet.dpsgd.dpsgd import DPSGD
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.quantile import BIT_SENSITIVITY
from discreet.privacy.randomness import RandomSource, seeded_source
from tests.dpsgd.loops import BATCH, COUNTED, NOISE, SEED, SIZE, private, run, sgd
from tests.node.clients import examples, linear, params_of
from tests.replay import Replay, replay

NOISES = [1.4, 1.4, 0.9, 0.9, 0.9, 0.6, 0.6, 2.0]


@cache
def oracle(*noises: float) -> float:
    accountant = RdpAccountant()
    for noise, count in Counter(noises).items():
        accountant.compose(PoissonSampledDpEvent(BATCH / SIZE, GaussianDpEvent(noise)), count)
    return float(accountant.get_epsilon(1e-3))


@pytest.mark.parametrize("schedule", [NOISES, NOISES.__getitem__], ids=["list", "function"])
def test_each_step_is_accounted_by_its_own_noise(schedule: Any) -> None:
    loop, spent = private(linear(), noise_multiplier=schedule, accountant="rdp"), list[float]()
    for batch in loop:
        loop.step(*batch)
        spent.append(loop.epsilon())
    for taken in (1, 3, 8):
        assert math.isclose(spent[taken - 1], oracle(*NOISES[:taken]), rel_tol=2e-3)
    assert not math.isclose(spent[-1], oracle(*NOISES[:1] * 8), rel_tol=0.1)


def noise_steps(loop: DPSGD, monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, float]]:
    """The noise multiplier and the sensitivity of each noise that a loop draws."""
    found, draw = list[tuple[float, float]](), Gaussian.add_noise

    def noted(self: Gaussian, total: Tensor, sensitivity: float, source: RandomSource) -> Tensor:
        found.append((self.noise_multiplier, sensitivity))
        return draw(self, total, sensitivity, source)

    with monkeypatch.context() as patch:
        patch.setattr(Gaussian, "add_noise", noted)
        run(loop)
    return found


def test_each_step_draws_the_noise_that_it_is_charged_for_the_clip_norm_that_clipped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clips = [1.0, 0.5, 0.5, 0.25, 0.25, 0.25, 0.1, 2.0]
    loop = private(linear(), noise_multiplier=NOISES, clip_norm=lambda step: clips[step])
    assert noise_steps(loop, monkeypatch) == list(zip(NOISES, clips, strict=True))


def test_a_target_scales_the_schedule_and_is_nearly_used_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = private(linear(), noise_multiplier=NOISES, target_epsilon=2.0, accountant="rdp")
    drawn = [noise for noise, _ in noise_steps(loop, monkeypatch)]
    assert [noise / drawn[0] for noise in drawn] == pytest.approx(
        [noise / NOISES[0] for noise in NOISES]
    )
    assert 0.995 * 2.0 < loop.epsilon() <= 2.0
    assert math.isclose(loop.epsilon(), oracle(*drawn), rel_tol=2e-3)


def test_a_schedule_is_asked_for_all_steps_before_a_batch_is_drawn_and_never_again() -> None:
    asked = list[int]()
    loop = private(linear(), noise_multiplier=lambda step: asked.append(step) or 1.0)
    assert asked == list(range(8))
    run(loop)
    assert asked == list(range(8))


def adaptive_by_hand(steps: int, settings: AdaptiveClipping, noise: float) -> tuple[Tensor, float]:
    """Parameters and clip norm after some steps with plain torch, each over all examples (Andrew et
    al. 2021)."""
    model, source, clip = linear(), seeded_source(SEED), settings.norm or 0.0
    stddev = settings.count_stddev or 0.0
    of_sum = noise if noise == 0 else (noise**-2 - (2 * stddev) ** -2) ** -0.5
    optimizer = sgd(model.parameters())
    for step in range(steps):
        total, below = torch.zeros(18), 0.0
        for place in range(SIZE):
            losses = torch.nn.functional.cross_entropy(
                model(COUNTED.inputs[[place]]), COUNTED.targets[[place]]
            )
            grads = torch.autograd.grad(losses, list(model.parameters()))
            gradient = torch.cat([each.flatten() for each in grads])
            below += 0.5 if gradient.norm() <= clip else -0.5
            total += gradient * min(1.0, clip / float(gradient.norm()))
        drawn = source.child("step", step)
        mean = Gaussian(of_sum).add_noise(total, clip, drawn.child("noise")) / SIZE
        counted = torch.tensor(below, dtype=torch.float64)
        below = float(Gaussian(2 * stddev).add_noise(counted, 0.5, drawn.child("count")))
        for value, part in zip(model.parameters(), torch.split(mean, [15, 3]), strict=True):
            value.grad = part.view_as(value)
        optimizer.step()
        fraction = min(1.0, max(0.0, below / SIZE + 0.5))
        clip *= math.exp(-settings.learning_rate * (fraction - settings.target_quantile))
    return params_of(model), clip


@pytest.mark.parametrize("most", [None, 7])
def test_an_adaptive_clip_norm_is_the_papers_written_out_by_hand(most: int | None) -> None:
    settings, model = AdaptiveClipping(0.7, learning_rate=0.3, count_stddev=3.0), linear()
    loop = private(
        model,
        clip_norm=settings,
        batch_size=SIZE,
        steps=4,
        noise_multiplier=1.5,
        max_physical_batch=most,
    )
    params, clip = adaptive_by_hand(4, settings, 1.5)
    assert run(loop).clip_norm == pytest.approx(clip, rel=1e-5)
    assert torch.allclose(params_of(model), params, rtol=1e-4, atol=1e-5)


def test_gradients_and_count_together_draw_the_noise_that_is_charged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = private(linear(), clip_norm=AdaptiveClipping(0.4))
    steps = noise_steps(loop, monkeypatch)
    for count, update in zip(steps[::2], steps[1::2], strict=True):
        assert count[1] == BIT_SENSITIVITY
        assert (count[0] ** -2 + update[0] ** -2) ** -0.5 == pytest.approx(NOISE, rel=1e-9)
    assert loop.epsilon() == run(private(linear())).epsilon()
    assert loop.clip_norm != 0.4
    assert steps[1][1] == 0.4


def test_without_a_norm_it_is_searched_for_and_found() -> None:
    loop = private(
        linear(), clip_norm=AdaptiveClipping(), batch_size=SIZE, steps=12, noise_multiplier=0.1
    )
    model = linear()
    norms = [float(gradient_norm(model, place)) for place in range(SIZE)]
    assert loop.clip_norm == 0.1
    assert run(loop).clip_norm == pytest.approx(sorted(norms)[SIZE // 2], rel=0.5)


def gradient_norm(model: torch.nn.Module, place: int) -> Tensor:
    loss = torch.nn.functional.cross_entropy(
        model(COUNTED.inputs[[place]]), COUNTED.targets[[place]]
    )
    return torch.cat(
        [each.flatten() for each in torch.autograd.grad(loss, list(model.parameters()))]
    ).norm()


LOOPS: dict[str, dict[str, Any]] = {
    "schedules": {"noise_multiplier": NOISES, "clip_norm": lambda step: 0.4 + 0.1 * step},
    "adaptive": {"clip_norm": AdaptiveClipping(2.0)},  # which most norms are within
    "adaptive, in pieces": {"clip_norm": AdaptiveClipping(0.4), "max_physical_batch": 3},
}


def replayed(how: str, factor: float, other: float) -> Replay:
    """A loop beside the same loop in which the last example is another one; NaN contributes
    nothing."""

    def loop(last: float, _: RandomSource) -> object:
        inputs = torch.cat([examples(SIZE - 1).inputs, torch.full((1, 5), last)])
        data = torch.utils.data.TensorDataset(inputs, COUNTED.targets)
        model = linear()
        made = run(private(model, dataset=data, **LOOPS[how]))
        return [params_of(model), made.clip_norm, made.epsilon()]

    return replay(loop, factor, other)


@pytest.mark.parametrize("how", LOOPS)
@pytest.mark.parametrize("factor", [1.0, -1e6, 0.0])
def test_zeroing_out_an_example_moves_each_noised_sum_within_its_sensitivity(
    how: str, factor: float
) -> None:
    for one, other in ((factor, math.nan), (math.nan, factor)):
        found = replayed(how, one, other)
        assert found.faults == ()
        assert max(found.shares) > 0.1
