"""Ratings that each client noises itself, for one of its examples: sensitivity, noise, account, policy, the wire."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant

from discreet.client.account import Accounts, Refused
from discreet.client.admission import Admitted, admit, local_settings
from discreet.client.client import Client
from discreet.client.policy import ClientPolicy
from discreet.client.release import OwnNoise
from discreet.client_settings import MEANS, ClientSettings, ConfigError
from discreet.federated.messages import TrainReply, TrainRequest, Work, encode_reply
from discreet.federated.query import Query
from discreet.federated.run_plan import answers_of
from discreet.federated.server_messages import OwnMessages
from discreet.privacy.randomness import RandomSource, seeded_source
from discreet.settings import client_settings
from discreet.tasks.answers import metric_blocks
from discreet.tasks.examples import Examples, TaskShape
from discreet.tasks.targets import NUMBERS, Target
from tests.client.clients import EXAMPLE, config, examples, ledger_at, linear, params_of, rejects_gaussian
from tests.replay import replay

Z = 3.0
RATED = (*EXAMPLE, "evaluation.kind=private", f"evaluation.noise_multiplier={Z}", "evaluation.every=2")
RATE, BOTH = Work(trains=False, query="evaluation"), Work(trains=True, query="evaluation")
ACCURACY = Query(metric_blocks(["accuracy"], TaskShape((5,), 3)), TaskShape((5,), 3))
SHAPES = {
    **dict.fromkeys(("accuracy", "loss", "auc", "calibration"), TaskShape((5,), 2)),
    **dict.fromkeys(("mae", "rmse"), TaskShape((5,), 2, target=Target(NUMBERS, ("a", "b"), (0.0, 0.0), (1.0, 1.0)))),
}


def settings(*words: str) -> ClientSettings:
    return client_settings(config(*RATED, *words))


def ask(work: Work, *words: str, number: int = 1) -> TrainRequest:
    return TrainRequest(number, math.inf, settings(*words), work=work)


def rating_client(held_out: Examples, ledger: Path, source: RandomSource | None = None) -> Client:
    accounts = Accounts(ledger_at(ledger), 1e-3, "pld")
    source = source or seeded_source(5519)
    return Client(linear(), examples(6), accounts, ClientPolicy(), source, "", held_out, TaskShape((5,), 3))


@pytest.mark.parametrize("name", MEANS)
def test_an_answer_is_a_mean_over_examples_that_are_each_within_the_bound(name: str) -> None:
    # So one of m examples that contributes nothing moves it by at most 1 / m of the bound.
    shape, draw = SHAPES[name], torch.Generator().manual_seed(30671)
    (block,) = metric_blocks([name], shape)
    outputs = 4 * torch.randn(9, 2, generator=draw).double()
    outputs[0], outputs[1], outputs[2, 0], outputs[3, 1] = math.nan, 1e30, math.inf, -math.inf
    numbers = shape.target.kind == NUMBERS
    targets = torch.rand(9, 2, generator=draw) * 2 - 1 if numbers else torch.randint(2, (9,), generator=draw)
    each = [block.answer(outputs[row : row + 1], targets[row : row + 1]) for row in range(9)]
    assert torch.allclose(block.answer(outputs, targets), torch.stack(each).mean(dim=0), rtol=1e-12, atol=1e-12)
    assert max(float(one.norm()) for one in each) <= block.bound * (1 + 1e-12)


@pytest.mark.parametrize("draws", [1, 4])
@pytest.mark.parametrize("held_out", [1, 7])
def test_the_noise_is_for_one_of_the_held_out_examples(held_out: int, draws: int) -> None:
    sent = OwnNoise(Z, draws).noised(torch.zeros(4000), held_out, seeded_source(48611))
    stddev = Z / held_out
    assert not rejects_gaussian(sent[:-1], stddev)
    assert rejects_gaussian(sent[:-1], 0.9 * stddev)
    assert rejects_gaussian(sent[:-1], 1.1 * stddev)
    assert float(sent[-1]) == pytest.approx(stddev**2, rel=1e-6)


@pytest.mark.parametrize("work", [RATE, BOTH], ids=["rates", "trains and rates"])
def test_a_held_out_example_moves_the_noised_answer_alone_and_within_the_noise(work: Work, tmp_path: Path) -> None:
    # One example that was right is wrong: replaced, which is twice as far as zero-out.
    number = itertools.count()
    inputs = examples(4, seed=90).inputs
    right = linear()(inputs).argmax(dim=1)
    wrong = torch.cat([(right[:1] + 1) % 3, right[1:]])

    def rate(held_out: Examples, source: RandomSource) -> TrainReply:
        who = rating_client(held_out, tmp_path / f"{next(number)}.db", source)
        return who.answer(ask(work), params_of(linear()))

    found = replay(rate, Examples(inputs, right), Examples(inputs, wrong), sensitivities=2)
    assert found.faults == ()
    assert found.gaussian_distance == pytest.approx(2 / Z, rel=1e-6)


def test_what_is_reported_is_what_steps_and_answer_cost_in_dp_accounting(tmp_path: Path) -> None:
    # 6 examples in batches of 4: 2 steps, each a Gaussian of 1.5 that samples with 4 / 6.
    who, params = rating_client(examples(3), tmp_path / "ledger.db"), params_of(linear())
    both = who.answer(ask(BOTH), params).epsilon_example
    rated = who.answer(ask(RATE, number=2), params).epsilon_example
    step, answer = PoissonSampledDpEvent(4 / 6, GaussianDpEvent(1.5)), GaussianDpEvent(Z)
    oracles = [PLDAccountant().compose(step, 2).compose(answer, count).get_epsilon(1e-3) for count in (1, 2)]
    assert [both, rated] == pytest.approx(oracles, rel=1e-3)


def test_an_answer_that_would_pass_the_budget_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    who, params = rating_client(examples(3), tmp_path / "ledger.db"), params_of(linear())
    once = who.answer(ask(RATE), params).epsilon_example
    with pytest.raises(Refused, match="the example-level budget is spent"):
        who.answer(ask(RATE, f"privacy.example.max_epsilon={once}", number=2), params)
    assert len(ledger_at(tmp_path / "ledger.db").releases()) == 1


def test_a_budget_that_steps_or_answer_alone_would_keep_is_held_against_both(tmp_path: Path) -> None:
    accounts = [Accounts(ledger_at(tmp_path / f"{name}.db"), 1e-3, "pld") for name in ("steps", "answer", "both")]
    works = [Work(), RATE, BOTH]
    for work, account in zip(works[:2], accounts[:2], strict=True):
        assert isinstance(admit(ask(work, "privacy.example.max_epsilon=2.3"), {"": 6}, accounts=account)[""], Admitted)
    found = admit(ask(BOTH, "privacy.example.max_epsilon=2.3"), {"": 6}, accounts=accounts[2])[""]
    assert "this round would reach epsilon" in str(found)


def test_a_client_without_a_ledger_does_not_rate(tmp_path: Path) -> None:
    found = admit(ask(RATE), {"": 6}, accounts=None)[""]
    assert isinstance(found, Refused)


def test_an_owners_least_noise_holds_for_the_answer_too(tmp_path: Path) -> None:
    accounts, policy = Accounts(ledger_at(tmp_path / "a.db"), 1e-3, "pld"), ClientPolicy(min_noise_multiplier=1.2)
    asked = [ask(BOTH), ask(BOTH, "evaluation.noise_multiplier=1.1")]
    enough, less = (admit(each, {"": 6}, accounts=accounts, policy=policy)[""] for each in asked)
    assert isinstance(enough, Admitted)
    assert "requires a noise multiplier of 1.2; the example-level one is 1.1" in str(less)


def test_delta_is_held_below_one_in_all_examples_those_held_out_too() -> None:
    # 900 to train on and a share of 0.2 held out: 1 / delta = 1000 is fewer than the client holds.
    found = admit(ask(RATE), {"": 900}, accounts=None)[""]
    assert "privacy.delta must be below 1 / n" in str(found)


@pytest.mark.parametrize("cohort", ["own", "same"])
def test_a_target_is_met_by_all_planned_rounds_and_ratings_together(cohort: str) -> None:
    words = "privacy.example.noise_multiplier=null", "privacy.example.target_epsilon=3", "rounds=5"
    private = local_settings(settings(*words, f"evaluation.cohort={cohort}"), 40).example
    assert private is not None
    step = PoissonSampledDpEvent(0.1, GaussianDpEvent(private.noise_multiplier))
    spent = PLDAccountant().compose(step, 50).compose(GaussianDpEvent(Z), 3).get_epsilon(1e-3)
    assert 2.97 < spent <= 3.003


def test_a_target_that_the_ratings_alone_pass_is_refused() -> None:
    words = "privacy.example.noise_multiplier=null", "privacy.example.target_epsilon=0.5"
    with pytest.raises(Refused, match=r"target_epsilon=0\.5 can't be reached with the ratings"):
        local_settings(settings(*words), 40)


def test_a_noised_answer_survives_the_wire(tmp_path: Path) -> None:
    run, params = config(*RATED), params_of(linear())
    reply = rating_client(examples(3), tmp_path / "ledger.db").answer(ask(RATE), params)
    messages = OwnMessages(client_settings(run), {"evaluation": answers_of(run, ACCURACY).sent})
    read = messages.of_round(1, params, math.inf, RATE).reply(encode_reply(reply))
    assert read.answer is not None
    assert reply.answer is not None
    assert read.answer.tolist() == reply.answer.tolist()
    assert float(read.answer[1]) == pytest.approx(1.0)  # (3 / 3)^2


def test_a_client_that_holds_nothing_out_sends_zeros() -> None:
    assert OwnNoise(Z).noised(torch.ones(2), 0, seeded_source(1)).tolist() == [0.0, 0.0, 0.0]


REFUSED = {
    "both guarantees": ("privacy.user.enabled=true", "privacy.user.target_epsilon=4"),
    "local": ("privacy.local.kind=gaussian", "privacy.local.noise_multiplier=2"),
    "steps": ("privacy.example.enabled=false", "privacy.local.kind=laplace_step", "privacy.local.noise_multiplier=2"),
    "declared number": ("data.public_num_examples=50",),
    "metrics": ("evaluation.metrics=[accuracy,clients]",),
}
NAMES = {
    "both guarantees": "privacy.user.enabled must be false with evaluation.kind=private and privacy.example.enabled",
    "local": "privacy.example.enabled must be false with evaluation.kind=private and privacy.local",
    "steps": "privacy.local.kind must be none, gaussian or laplace with evaluation.kind=private",
    "declared number": "data.public_num_examples must be left out with evaluation.kind=private",
    "metrics": "evaluation.metrics must be of accuracy, loss, auc, calibration, mae, rmse",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_not_be_honoured_is_refused_in_one_line(name: str) -> None:
    with pytest.raises(ConfigError, match=NAMES[name]):
        settings(*REFUSED[name])
