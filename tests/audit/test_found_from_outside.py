"""Planted faults are found from outside: an audit that sees releases alone refutes what the fault's
round claims.

The faults are those of tests/test_replay_faults.py, each a small round of its own; left out is the
one that weakens nothing. Every audit runs a round many times with one client more and as many times
without it; a score is a function of what the round released. Seeds are fixed; a sound round is not
refuted by any of the scores.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

import tests.test_replay_faults as planted
from discreet.accounting.events import poisson_round_event
from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.audit.canaries import Claim, Experiment, Observation, Releases, Scores
from discreet.audit.verdict import judge
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.quantile import BIT_SENSITIVITY
from discreet.privacy.randomness import RandomSource, seeded_source
from tests.audit.made import repeated_scores
from tests.test_replay_faults import EXTRA, LONG, OTHERS, Client

DELTA, Z, NONE = 1e-3, 3.0, Gaussian(0.0)
Round = Callable[[list[Client], RandomSource], object]
Score = Callable[[object], float]

OTHERS_SUM = sum((client.clipped for client in OTHERS), torch.zeros(2))


@pytest.fixture(autouse=True)
def more_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that claims less is refuted by fewer runs."""
    monkeypatch.setattr(planted, "NOISE", Gaussian(Z))


def vector(released: object) -> Tensor:
    """What was released of the updates."""
    found = released[0] if isinstance(released, tuple) else released
    found = found["weight"] if isinstance(found, dict) else found
    assert isinstance(found, Tensor)
    return found.double()


def along(client: Client, released: object) -> float:
    """How far the release points to where a client points."""
    return float(vector(released)[:2] @ client.update.double() / client.update.norm())


def last(released: object) -> float:
    """The last number of the release."""
    return float(vector(released)[-1])


def buffer(released: object) -> float:
    assert isinstance(released, dict)
    return float(released["num_batches_tracked"])


def is_noised(released: object) -> float:
    return float(vector(released).any())


def near(divisor: float, released: object) -> float:
    """How near the release is to a mean over all clients, `EXTRA` too."""
    return -float((vector(released) - (OTHERS_SUM + EXTRA.clipped) / divisor).norm())


def far(divisor: float, released: object) -> float:
    """How far the release is from what it would be without the client, and without noise."""
    return float((vector(released) - OTHERS_SUM / divisor).norm())


def over_its_clip_norm(released: object) -> float:
    """How surely `EXTRA` is there, by the noise that the released clip norm tells."""
    assert isinstance(released, tuple)
    rest = planted.EXPECTED_COHORT * vector(released) - OTHERS_SUM
    return float(rest @ EXTRA.clipped.double()) / released[1] ** 2


def scores_of(run: Round, score: Score, extra: Client, runs: int) -> Scores:
    source = seeded_source(10513)
    worlds = (([*OTHERS, extra], source.child("in")), (OTHERS, source.child("out")))
    return repeated_scores(
        *(
            np.array([score(run(cohort, drawn.child(number))) for number in range(runs)])
            for cohort, drawn in worlds
        )
    )


def refuted(scores: Scores, spent: PrivacyLedger, *, gaussian: bool) -> bool:
    """Whether a lower bound passes what the ledger says was spent."""
    claim = Claim(spent.epsilon(DELTA), DELTA, "add or remove one client")
    releases = Releases(1, 1.0, Z if gaussian else None, claim, repeated=True)
    return judge(Experiment("a round", (Observation("run", claim, scores),), {}, releases)).refuted


ONE_GAUSSIAN = PrivacyLedger().record(poisson_round_event(1.0, noise_multiplier=Z))
MOVED_CLIP = partial(planted.noise_for_the_next_clip_norm, stddev=2.0, rate=8.0)

# With how many runs each way: the rarer what tells two worlds apart is, the more it takes.
FOUND: dict[str, tuple[Round, Client, Score, int]] = {
    "clip_after_noise": (planted.clip_after_noise, LONG, partial(along, LONG), 600),
    "no_clip": (planted.no_clip, LONG, partial(along, LONG), 600),
    "noise_for_the_next_clip_norm": (MOVED_CLIP, EXTRA, over_its_clip_norm, 600),
    "data_dependent_denominator": (
        planted.data_dependent_denominator,
        EXTRA,
        partial(near, 3),
        2000,
    ),
    "mean_before_noise": (planted.mean_before_noise, EXTRA, partial(near, 3), 2000),
    "weights_by_num_examples": (planted.weights_by_num_examples, EXTRA, partial(along, EXTRA), 600),
    "weights_that_add_up_to_one": (
        planted.weights_that_add_up_to_one,
        EXTRA,
        partial(along, EXTRA),
        600,
    ),
    "unclipped_integer_buffer": (planted.unclipped_integer_buffer, EXTRA, buffer, 600),
    "integer_buffer_noised_but_not_clipped": (
        planted.integer_buffer_noised_but_not_clipped,
        EXTRA,
        last,
        600,
    ),
    "bits_that_are_not_centred": (
        partial(planted.bits_that_are_not_centred, stddev=1.5),
        EXTRA,
        last,
        600,
    ),
    "noise_only_where_somebody_replied": (
        planted.noise_only_where_somebody_replied,
        EXTRA,
        is_noised,
        600,
    ),
    "clip_norm_from_the_data": (planted.clip_norm_from_the_data, LONG, partial(far, 4), 2000),
    "no_noise": (planted.no_noise, EXTRA, partial(along, EXTRA), 600),
}
# A score that is a coordinate of a Gaussian release: the Gaussian fit may judge it.
GAUSSIAN = {"weights_that_add_up_to_one", "bits_that_are_not_centred"}
# its noise is right, and only not drawn by a mechanism
WEAKENS_NOTHING = {planted.noise_of_its_own.__name__}


# The default tier keeps the first: each fault is also found by the replay of a round there.
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.processes] if place else [])
        for place, name in enumerate(FOUND)
    ],
)
def test_a_planted_fault_is_found_from_outside(name: str) -> None:
    run, extra, score, runs = FOUND[name]
    assert refuted(scores_of(run, score, extra, runs), ONE_GAUSSIAN, gaussian=name in GAUSSIAN)


def test_every_planted_fault_that_weakens_a_round_is_audited() -> None:
    masked = {run.__name__ for run in planted.FAULTS if run.__name__.startswith("masked_")}
    assert {run.__name__ for run in planted.FAULTS} == {*FOUND} | WEAKENS_NOTHING | masked
    # Of masked rounds tests/audit/test_release_audit.py has faults of its own; these are found by
    # the replay alone.
    assert len(masked) == 4


@pytest.mark.parametrize(
    "name", ["no_clip", "noise_for_the_next_clip_norm", "weights_that_add_up_to_one"]
)
def test_a_sound_round_is_not_refuted_by_the_same_scores(name: str) -> None:
    _, extra, score, runs = FOUND[name]
    bits = poisson_round_event(1.0, noise_multiplier=4.0 / BIT_SENSITIVITY)
    scores = scores_of(planted.sound, score, extra, runs)
    assert not refuted(scores, ONE_GAUSSIAN.record(bits), gaussian=name in GAUSSIAN)
