"""Runs whose clients noise their ratings themselves, at example level or for local privacy."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant

from discreet.accounting.accounting import pure_epsilon
from discreet.data.examples import TaskShape
from discreet.evaluation.answer_sum import AnswerNoise
from discreet.evaluation.private_evaluation import EvaluationPlan
from discreet.ledger.durable_ledger import DurableLedger
from discreet.mechanisms.local_dp_sgd import OwnNoise
from discreet.privacy.randomness import seeded_source
from discreet.protocol.messages import TrainReply
from discreet.queries.metric_answers import metric_blocks
from discreet.queries.query import Query
from discreet.server.run_folder import RunFolder
from discreet.settings.compose import load_config
from discreet.settings.privacy import EXAMPLE, LOCAL
from discreet.simulation.in_process import simulate

CLASSES = TaskShape((1,), 2)
ACCURACY = Query(metric_blocks(["accuracy"], CLASSES))
WORDS = (
    *("evaluation.kind=private", "evaluation.every=2", "evaluation.noise_multiplier=2", "rounds=3", "seed=55147"),
    *("data.num_clients=8", "training.epochs=1", "training.batch_size=50", "model.name=linear"),
    *("sampling.kind=everyone", "privacy.user.enabled=false"),
    *("privacy.example.enabled=true", "privacy.example.noise_multiplier=2"),
)


LOCALLY = (
    *("data.num_clients=40", "training.batch_size=32", "privacy.example.enabled=false", "privacy.local.clip_norm=0.1"),
    *("privacy.example.noise_multiplier=null",),
)


def run(folder: Path, *words: str) -> RunFolder:
    simulate(load_config([*WORDS, *words, f"output_dir={folder}"]))
    return RunFolder(folder)


def test_what_is_published_is_what_the_ledger_holds_with_the_last_rating(tmp_path: Path) -> None:
    folder = run(tmp_path / "run")
    ledger = DurableLedger(folder.clients_ledger_path)
    spent = max(ledger.spent(EXAMPLE, data_owner=str(client)).epsilon(1e-3) for client in range(8))
    stated = json.loads((folder.path / "privacy.json").read_text())["guarantees"][1]["epsilon"]["pld"]
    row, checkpoint = folder.read_metrics()[-1], folder.load_checkpoint()
    assert checkpoint is not None
    assert [stated, row["epsilon_example"], checkpoint.epsilon_example] == pytest.approx([spent] * 3, rel=1e-9)
    rows = [row for row in ledger.releases() if row.data_owner == "0"]
    q = 50 / 144  # of 1437 training examples client 0 has 180, and holds 36 of them out
    oracle = PLDAccountant().compose(PoissonSampledDpEvent(q, GaussianDpEvent(2.0)), 9).compose(GaussianDpEvent(2.0), 2)
    assert [row.count for row in rows] == [3, 3, 1, 3, 1]
    assert ledger.spent(EXAMPLE, data_owner="0").epsilon(1e-3) == pytest.approx(oracle.get_epsilon(1e-3), rel=1e-3)


def test_a_crash_before_a_rating_is_written_does_not_forget_what_it_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(EvaluationPlan, "write", crash)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    spent = DurableLedger(folder.clients_ledger_path)
    most = max(spent.spent(EXAMPLE, data_owner=str(client)).epsilon(1e-3) for client in range(8))
    assert folder.load_checkpoint().epsilon_example == pytest.approx(most, rel=1e-9)
    assert run(tmp_path / "run", "resume=true").read_metrics()[-1]["accuracy"] is not None


def test_ratings_are_within_two_standard_errors_in_19_of_20_draws() -> None:
    draw = torch.Generator().manual_seed(10357)
    shares, sizes = torch.rand(40, generator=draw).double(), torch.randint(5, 60, (40,), generator=draw).tolist()
    exact, within = float(shares.mean()), 0
    for seed in range(200):
        total, source = AnswerNoise(1, 40.0, 4.0, own=OwnNoise(4.0)).empty(), seeded_source(seed)
        for row, size in enumerate(sizes):
            sent = OwnNoise(4.0).noised(2 * (shares[row : row + 1] - 0.5), size, source.child(row))
            total.take(TrainReply(1, torch.zeros(1), below=True, answer=sent))
        found = ACCURACY.read(total.released(source))["accuracy"]
        within += abs(found.value - exact) <= 2 * found.standard_error
    assert 183 <= within < 200  # 0.9545 of 200 is 190.9; half the standard error would give 137


def test_an_answer_that_can_not_be_one_adds_zero() -> None:
    total = AnswerNoise(1, 2.0, 1.0, own=OwnNoise(1.0)).empty()
    total.add(torch.tensor([[0.25, 4.0], [math.inf, 1.0], [0.0, math.nan], [0.5, -1.0]]))
    assert total.part() == (0.25, 4.0)


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_the_error_is_that_of_the_clients_noise_and_each_answer_is_charged(kind: str, tmp_path: Path) -> None:
    folder = run(tmp_path, *LOCALLY, f"privacy.local.kind={kind}", "privacy.local.noise_multiplier=3")
    # Noise of standard deviation 2 * 2 on a number in -1..1, twice as wide as an accuracy; for Laplace sqrt(2).
    wide = 4 / 2 / math.sqrt(40) * (1 if kind == "gaussian" else math.sqrt(2))
    assert folder.read_metrics()[-1]["accuracy_error"] == pytest.approx(wide, rel=1e-6)
    charged = DurableLedger(folder.clients_ledger_path).spent(LOCAL, data_owner="7").entries
    assert sorted(count for _, count in charged) == [2, 3]  # two answers, three updates


def test_the_total_is_spent_by_updates_and_answers_together_and_is_what_is_published(tmp_path: Path) -> None:
    folder = run(tmp_path / "run", *LOCALLY, "privacy.local.kind=laplace", "privacy.local.epsilon=5")
    spent = DurableLedger(folder.clients_ledger_path).spent(LOCAL, data_owner="7")
    assert pure_epsilon(spent.entries) == pytest.approx(5, rel=1e-9)
    stated = json.loads((folder.path / "privacy.json").read_text())["guarantees"][2]
    assert stated["epsilon"]["pure"] == pytest.approx(5, rel=1e-9)
    assert "the client rates the model every 2 rounds and at the end" in stated["mechanism"]
    assert folder.read_metrics()[-1]["epsilon_local"] == pytest.approx(stated["epsilon"]["pld"], rel=1e-9)
