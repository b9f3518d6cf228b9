"""Clients rate models on what they hold out, and the server or they themselves noise it: ledgers,
budgets, numbers."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from sklearn.metrics import roc_auc_score, roc_curve

from discreet.accounting.accounting import epsilon_spent, pure_epsilon
from discreet.data.datasets import load_task
from discreet.data.examples import TaskShape
from discreet.data.partition import client_examples_of, held_out_rows
from discreet.ledger.durable_ledger import DurableLedger
from discreet.mechanisms.client_noise import LocalPrivacy, OwnNoise
from discreet.mechanisms.mechanism import releases_of
from discreet.mechanisms.sums import AnswerRelease, AnswerSum
from discreet.models.models import build_model, load_parameters
from discreet.planning.plan import Plan
from discreet.planning.state import Outcome, State
from discreet.privacy.randomness import seeded_source
from discreet.queries.metrics import metric_blocks
from discreet.queries.query import Query
from discreet.run_files.compose import load_asked, load_config
from discreet.run_files.run_folder import RunFolder
from discreet.server.model_ratings import RatingPlan
from discreet.server.training_run import TrainingRun
from discreet.settings.adjacency import EXAMPLE, LOCAL, USER
from discreet.settings.settings import Settings
from discreet.simulation.in_process import simulate

CLASSES = TaskShape((1,), 2)
ACCURACY = Query(metric_blocks(["accuracy"], CLASSES))
PRIVATE = (
    "evaluation.kind=private",
    "evaluation.every=2",
    "evaluation.cohort=same",
    "evaluation.noise_multiplier=4",
    "rounds=3",
    "seed=55147",
    "data.num_clients=30",
    "training.epochs=1",
    "model.name=linear",
    "privacy.user.noise_multiplier=1",
)


def run(folder: Path, *words: str) -> tuple[RunFolder, Outcome]:
    outcome = simulate(*load_asked([*PRIVATE, *words, f"output_dir={folder}"]))
    return RunFolder(folder), outcome


def test_the_ledger_holds_what_was_planned_and_the_last_row_what_is_spent(tmp_path: Path) -> None:
    folder, _ = run(tmp_path / "run")
    config = folder.read_config()
    spent = folder.ledger(Plan(config)).spent(USER)
    planned = releases_of(Plan(config).mechanism, Plan(config).run, 3)
    assert sorted(count for _, count in spent.entries) == [1, 1, 2]
    assert spent.epsilon(1e-3) == pytest.approx(epsilon_spent(planned, delta=1e-3), rel=1e-9)
    assert folder.read_metrics()[-1]["epsilon_user"] == pytest.approx(spent.epsilon(1e-3), rel=1e-9)


def own_data(folder: Path) -> Path:
    folder.mkdir()
    drawn = np.random.default_rng(80177).normal(size=(240, 2))
    table = np.column_stack([drawn, drawn[:, 0] > drawn[:, 1]])
    np.savetxt(folder / "train.csv", table, "%.4g", ",", header="a,b,label", comments="")
    described = 'format = "csv"\nfile = "train.csv"\ntarget = "label"\nnum_classes = 2\n'
    (folder / "data.toml").write_text(described)
    return folder


@pytest.mark.parametrize("kind", ["private", "none"])
def test_data_without_a_test_set_make_a_whole_run(tmp_path: Path, kind: str) -> None:
    words = (
        "data.name=folder",
        f"data.path={own_data(tmp_path / 'data')}",
        f"evaluation.kind={kind}",
    )
    folder, outcome = run(tmp_path / "run", *words)
    assert outcome.stopped is None
    assert (folder.read_metrics()[-1]["accuracy"] is not None) == (kind == "private")


def test_a_crash_between_charge_and_rating_is_charged_and_the_rating_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(AnswerSum, "released", crash)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "run")
    folder, _ = run(tmp_path / "run", "resume=true")
    entries = folder.ledger(Plan(folder.read_config())).spent(USER).entries
    assert sorted(count for _, count in entries) == [1, 2, 2]  # the joined round twice
    assert folder.read_metrics()[-1]["accuracy"] is not None


def test_a_rating_that_would_pass_the_budget_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plan = Plan(config())
    budget = epsilon_spent(releases_of(plan.mechanism, plan.run, 3)[:2], delta=1e-3)
    with caplog.at_level("WARNING", "discreet"):
        folder, _ = run(tmp_path / "run", f"privacy.user.max_epsilon={budget + 1e-9}")
    assert any(
        "the model after round 3 is not rated" in record.message for record in caplog.records
    )
    assert len(folder.ledger(Plan(folder.read_config())).spent(USER).entries) == 2


def config(*words: str) -> Settings:
    return load_config([*PRIVATE, *words])


def test_too_small_a_population_is_said_before_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small = (
        "data.num_clients=200",
        "sampling.probability=0.3",
        "evaluation.noise_multiplier=5",
        "rounds=1",
    )
    with caplog.at_level("WARNING", "discreet"):
        run(tmp_path / "run", *small)
    said = next(
        record.message for record in caplog.records if "population is too small" in record.message
    )
    assert "accuracy 0.04167 due to noise" in said  # 4.2 points


def own_noise(z: float) -> OwnNoise:
    return OwnNoise(LocalPrivacy("gaussian", 1.0, z), of_examples=True)


@pytest.mark.parametrize(
    ("count", "own"), [(300, None), (40, own_noise(4.0))], ids=["by the server", "by clients"]
)
def test_private_numbers_are_within_two_standard_errors_in_19_of_20_draws(
    count: int, own: OwnNoise | None
) -> None:
    draw = torch.Generator().manual_seed(31847)
    shares = torch.rand(count, generator=draw).double()
    sizes = torch.randint(5, 60, (count,), generator=draw).tolist()
    how = AnswerRelease(1, float(count), 5.0 if own is None else 4.0, "grid", own=own)
    answers = 2 * (shares.unsqueeze(1) - 0.5)
    within = 0
    for seed in range(200):
        total, source = AnswerSum(how), seeded_source(seed)
        sent = [
            answer if own is None else own.noised(answer, size, source.child(row))
            for row, (answer, size) in enumerate(zip(answers, sizes, strict=True))
        ]
        total.add(torch.stack(sent))
        found = ACCURACY.read(total.released(source))["accuracy"]
        within += abs(found.value - float(shares.mean())) <= 2 * found.standard_error
    assert 183 <= within < 200  # 0.9545 of 200 is 190.9; half the standard error would give 137


def test_no_client_trains_on_what_it_holds_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from discreet.node import client as own

    seen: list[torch.Tensor] = []
    plain, outputs = own.local_update, own.outputs_of

    def watched(model: object, params: object, examples: object, **how: object) -> object:
        trained.append(examples)
        return plain(model, params, examples, **how)  # type: ignore[arg-type]

    def rated(model: object, inputs: torch.Tensor) -> torch.Tensor:
        seen.append(inputs)
        return outputs(model, inputs)  # type: ignore[arg-type]

    trained: list[object] = []
    monkeypatch.setattr(own, "local_update", watched)
    monkeypatch.setattr(own, "outputs_of", rated)
    run(
        tmp_path / "run",
        "engine=sequential",
        "sampling.kind=everyone",
        "privacy.user.noise_multiplier=9",
    )
    rows = {tuple(row.flatten().tolist()) for examples in trained for row in examples.inputs}  # type: ignore[attr-defined]
    held = {tuple(row.flatten().tolist()) for inputs in seen for row in inputs}
    assert held
    assert not rows & held


OWN = (
    "evaluation.kind=private",
    "evaluation.every=2",
    "evaluation.noise_multiplier=2",
    "rounds=3",
    "seed=55147",
    "data.num_clients=8",
    "training.epochs=1",
    "training.batch_size=50",
    "model.name=linear",
    "sampling.kind=everyone",
    "privacy.user.enabled=false",
    "privacy.example.enabled=true",
    "privacy.example.noise_multiplier=2",
)


LOCALLY = (
    "data.num_clients=40",
    "training.batch_size=32",
    "privacy.example.enabled=false",
    "privacy.local.clip_norm=0.1",
    "privacy.example.noise_multiplier=null",
)


def run_own(folder: Path, *words: str) -> RunFolder:
    simulate(*load_asked([*OWN, *words, f"output_dir={folder}"]))
    return RunFolder(folder)


def test_what_is_published_is_what_the_ledger_holds_with_the_last_rating(tmp_path: Path) -> None:
    folder = run_own(tmp_path / "run")
    ledger = DurableLedger(folder.clients_ledger_path)
    spent = max(ledger.spent(EXAMPLE, data_owner=str(client)).epsilon(1e-3) for client in range(8))
    stated = json.loads((folder.path / "privacy.json").read_text())["guarantees"][1]["epsilon"][
        "pld"
    ]
    row, checkpoint = folder.read_metrics()[-1], folder.load_checkpoint()
    assert [stated, row["epsilon_example"], checkpoint.epsilon_example] == pytest.approx(
        [spent] * 3, rel=1e-9
    )
    rows = [row for row in ledger.releases() if row.data_owner == "0"]
    q = 50 / 144  # of 1437 training examples client 0 has 180, and holds 36 of them out
    oracle = (
        PLDAccountant()
        .compose(PoissonSampledDpEvent(q, GaussianDpEvent(2.0)), 9)
        .compose(GaussianDpEvent(2.0), 2)
    )
    assert [row.count for row in rows] == [3, 3, 1, 3, 1]
    assert ledger.spent(EXAMPLE, data_owner="0").epsilon(1e-3) == pytest.approx(
        oracle.get_epsilon(1e-3), rel=1e-3
    )


def test_a_crash_before_a_rating_is_written_does_not_forget_what_it_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RatingPlan, "write", crash)
        with pytest.raises(KeyboardInterrupt):
            run_own(tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    spent = DurableLedger(folder.clients_ledger_path)
    most = max(spent.spent(EXAMPLE, data_owner=str(client)).epsilon(1e-3) for client in range(8))
    assert folder.load_checkpoint().epsilon_example == pytest.approx(most, rel=1e-9)
    assert run_own(tmp_path / "run", "resume=true").read_metrics()[-1]["accuracy"] is not None


def test_a_rating_that_a_kill_swallowed_is_made_at_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rated(folder: RunFolder) -> list[object]:
        rows = folder.read_metrics()
        return [row["round"] for row in rows if row["accuracy_error"] is not None]

    real = TrainingRun._rate_if_due

    def killed(self: TrainingRun, last: State, *, is_last: bool) -> State:
        if last.round == 2:
            raise KeyboardInterrupt
        return real(self, last, is_last=is_last)

    whole = run_own(tmp_path / "whole")
    with monkeypatch.context() as patched:
        patched.setattr(TrainingRun, "_rate_if_due", killed)
        with pytest.raises(KeyboardInterrupt):
            run_own(tmp_path / "run")
    assert 2 not in rated(RunFolder(tmp_path / "run"))
    resumed = run_own(tmp_path / "run", "resume=true")
    assert rated(resumed) == rated(whole) == [2, 3]
    ledgers = [DurableLedger(each.clients_ledger_path).total() for each in (whole, resumed)]
    assert ledgers[0].num_releases == ledgers[1].num_releases


def test_an_answer_that_can_not_be_one_adds_zero() -> None:
    total = AnswerSum(AnswerRelease(1, 2.0, 1.0, own=own_noise(1.0)))
    total.add(torch.tensor([[0.25, 4.0], [math.inf, 1.0], [0.0, math.nan], [0.5, -1.0]]))
    assert total.part() == (0.25, 4.0)


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_the_error_is_that_of_the_clients_noise_and_each_answer_is_charged(
    kind: str, tmp_path: Path
) -> None:
    folder = run_own(
        tmp_path, *LOCALLY, f"privacy.local.kind={kind}", "privacy.local.noise_multiplier=3"
    )
    # Noise of standard deviation 2 * 2 on a number in -1..1, twice as wide as an accuracy; for
    # Laplace sqrt(2).
    wide = 4 / 2 / math.sqrt(40) * (1 if kind == "gaussian" else math.sqrt(2))
    assert folder.read_metrics()[-1]["accuracy_error"] == pytest.approx(wide, rel=1e-6)
    charged = DurableLedger(folder.clients_ledger_path).spent(LOCAL, data_owner="7").entries
    assert sorted(count for _, count in charged) == [2, 3]  # two answers, three updates


def test_the_total_is_spent_by_updates_and_answers_together_and_is_what_is_published(
    tmp_path: Path,
) -> None:
    folder = run_own(
        tmp_path / "run", *LOCALLY, "privacy.local.kind=laplace", "privacy.local.epsilon=5"
    )
    spent = DurableLedger(folder.clients_ledger_path).spent(LOCAL, data_owner="7")
    assert pure_epsilon(spent.entries) == pytest.approx(5, rel=1e-9)
    stated = json.loads((folder.path / "privacy.json").read_text())["guarantees"][2]
    assert stated["epsilon"]["pure"] == pytest.approx(5, rel=1e-9)
    assert "every 2 rounds" in stated["mechanism"]
    assert folder.read_metrics()[-1]["epsilon_local"] == pytest.approx(
        stated["epsilon"]["pld"], rel=1e-9
    )


MANY = 30
BY_AUC = (
    "evaluation.kind=private",
    "evaluation.every=2",
    "evaluation.noise_multiplier=0.05",
    "evaluation.metrics=[auc]",
    "rounds=2",
    "seed=90067",
    f"data.num_clients={MANY}",
    "model.name=linear",
    "sampling.kind=everyone",
    "training.epochs=2",
    "privacy.user.noise_multiplier=0.3",
    "privacy.user.too_noisy=warn",
    "data.name=breast_cancer",
)


def test_auc_and_its_curve_of_a_run_are_those_of_its_model_on_what_clients_hold_out(
    tmp_path: Path,
) -> None:
    """Within two standard errors, and what bins add. The seed is fixed; each client has the same
    weight in all."""
    simulate(*load_asked([*BY_AUC, f"output_dir={tmp_path / 'run'}"]))
    folder, task = RunFolder(tmp_path / "run"), load_task("breast_cancer")
    clients, model = (
        client_examples_of(task, folder.read_config().data),
        build_model("linear", (30,), 2, seed=0),
    )
    load_parameters(model, folder.load_checkpoint().params)
    held = [
        clients.examples(n)[held_out_rows(len(clients.examples(n)), n, share=0.2).numpy()]
        for n in range(MANY)
    ]
    examples = task.train.subset(torch.from_numpy(np.concatenate(held)))
    outputs = model(examples.inputs).detach().numpy()
    weights = np.concatenate([np.full(len(rows), 1 / len(rows)) for rows in held])
    given = {
        "y_true": examples.targets,
        "y_score": outputs[:, 1] - outputs[:, 0],
        "sample_weight": weights,
    }
    row = folder.read_metrics()[-1]
    assert 0 < row["auc_error"] <= 0.02
    assert row["auc_error_by_noise"] == pytest.approx(row["auc_error"])  # everybody is asked
    assert row["auc"] == pytest.approx(roc_auc_score(**given), abs=2 * row["auc_error"] + 0.01)
    false, true, thresholds = roc_curve(**given, drop_intermediate=False)
    points = csv.DictReader((tmp_path / "run" / "roc.csv").read_text().splitlines())
    middle = next(point for point in points if point["round"] == "2" and float(point["score"]) == 0)
    place = int((thresholds >= 0).sum()) - 1  # the last threshold that is not below 0
    for name, expected in (
        ("true_positive_rate", true[place]),
        ("false_positive_rate", false[place]),
    ):
        assert float(middle[name]) == pytest.approx(
            expected, abs=3 * float(middle[f"{name}_error"])
        )
