"""Noise at the client: what is released, for which sensitivity, and what it costs over the
rounds."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from scipy.stats import norm
from torch import Tensor

from discreet.ledger.durable_ledger import DurableLedger
from discreet.mechanisms.client_noise import LocalPrivacy, release_update
from discreet.mechanisms.local_noise import release_step, round_privacy
from discreet.node.account import Refused
from discreet.node.client import Client
from discreet.node.work import work_of
from discreet.privacy.randomness import seeded_source
from discreet.protocol.messages import TrainReply
from discreet.settings.settings import Settings, client_settings
from discreet.training.local_training import LocalSettings
from tests.node.clients import (
    OFF,
    SIZE,
    client,
    clipped,
    config,
    examples,
    gradients,
    linear,
    params_of,
    rejects_gaussian,
    rejects_laplace,
    request,
)

CLIP, RATE, LONG = 0.5, 0.3, 20_000
noises = pytest.mark.parametrize("noise", ["float", "grid", "secure_sum"])


def local(kind: str, *words: str) -> Settings:
    return config(*OFF, f"privacy.local.kind={kind}", *words)


def release(kind: str, update: Tensor, noise_multiplier: float, *, noise: str = "float") -> Tensor:
    return release_update(
        update, LocalPrivacy(kind, CLIP, noise_multiplier, noise), source=seeded_source(92861)
    )


def answers(run: Settings, who: Client) -> list[TrainReply]:
    """The replies of one client that takes part in every planned round."""
    return [
        who.answer(work_of(request(run, number)), params_of(linear()))
        for number in range(1, run.rounds + 1)
    ]


@pytest.mark.parametrize(("kind", "norm_order"), [("gaussian", 2), ("laplace", 1)])
def test_the_whole_update_is_clipped_before_noise(kind: str, norm_order: int) -> None:
    long, short = torch.tensor([3.0, -4.0, 0.0]), torch.tensor([0.1, 0.2, -0.1])
    expected = long * CLIP / float(torch.linalg.vector_norm(long, norm_order))
    assert torch.allclose(release(kind, long, 0.0), expected, rtol=1e-5)
    assert torch.equal(release(kind, short, 0.0), short)
    assert float((release(kind, long, 0.0, noise="grid") - expected).norm()) <= CLIP / 1000


@noises
@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_update_that_is_not_finite_is_released_as_noise_alone(
    kind: str, bad: float, noise: str
) -> None:
    nothing = release(kind, torch.zeros(3), 1.5, noise=noise)
    assert torch.equal(release(kind, torch.tensor([0.1, bad, 0.2]), 1.5, noise=noise), nothing)


@noises
@pytest.mark.parametrize(
    ("kind", "rejects"), [("gaussian", rejects_gaussian), ("laplace", rejects_laplace)]
)
def test_noise_is_drawn_for_twice_the_clip_norm(
    kind: str, rejects: Callable[..., bool], noise: str
) -> None:
    drawn, scale = release(kind, torch.zeros(LONG), 1.5, noise=noise), 1.5 * 2 * CLIP
    assert [rejects(drawn, by * scale) for by in (0.9, 1, 1.1)] == [True, False, True]


def step(count: int, noise_multiplier: float, *, dims: int = 5, classes: int = 3) -> Tensor:
    model = linear(dims=dims, classes=classes)
    data, privacy = (
        examples(count, dims=dims, classes=classes),
        LocalPrivacy("laplace_step", CLIP, noise_multiplier),
    )
    return release_step(
        model,
        data,
        training=LocalSettings(1, 1, RATE, 0.0),
        privacy=privacy,
        source=seeded_source(5437),
    )


def test_a_laplace_step_is_one_step_against_the_mean_of_gradients_clipped_in_l1() -> None:
    found = gradients(linear(), examples(7))
    assert max(float(gradient.abs().sum()) for gradient in found) > CLIP
    expected = -RATE * clipped(found, CLIP, order=1) / 7
    assert torch.allclose(step(7, 0.0), expected, rtol=1e-4, atol=1e-6)


def test_a_laplace_step_is_noised_for_two_eta_c_over_n() -> None:
    noise = step(7, 1 / 0.8, dims=200, classes=100) - step(7, 0.0, dims=200, classes=100)
    scale = (2 * RATE * CLIP / 7) / 0.8
    assert [rejects_laplace(noise, by * scale) for by in (0.9, 1, 1.1)] == [True, False, True]
    assert torch.equal(step(0, 1.0), torch.zeros(SIZE))  # without examples


SHARES = {
    "uniform": [1 / 4] * 4,
    "geometric": [0.9**t / sum(0.9**s for s in range(4)) for t in range(4)],
    "[4,1,2,1]": [4 / 8, 1 / 8, 2 / 8, 1 / 8],
}


@pytest.mark.parametrize(("schedule", "shares"), SHARES.items())
@pytest.mark.parametrize("kind", ["laplace", "laplace_step"])
def test_a_schedule_spreads_the_total_over_the_rounds(
    kind: str, schedule: str, shares: list[float]
) -> None:
    run = local(kind, "privacy.local.epsilon=2", f"privacy.local.schedule={schedule}")
    per_round = [round_privacy(client_settings(run), round_number=number) for number in range(1, 5)]
    assert [1 / privacy.noise_multiplier for privacy in per_round if privacy] == pytest.approx(
        [2 * s for s in shares]
    )

    with pytest.raises(ValueError, match="left for round 5"):
        round_privacy(client_settings(run), round_number=5)


def test_a_gaussian_schedule_adds_up_to_one_gaussian_of_the_total() -> None:
    run = local("gaussian", "privacy.local.epsilon=2", "privacy.local.schedule=[4,1,2,1]")
    per_round = [round_privacy(client_settings(run), round_number=number) for number in range(1, 5)]
    inverse = [privacy.noise_multiplier**-2 for privacy in per_round if privacy]
    assert [part / sum(inverse) for part in inverse] == pytest.approx(SHARES["[4,1,2,1]"])
    # Balle and Wang 2018, Theorem 8: the delta of one Gaussian of that multiplier at epsilon 2.
    z = sum(inverse) ** -0.5
    assert norm.cdf(0.5 / z - 2 * z) - math.exp(2) * norm.cdf(-0.5 / z - 2 * z) == pytest.approx(
        1e-3, rel=1e-6
    )


@pytest.mark.parametrize("kind", ["laplace", "laplace_step"])
def test_laplace_is_accounted_as_pure_epsilon_and_by_loss_distribution(
    kind: str, tmp_path: Path
) -> None:
    run = local(kind, "privacy.local.noise_multiplier=2")
    replies = answers(run, client(examples(6), tmp_path / "ledger.db"))
    assert [reply.epsilon_local_pure for reply in replies] == pytest.approx([0.5, 1.0, 1.5, 2.0])
    # One Laplace release of pure epsilon e is (e + 2 ln(1 - delta), delta)-private, and no less.
    assert replies[0].epsilon_local == pytest.approx(0.5 + 2 * math.log1p(-1e-3), rel=1e-3)
    assert all(reply.epsilon_local <= reply.epsilon_local_pure for reply in replies)


@pytest.mark.parametrize("schedule", SHARES)
@pytest.mark.parametrize("kind", ["gaussian", "laplace", "laplace_step"])
def test_a_total_is_spent_exactly_at_the_last_round_and_the_client_then_stops(
    kind: str, schedule: str, tmp_path: Path
) -> None:
    run = local(kind, "privacy.local.epsilon=2", f"privacy.local.schedule={schedule}")
    who = client(examples(6), tmp_path / "ledger.db")
    replies = answers(run, who)
    spent = [
        reply.epsilon_local if kind == "gaussian" else reply.epsilon_local_pure for reply in replies
    ]
    assert spent == sorted(spent)
    assert spent[-2] < 1.95
    assert spent[-1] == pytest.approx(2, rel=1e-6)
    with pytest.raises(Refused):
        who.answer(work_of(request(run, 5)), params_of(linear()))


@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("epsilon", [0.5, 20])
def test_a_gaussian_total_is_met_by_the_accountant_of_the_run(
    epsilon: float, rounds: int, tmp_path: Path
) -> None:
    of_run = (f"rounds={rounds}", "privacy.accountant=rdp", f"privacy.local.epsilon={epsilon}")
    who = client(examples(6), tmp_path / "ledger.db")
    assert who.accounts is not None
    counting = replace(who, accounts=replace(who.accounts, accountant="rdp"))
    last = answers(local("gaussian", *of_run), counting)[-1]
    assert (1 - 1e-3) * epsilon < last.epsilon_local <= epsilon * (1 + 1e-9)


def test_a_gaussian_total_that_no_noise_meets_is_refused(tmp_path: Path) -> None:
    words = ("privacy.accountant=rdp", "privacy.local.epsilon=1e-9", "privacy.delta=1e-30")
    with pytest.raises(Refused, match=r"privacy\.local\.epsilon=1e-09 can't be reached"):
        answers(local("gaussian", *words), client(examples(6), tmp_path / "ledger.db"))


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_a_round_that_is_asked_again_does_not_pass_the_total(kind: str, tmp_path: Path) -> None:
    # Many small Laplace releases cost much less by loss distribution: it is the pure total that
    # counts.
    run, who = (
        local(kind, "rounds=40", "privacy.local.epsilon=4"),
        client(examples(6), tmp_path / "ledger.db"),
    )
    last = answers(run, who)[-1]
    assert kind == "gaussian" or last.epsilon_local < 3
    with pytest.raises(Refused, match="the local-level budget is spent"):
        who.answer(work_of(request(run, 1)), params_of(linear()))
    assert len(DurableLedger(tmp_path / "ledger.db").releases()) == 40
