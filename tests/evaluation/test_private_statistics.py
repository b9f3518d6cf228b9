"""Statistics of clients' data as a query: what one client moves, what it costs, who may be asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from torch import Tensor

from discreet.data.datasets import load_task
from discreet.evaluation.private_evaluation import statistics_noise
from discreet.evaluation.private_statistics import ask, with_range
from discreet.ledger.durable_ledger import DurableLedger
from discreet.mechanisms.sums import AnswerSum, answer_round
from discreet.privacy.clipping import ClippedSum
from discreet.privacy.randomness import RandomSource, seeded_source
from discreet.protocol.messages import TrainReply
from discreet.queries.answers import Block
from discreet.queries.query import Query, shape_of_data
from discreet.queries.statistic_answers import statistic_blocks
from discreet.server.plan import planned, resolve_noise
from discreet.server.run_context import RunContext
from discreet.server.session import resolve
from discreet.settings.compose import load_config
from discreet.settings.data import STATISTICS
from discreet.settings.settings import Settings
from tests.replay import replay

NOISY = ["data.name=breast_cancer", "data.num_clients=40", "privacy.delta=1e-3", "model.name=linear"]
Client = tuple[Tensor, Tensor]


def config_of(*words: str) -> Settings:
    return load_config([*NOISY, "data.normalise=private", "privacy.user.noise_multiplier=1", *words])


def query(config: Settings, *names: str) -> Query:
    ranged = with_range(config.statistics, config.data.name, None)
    shape = shape_of_data(ranged, load_task(config.data.name).shape)
    return Query(statistic_blocks(names or ["moments"], shape))


def mechanism(config: Settings, asked: Query) -> Callable[[Sequence[Client], RandomSource], object]:
    how = statistics_noise(planned(config), asked.length)

    def run(clients: Sequence[Client], source: RandomSource) -> object:
        charged: list[object] = []
        # What a client sends is beyond the server's control: it is clipped there once more.
        parts = [TrainReply(1, torch.zeros(0), False, answer=asked.answer(*client).float()) for client in clients]
        sums = answer_round(parts, AnswerSum(how), event=config.statistics.event, source=source, charge=charged.append)
        return sums, charged

    return run


def clients_with(*more: Client) -> list[Client]:
    source = torch.Generator().manual_seed(20771)
    honest = [
        (torch.rand(9, 30, generator=source) * 2 - 1, torch.randint(0, 2, (9,), generator=source)) for _ in range(5)
    ]
    return [*honest, *more]


NAN, INF = torch.full((3, 30), torch.nan), torch.full((3, 30), torch.inf)
WORST = {
    "corner": torch.ones(4, 30),
    "other corner": -torch.ones(4, 30),
    "one example": torch.ones(1, 30),
    "many examples": torch.ones(5000, 30),
    "NaN": NAN,
    "infinity": INF,
    "huge": torch.full((3, 30), 1e38),
}


@pytest.mark.parametrize("noise", ["grid", "float"])
@pytest.mark.parametrize("inputs", WORST)
def test_one_client_more_moves_the_sum_by_at_most_what_the_noise_is_for(inputs: str, noise: str) -> None:
    config, values = config_of(f"privacy.noise={noise}"), WORST[inputs]
    for names in (["moments"], STATISTICS):
        with_one = clients_with((values, torch.ones(len(values), dtype=torch.int64)))
        found = replay(mechanism(config, query(config, *names)), with_one, clients_with())
        assert found.faults == ()


def test_some_client_reaches_the_bound() -> None:
    config = config_of("privacy.noise=float")
    corner = clients_with((WORST["corner"], torch.ones(4, dtype=torch.int64)))
    found = replay(mechanism(config, query(config)), corner, clients_with())
    assert max(found.shares) == pytest.approx(1, abs=1e-5)


def test_without_the_servers_clip_an_answer_that_is_too_long_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ClippedSum, "add", lambda self, rows: self.total.add_(rows.double().sum(0)))
    config = config_of("privacy.noise=float")
    block = Block("moments", 60, 1.0, 1.0, lambda *_: torch.ones(60, dtype=torch.float64), read=lambda _: {})
    monkeypatch.setattr("discreet.queries.query.within", lambda answer, bound: answer)
    liar = replace(query(config), blocks=(block,))
    corner = clients_with((WORST["corner"], torch.ones(4, dtype=torch.int64)))
    assert replay(mechanism(config, liar), corner, clients_with()).faults


def test_what_is_asked_again_is_noised_anew(tmp_path: Path) -> None:
    config = config_of("seed=51817")
    ledger, source = DurableLedger.create(tmp_path / "ledger.db"), seeded_source(51817)
    run = cast(RunContext, SimpleNamespace(plan=planned(config), ledger=ledger, source=source))
    first, second = (ask(run, query(config), [], name="statistics") for _ in range(2))
    assert first.values != second.values


def test_a_target_pays_for_it_too() -> None:
    asked = load_config(
        [*NOISY, "data.normalise=private", "privacy.user.target_epsilon=4", "statistics.noise_multiplier=2"]
    )
    resolved, without = resolve_noise(asked), resolve_noise(replace(asked, data=replace(asked.data, normalise="none")))
    z = resolved.privacy.user.noise_multiplier
    assert z > (without.privacy.user.noise_multiplier or 0) * 1.01
    spent = PLDAccountant()
    spent.compose(GaussianDpEvent(2.0)).compose(PoissonSampledDpEvent(0.3, GaussianDpEvent(z)), asked.rounds)
    assert spent.get_epsilon(1e-3) == pytest.approx(4, rel=2e-3)


def test_public_normalising_maps_the_public_range_to_minus_one_to_one() -> None:
    words = [
        "data.name=digits",
        "data.num_clients=20",
        "privacy.user.noise_multiplier=1",
        "privacy.user.too_noisy=warn",
    ]
    plan, task = resolve(load_config([*words, "data.normalise=public"]))
    assert (plan.run.normaliser.means, plan.run.normaliser.deviations) == ([0.5], [0.5])
    assert torch.equal(task.test.inputs, load_task("digits").test.inputs * 2 - 1)
