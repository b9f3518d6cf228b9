"""Ratings with local privacy: each client noises its own answer for all of its data, and charges its own ledger."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from scipy import stats

from discreet.client.account import Accounts, Refused
from discreet.client.admission import Admitted, admit
from discreet.client.client import Client
from discreet.client.policy import ClientPolicy
from discreet.client.release import LocalNoise, own_noise, round_privacy
from discreet.client_settings import METRICS, ClientSettings
from discreet.federated.messages import TrainReply, TrainRequest, Work
from discreet.federated.query import Query
from discreet.federated.run_plan import answers_of
from discreet.privacy.mechanisms import analytic_gaussian_noise_multiplier
from discreet.privacy.randomness import RandomSource, seeded_source
from discreet.settings import client_settings
from discreet.tasks.answers import METRICS as OF_KIND
from discreet.tasks.answers import joined_answer, l1_norm_of, metric_blocks
from discreet.tasks.examples import Examples, TaskShape
from discreet.tasks.targets import CLASSES, LABELS, NUMBERS, Target
from tests.client.clients import OFF, config, examples, ledger_at, linear, params_of
from tests.replay import replay

Z = 3.0
RATED = (*OFF, "evaluation.kind=private", f"evaluation.noise_multiplier={Z}", "evaluation.every=2")
NOISE = {kind: (f"privacy.local.kind={kind}", "privacy.local.noise_multiplier=2") for kind in ("gaussian", "laplace")}
RATE, BOTH = Work(trains=False, query="evaluation"), Work(trains=True, query="evaluation")
THREE = TaskShape((5,), 3)
SHAPES = {
    CLASSES: THREE,
    LABELS: TaskShape((5,), 0, target=Target(LABELS, ("a", "b", "c"))),
    NUMBERS: TaskShape((5,), 0, target=Target(NUMBERS, ("a", "b"), (0.0, 0.0), (1.0, 1.0))),
}
EACH = [(kind, name) for kind in SHAPES for name in OF_KIND[kind]]
KINDS = pytest.mark.parametrize("kind", ["gaussian", "laplace"])


def settings(kind: str, *words: str) -> ClientSettings:
    total = any(word.startswith("privacy.local.epsilon=") for word in words)
    return client_settings(config(*RATED, *(NOISE[kind][:1] if total else NOISE[kind]), *words))


def ask(kind: str, work: Work, *words: str, number: int = 1) -> TrainRequest:
    return TrainRequest(number, math.inf, settings(kind, *words), work=work)


def query(*names: str, shape: TaskShape = THREE) -> Query:
    return Query(metric_blocks(names, shape), shape)


def noise_of(kind: str, asked: Query, *words: str) -> LocalNoise:
    noise = own_noise(settings(kind, *words), asked)
    assert isinstance(noise, LocalNoise)
    return noise


def rating_client(held_out: Examples, ledger: Path, source: RandomSource | None = None) -> Client:
    accounts = Accounts(ledger_at(ledger), 1e-3, "pld")
    source = source or seeded_source(5519)
    return Client(linear(), examples(6), accounts, ClientPolicy(), source, "", held_out, THREE)


@pytest.mark.parametrize(("kind", "name"), EACH)
def test_no_answer_passes_the_l1_norm_that_laplace_noise_is_drawn_for(kind: str, name: str) -> None:
    shape, draw = SHAPES[kind], torch.Generator().manual_seed(20161)
    blocks = metric_blocks([name], shape)
    for scale in (0.0, 0.5, 30.0):
        outputs = torch.randn(7, shape.num_outputs, generator=draw).double() * scale
        outputs[0] = math.nan
        if kind == CLASSES:
            targets = torch.randint(3, (7,), generator=draw)
        else:
            targets = torch.randint(0 if kind == LABELS else -1, 2, (7, shape.num_outputs), generator=draw).float()
        assert float(joined_answer(blocks, outputs, targets).abs().sum()) <= l1_norm_of(blocks) + 1e-12


def test_the_l1_norm_of_shares_is_their_sum_and_of_one_number_its_bound() -> None:
    assert [l1_norm_of(metric_blocks([name], THREE)) for name in ("accuracy", "loss", "clients", "calibration")] == [
        1
    ] * 4
    two = metric_blocks(["accuracy", "loss"], THREE)
    assert l1_norm_of(two) == pytest.approx(math.sqrt(2))
    assert set(METRICS) == {name for _, name in EACH}


@KINDS
@pytest.mark.parametrize("noise", ["float", "grid", "secure_sum"])
def test_the_noise_is_for_twice_the_norm_of_an_answer(kind: str, noise: str) -> None:
    drawn = noise_of(kind, query("accuracy"), f"privacy.noise={noise}").noised(
        torch.zeros(5000), 4, seeded_source(48611)
    )
    variance = (2 * Z) ** 2 * (1 if kind == "gaussian" else 2)
    assert float(drawn[-1]) == pytest.approx(variance)
    law = stats.norm(scale=2 * Z) if kind == "gaussian" else stats.laplace(scale=2 * Z)
    wrong = stats.norm(scale=1.6 * Z) if kind == "gaussian" else stats.laplace(scale=1.6 * Z)
    chances = [stats.kstest(drawn[:-1].double().numpy(), each.cdf).pvalue for each in (law, wrong)]
    assert chances[0] > 1e-3  # the seed is fixed
    assert chances[1] < 1e-6


@KINDS
def test_a_client_that_holds_nothing_out_sends_noise_as_the_others_do(kind: str) -> None:
    noise = noise_of(kind, query("accuracy"))
    nothing, some = (noise.noised(torch.zeros(300), count, seeded_source(7757)) for count in (0, 9))
    assert nothing.tolist() == some.tolist()
    assert nothing[:-1].std() > Z


@KINDS
@pytest.mark.parametrize("work", [RATE, BOTH], ids=["rates", "trains and rates"])
def test_other_data_move_the_noised_answer_alone_and_within_the_noise(kind: str, work: Work, tmp_path: Path) -> None:
    number = itertools.count()
    inputs = examples(4, seed=90).inputs
    right = linear()(inputs).argmax(dim=1)

    def rate(held_out: Examples, source: RandomSource) -> TrainReply:
        who = rating_client(held_out, tmp_path / f"{next(number)}.db", source)
        return who.answer(ask(kind, work), params_of(linear()))

    other = Examples(examples(7, seed=91).inputs, (linear()(examples(7, seed=91).inputs).argmax(dim=1) + 1) % 3)
    found = replay(rate, Examples(inputs, right), other)
    assert found.faults == ()
    assert max(found.shares) == pytest.approx(1, rel=2e-3)  # all right and all wrong put the bound to the test


@KINDS
def test_what_is_reported_is_what_updates_and_answers_cost(kind: str, tmp_path: Path) -> None:
    who, params = rating_client(examples(3), tmp_path / "ledger.db"), params_of(linear())
    both, rated = who.answer(ask(kind, BOTH), params), who.answer(ask(kind, RATE, number=2), params)
    if kind == "laplace":
        pure = [both.epsilon_local_pure, rated.epsilon_local_pure]
        assert pure == pytest.approx([1 / 2 + 1 / Z, 1 / 2 + 2 / Z])
    else:
        update, answer = GaussianDpEvent(2.0), GaussianDpEvent(Z)
        oracles = [PLDAccountant().compose(update).compose(answer, count).get_epsilon(1e-3) for count in (1, 2)]
        assert [both.epsilon_local, rated.epsilon_local] == pytest.approx(oracles, rel=1e-3)


@KINDS
def test_an_answer_that_would_pass_the_budget_is_refused_and_leaves_no_trace(kind: str, tmp_path: Path) -> None:
    who, params = rating_client(examples(3), tmp_path / "ledger.db"), params_of(linear())
    once = who.answer(ask(kind, RATE), params).epsilon_local
    with pytest.raises(Refused, match="the local-level budget is spent"):
        who.answer(ask(kind, RATE, f"privacy.local.max_epsilon={once}", number=2), params)
    assert len(ledger_at(tmp_path / "ledger.db").releases()) == 1


@KINDS
@pytest.mark.parametrize("cohort", ["own", "same"])
def test_the_total_holds_for_all_planned_rounds_and_ratings(kind: str, cohort: str) -> None:
    words = (f"evaluation.cohort={cohort}", "privacy.local.schedule=geometric")
    run = settings(kind, "privacy.local.epsilon=4", *words)
    rounds = [round_privacy(run, round_number=number) for number in range(1, 5)]
    noises = [one.noise_multiplier for one in rounds if one is not None] + [Z, Z]  # two ratings of four rounds
    if kind == "laplace":
        assert math.fsum(1 / noise for noise in noises) == pytest.approx(4, rel=1e-9)
    else:
        together = math.fsum(noise**-2 for noise in noises) ** -0.5
        assert together == pytest.approx(analytic_gaussian_noise_multiplier(4.0, delta=1e-3), rel=1e-9)


@KINDS
def test_a_total_that_the_ratings_alone_pass_is_refused(kind: str, tmp_path: Path) -> None:
    asked = ask(kind, Work(), "privacy.local.epsilon=0.5")
    found = admit(asked, {"": 6}, accounts=Accounts(ledger_at(tmp_path / "a.db"), 1e-3, "pld"))[""]
    assert "privacy.local.epsilon=0.5 can't be reached with the ratings" in str(found)


@KINDS
def test_an_owners_least_noise_holds_for_the_answer_too(kind: str, tmp_path: Path) -> None:
    accounts, policy = Accounts(ledger_at(tmp_path / "a.db"), 1e-3, "pld"), ClientPolicy(min_noise_multiplier=1.2)
    for work in (RATE, BOTH):
        asked = [ask(kind, work), ask(kind, work, "evaluation.noise_multiplier=1.1")]
        enough, less = (admit(each, {"": 6}, accounts=accounts, policy=policy)[""] for each in asked)
        assert isinstance(enough, Admitted)
        assert "requires a noise multiplier of 1.2; the local-level one is 1.1" in str(less)


@KINDS
@pytest.mark.parametrize("names", [["accuracy"], ["accuracy", "auc"]], ids=["one", "two"])
def test_the_server_expects_the_noise_that_clients_draw(kind: str, names: list[str]) -> None:
    asked, cohort = query(*names), config(*RATED, *NOISE[kind], "data.num_clients=16", "sampling.kind=everyone")
    noise = own_noise(client_settings(cohort), asked)
    assert isinstance(noise, LocalNoise)
    sent = noise.noised(torch.zeros(4), 1, seeded_source(3))
    assert answers_of(cohort, asked).stddev ** 2 == pytest.approx(16 * float(sent[-1]), rel=1e-6)
