"""Ratings that each client noises itself, for one of its examples or for all of its data:
sensitivity, noise, account and policy."""

from __future__ import annotations

import copy
import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from scipy import stats
from torch import Tensor, nn

from discreet.data.examples import Examples, TaskShape
from discreet.data.targets import CLASSES, LABELS, NUMBERS, Target
from discreet.mechanisms.client_noise import OwnNoise
from discreet.mechanisms.local_dp_sgd import local_settings
from discreet.mechanisms.local_noise import round_privacy
from discreet.mechanisms.mechanism import Unreachable
from discreet.mechanisms.mechanism_table import own_noise
from discreet.node.account import Accounts, Refused
from discreet.node.admission import Admitted, admit
from discreet.node.client import Client
from discreet.node.policy import ClientPolicy
from discreet.node.work import work_of
from discreet.planning.plan import Plan
from discreet.privacy.mechanisms import analytic_gaussian_noise_multiplier
from discreet.privacy.randomness import RandomSource, seeded_source
from discreet.protocol.messages import Assignment, TrainReply, TrainRequest
from discreet.queries.metrics import metric_blocks, metrics_of
from discreet.queries.query import Query
from discreet.server.model_ratings import answers_of
from discreet.settings.client_settings import ClientSettings
from discreet.settings.data import MEANS
from discreet.settings.settings import client_settings
from tests.node.clients import (
    EXAMPLE,
    OFF,
    client,
    config,
    examples,
    ledger_at,
    linear,
    params_of,
    rejects_gaussian,
)
from tests.replay import replay

Z = 3.0
RATED = ("evaluation.kind=private", f"evaluation.noise_multiplier={Z}", "evaluation.every=2")
LEVELS = {
    "example": EXAMPLE,
    "gaussian": (*OFF, "privacy.local.kind=gaussian", "privacy.local.noise_multiplier=2"),
    "laplace": (*OFF, "privacy.local.kind=laplace", "privacy.local.noise_multiplier=2"),
}
RATE, BOTH = (
    Assignment(trains=False, query="evaluation"),
    Assignment(trains=True, query="evaluation"),
)
THREE = TaskShape((5,), 3)
NUMBER = TaskShape((5,), 2, target=Target(NUMBERS, ("a", "b"), (0.0, 0.0), (1.0, 1.0)))
SHAPES = {
    CLASSES: THREE,
    LABELS: TaskShape((5,), 0, target=Target(LABELS, ("a", "b", "c"))),
    NUMBERS: NUMBER,
}
EACH = [(kind, name) for kind in SHAPES for name in metrics_of(kind)]

levels = pytest.mark.parametrize("level", LEVELS)
kinds = pytest.mark.parametrize("kind", ["gaussian", "laplace"])
works = pytest.mark.parametrize("work", [RATE, BOTH], ids=["rates", "trains and rates"])


def settings(level: str, *words: str) -> ClientSettings:
    if any(word.startswith("privacy.local.epsilon=") for word in words):
        words = ("privacy.local.noise_multiplier=null", *words)
    return client_settings(config(*LEVELS[level], *RATED, *words))


def ask(level: str, work: Assignment, *words: str, number: int = 1) -> TrainRequest:
    return TrainRequest(number, math.inf, settings(level, *words), work=work)


def query(*names: str, shape: TaskShape = THREE) -> Query:
    return Query(metric_blocks(names, shape))


def local_noise(kind: str, asked: Query, *words: str) -> OwnNoise:
    return own_noise(settings(kind, *words), asked.l1_norm)


def accounts(path: Path) -> Accounts:
    return Accounts(ledger_at(path), 1e-3, "pld")


def rating_client(held_out: Examples, ledger: Path, source: RandomSource | None = None) -> Client:
    return replace(client(examples(6), ledger, source=source), held_out=held_out, shape=THREE)


def mixing(outputs: Tensor, targets: Tensor) -> Tensor:
    """A metric of one's own that is not bounded, and that would read all examples."""
    return outputs.sum() * len(outputs) + targets.sum()


@pytest.mark.parametrize("name", [*MEANS, f"{__name__}:mixing"])
def test_an_answer_is_a_mean_over_examples_that_are_each_within_the_bound(name: str) -> None:
    # So one of m examples that contributes nothing moves it by at most 1 / m of the bound.
    numbers, draw = name in ("mae", "rmse"), torch.Generator().manual_seed(30671)
    (block,) = metric_blocks([name], NUMBER if numbers else TaskShape((5,), 2))
    outputs = 4 * torch.randn(9, 2, generator=draw).double()
    outputs[0], outputs[1], outputs[2, 0], outputs[3, 1] = math.nan, 1e30, math.inf, -math.inf
    targets = (
        torch.rand(9, 2, generator=draw) * 2 - 1
        if numbers
        else torch.randint(2, (9,), generator=draw)
    )
    each = [block.answer(outputs[row : row + 1], targets[row : row + 1]) for row in range(9)]
    assert torch.allclose(
        block.answer(outputs, targets), torch.stack(each).mean(dim=0), rtol=1e-12, atol=1e-12
    )
    assert max(float(one.norm()) for one in each) <= block.bound * (1 + 1e-12)


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_no_answer_passes_the_l1_norm_that_laplace_noise_is_drawn_for(kind: str, name: str) -> None:
    shape, draw = SHAPES[kind], torch.Generator().manual_seed(20161)
    asked = query(name, shape=shape)
    for scale in (0.0, 0.5, 30.0):
        outputs = torch.randn(7, shape.num_outputs, generator=draw).double() * scale
        outputs[0] = math.nan
        if kind == CLASSES:
            targets = torch.randint(3, (7,), generator=draw)
        else:
            targets = torch.randint(
                0 if kind == LABELS else -1, 2, (7, shape.num_outputs), generator=draw
            ).float()
        assert float(asked.answer(outputs, targets).abs().sum()) <= asked.l1_norm + 1e-12


@pytest.mark.parametrize(("held_out", "noise"), [(1, "float"), (7, "secure_sum")])
def test_the_noise_is_for_one_of_the_held_out_examples(held_out: int, noise: str) -> None:
    sent = local_noise("example", query("accuracy"), f"privacy.noise={noise}").noised(
        torch.zeros(4000), held_out, seeded_source(48611)
    )
    stddev = Z / held_out
    assert [rejects_gaussian(sent[:-1], by * stddev) for by in (0.9, 1, 1.1)] == [True, False, True]
    assert float(sent[-1]) == pytest.approx(stddev**2, rel=1e-6)


@kinds
@pytest.mark.parametrize("noise", ["float", "grid", "secure_sum"])
def test_the_noise_is_for_twice_the_norm_of_an_answer(kind: str, noise: str) -> None:
    how = local_noise(kind, query("accuracy"), f"privacy.noise={noise}")
    drawn = how.noised(torch.zeros(5000), 4, seeded_source(48611))
    assert float(drawn[-1]) == pytest.approx((2 * Z) ** 2 * (1 if kind == "gaussian" else 2))
    law = stats.norm if kind == "gaussian" else stats.laplace
    right, wrong = (
        stats.kstest(drawn[:-1].double().numpy(), law(scale=by * Z).cdf).pvalue for by in (2, 1.6)
    )
    assert right > 1e-3  # the seed is fixed
    assert wrong < 1e-6


@kinds
def test_only_at_local_level_does_a_client_that_holds_nothing_out_send_noise(
    kind: str,
) -> None:
    noise = local_noise(kind, query("accuracy"))
    nothing, some = (noise.noised(torch.zeros(300), count, seeded_source(7757)) for count in (0, 9))
    assert nothing.tolist() == some.tolist()
    assert nothing[:-1].std() > Z
    of_example = local_noise("example", query("accuracy"))
    assert of_example.noised(torch.ones(2), 0, seeded_source(1)).tolist() == [0.0, 0.0, 0.0]


@levels
@works
def test_other_data_move_the_noised_answer_alone_and_within_the_noise(
    level: str, work: Assignment, tmp_path: Path
) -> None:
    number, inputs = itertools.count(), examples(4, seed=90).inputs
    right = linear()(inputs).argmax(dim=1)

    def rate(held_out: Examples, source: RandomSource) -> TrainReply:
        who = rating_client(held_out, tmp_path / f"{next(number)}.db", source)
        return who.answer(work_of(ask(level, work)), params_of(linear()))

    if (
        level == "example"
    ):  # one that was right is wrong: replaced, which is twice as far as zero-out
        other = Examples(inputs, torch.cat([(right[:1] + 1) % 3, right[1:]]))
        found = replay(rate, Examples(inputs, right), other, sensitivities=2)
        assert found.gaussian_distance == pytest.approx(2 / Z, rel=1e-6)
    else:  # all right and all wrong put the bound to the test
        inputs = examples(7, seed=91).inputs
        other = Examples(inputs, (linear()(inputs).argmax(dim=1) + 1) % 3)
        found = replay(rate, Examples(examples(4, seed=90).inputs, right), other)
        assert max(found.shares) == pytest.approx(1, rel=2e-3)
    assert found.faults == ()


class Centred(nn.Linear):
    """A forward that mixes examples."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs - inputs.mean(0))


class Branching(nn.Linear):
    """One large example turns the outputs of all."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        return -outputs if bool((inputs > 40).any()) else outputs


class BranchingByNumpy(nn.Linear):
    """The same, which no watch can follow."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        return -outputs if (inputs.numpy(force=True) > 40).any() else outputs


class Keeping(nn.Linear):
    """A large example that is rated turns the outputs of all that come later."""

    seen = False

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        if not self.training:
            self.seen = self.seen or bool((inputs > 40).any())
        return -outputs if self.seen else outputs


@works
@pytest.mark.parametrize("kind", [Centred, Branching, BranchingByNumpy, Keeping])
def test_a_held_out_example_moves_the_answer_of_no_other_whatever_the_model_does(
    kind: type[nn.Linear], work: Assignment, tmp_path: Path
) -> None:
    model = kind(5, 3)
    model.load_state_dict(linear().state_dict())
    number, inputs = itertools.count(), examples(8, seed=90).inputs
    right = linear()(inputs).argmax(dim=1)
    other = torch.cat([torch.tensor([[1e3, 50.0, -1e3, 3.0, 9.0]]), inputs[1:]])

    def rate(held_out: Examples, source: RandomSource) -> TrainReply:
        who = rating_client(held_out, tmp_path / f"{next(number)}.db", source)
        who = replace(who, model=copy.deepcopy(model))
        return who.answer(work_of(ask("example", work)), params_of(linear()))

    # one example that is replaced, which is twice as far as zero-out
    found = replay(rate, Examples(inputs, right), Examples(other, right), sensitivities=2)
    assert found.faults == ()
    assert found.shares[0] <= 1 + 1e-6
    assert not any(found.shares[1:])  # nothing of it is in the steps that follow


@levels
def test_what_is_reported_is_what_updates_and_answers_cost_and_a_budget_holds_both(
    level: str, tmp_path: Path
) -> None:
    who, params = rating_client(examples(3), tmp_path / "ledger.db"), params_of(linear())
    both, rated = (
        who.answer(work_of(ask(level, BOTH)), params),
        who.answer(work_of(ask(level, RATE, number=2)), params),
    )
    name = "example" if level == "example" else "local"
    if level == "laplace":
        assert [both.epsilon_local_pure, rated.epsilon_local_pure] == pytest.approx(
            [1 / 2 + 1 / Z, 1 / 2 + 2 / Z]
        )
    else:  # 6 examples in batches of 4: 2 steps, each a Gaussian of 1.5 that samples with 4 / 6
        steps = (PoissonSampledDpEvent(4 / 6, GaussianDpEvent(1.5)), 2)
        trained = steps if level == "example" else (GaussianDpEvent(2.0), 1)
        each = [
            PLDAccountant().compose(*trained).compose(GaussianDpEvent(Z), n).get_epsilon(1e-3)
            for n in (1, 2)
        ]
        assert [getattr(reply, f"epsilon_{name}") for reply in (both, rated)] == pytest.approx(
            each, rel=1e-3
        )
    budget = f"privacy.{name}.max_epsilon={getattr(rated, f'epsilon_{name}')}"
    with pytest.raises(Refused, match=f"the {name}-level budget is spent"):
        who.answer(work_of(ask(level, RATE, budget, number=3)), params)
    assert {row.round for row in ledger_at(tmp_path / "ledger.db").releases()} == {1, 2}


def test_a_budget_that_steps_or_answer_alone_would_keep_is_held_against_both(
    tmp_path: Path,
) -> None:
    words = "privacy.example.max_epsilon=2.3"
    steps, answer, both = (
        admit(
            work_of(ask("example", work, words)),
            {"": 6},
            accounts=accounts(tmp_path / f"{work}.db"),
        )[""]
        for work in (Assignment(), RATE, BOTH)
    )
    assert isinstance(steps, Admitted)
    assert isinstance(answer, Admitted)
    assert "this round would reach epsilon" in str(both)


@levels
@works
def test_an_owners_least_noise_holds_for_the_answer_too(
    level: str, work: Assignment, tmp_path: Path
) -> None:
    mine, policy = accounts(tmp_path / "a.db"), ClientPolicy(min_noise_multiplier=1.2)
    asked = [ask(level, work), ask(level, work, "evaluation.noise_multiplier=1.1")]
    enough, less = (
        admit(work_of(each), {"": 6}, accounts=mine, policy=policy)[""] for each in asked
    )
    assert isinstance(enough, Admitted)
    name = "example" if level == "example" else "local"
    assert f"requires a noise multiplier of 1.2; the {name}-level one is 1.1" in str(less)


def test_delta_is_held_below_one_in_all_examples_those_held_out_too() -> None:
    # 900 to train on and a share of 0.2 held out: 1 / delta = 1000 is fewer than the client holds.
    assert "privacy.delta must be below 1 / n" in str(
        admit(work_of(ask("example", RATE)), {"": 900}, accounts=None)[""]
    )


cohorts = pytest.mark.parametrize("cohort", ["own", "same"])
EXAMPLE_TARGET = ("privacy.example.noise_multiplier=null", "rounds=5")


@cohorts
def test_a_target_is_met_by_all_planned_rounds_and_ratings_together(cohort: str) -> None:
    words = *EXAMPLE_TARGET, "privacy.example.target_epsilon=3", f"evaluation.cohort={cohort}"
    private = local_settings(settings("example", *words), 40).example
    step = PoissonSampledDpEvent(0.1, GaussianDpEvent(private.noise_multiplier))
    spent = PLDAccountant().compose(step, 50).compose(GaussianDpEvent(Z), 3).get_epsilon(1e-3)
    assert 2.97 < spent <= 3.003


@kinds
@cohorts
def test_the_total_holds_for_all_planned_rounds_and_ratings(kind: str, cohort: str) -> None:
    words = (f"evaluation.cohort={cohort}", "privacy.local.schedule=geometric")
    run = settings(kind, "privacy.local.epsilon=4", *words)
    rounds = [round_privacy(run, round_number=number) for number in range(1, 5)]
    # two ratings of four rounds
    noises = [one.noise_multiplier for one in rounds if one is not None] + [
        Z,
        Z,
    ]
    if kind == "laplace":
        assert math.fsum(1 / noise for noise in noises) == pytest.approx(4, rel=1e-9)
    else:
        together = math.fsum(noise**-2 for noise in noises) ** -0.5
        assert together == pytest.approx(
            analytic_gaussian_noise_multiplier(4.0, delta=1e-3), rel=1e-9
        )


def test_a_target_or_a_total_that_the_ratings_alone_pass_is_refused() -> None:
    with pytest.raises(Unreachable, match=r"target_epsilon=0\.5 can't be reached"):
        local_settings(
            settings("example", *EXAMPLE_TARGET, "privacy.example.target_epsilon=0.5"), 40
        )
    for kind in ("gaussian", "laplace"):
        with pytest.raises(Unreachable, match=r"privacy\.local\.epsilon=0\.5 can't be reached"):
            round_privacy(settings(kind, "privacy.local.epsilon=0.5"), round_number=1)


@kinds
@pytest.mark.parametrize("names", [["accuracy"], ["accuracy", "auc"]], ids=["one", "two"])
def test_the_server_expects_the_noise_that_clients_draw(kind: str, names: list[str]) -> None:
    asked, cohort = (
        query(*names),
        config(*LEVELS[kind], *RATED, "data.num_clients=16", "sampling.kind=everyone"),
    )
    noise = own_noise(client_settings(cohort), asked.l1_norm)
    sent = noise.noised(torch.zeros(4), 1, seeded_source(3))
    assert answers_of(Plan(cohort), asked).stddev ** 2 == pytest.approx(
        16 * float(sent[-1]), rel=1e-6
    )
