"""Clients rate models on what they hold out: a run without any test set, the ledger, and resuming."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch

from discreet.accounting.accounting import epsilon_spent
from discreet.data.examples import TaskShape
from discreet.mechanisms.mechanism import releases_of
from discreet.mechanisms.sums import AnswerRelease, AnswerSum
from discreet.privacy.randomness import seeded_source
from discreet.protocol.messages import TrainReply
from discreet.queries.metric_answers import metric_blocks
from discreet.queries.query import Query
from discreet.server.plan import plan_of
from discreet.server.run_folder import RunFolder
from discreet.server.state import Outcome
from discreet.settings.compose import load_config
from discreet.settings.privacy import USER
from discreet.settings.settings import Settings
from discreet.simulation.in_process import simulate

CLASSES = TaskShape((1,), 2)
ACCURACY = Query(metric_blocks(["accuracy"], CLASSES))
PRIVATE = (
    *("evaluation.kind=private", "evaluation.every=2", "evaluation.cohort=same", "evaluation.noise_multiplier=4"),
    *("rounds=3", "seed=55147"),
    *("data.num_clients=30", "training.epochs=1", "model.name=linear", "privacy.user.noise_multiplier=1"),
)


def run(folder: Path, *words: str) -> tuple[RunFolder, Outcome]:
    outcome = simulate(load_config([*PRIVATE, *words, f"output_dir={folder}"]))
    return RunFolder(folder), outcome


def test_the_ledger_holds_what_was_planned_and_the_last_row_what_is_spent(tmp_path: Path) -> None:
    folder, _ = run(tmp_path / "run")
    config = folder.read_config()
    spent = folder.ledger(plan_of(config)).spent(USER)
    planned = releases_of(plan_of(config).mechanism, 1.0, 3)
    assert sorted(count for _, count in spent.entries) == [1, 1, 2]
    assert spent.epsilon(1e-3) == pytest.approx(epsilon_spent(planned, delta=1e-3), rel=1e-9)
    assert folder.read_metrics()[-1]["epsilon_user"] == pytest.approx(spent.epsilon(1e-3), rel=1e-9)


def own_data(folder: Path, *, rows: int = 240) -> Path:
    folder.mkdir()
    draw = np.random.default_rng(80177)
    with (folder / "train.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["a", "b", "label"])
        for a, b in draw.normal(size=(rows, 2)).round(4):
            table.writerow([a, b, int(a > b)])
    described = 'format = "csv"\nfile = "train.csv"\ntarget = "label"\nnum_classes = 2\n'
    (folder / "data.toml").write_text(described)
    return folder


@pytest.mark.parametrize("kind", ["private", "none"])
def test_data_without_a_test_set_make_a_whole_run(tmp_path: Path, kind: str) -> None:
    words = "data.name=folder", f"data.path={own_data(tmp_path / 'data')}", f"evaluation.kind={kind}"
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
    entries = folder.ledger(plan_of(folder.read_config())).spent(USER).entries
    assert sorted(count for _, count in entries) == [1, 2, 2]  # the joined round twice
    assert folder.read_metrics()[-1]["accuracy"] is not None


def test_a_rating_that_would_pass_the_budget_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    budget = epsilon_spent(releases_of(plan_of(config()).mechanism, 1.0, 3)[:2], delta=1e-3)
    with caplog.at_level("WARNING", "discreet"):
        folder, _ = run(tmp_path / "run", f"privacy.user.max_epsilon={budget + 1e-9}")
    assert any("the model after round 3 is not rated" in record.message for record in caplog.records)
    assert len(folder.ledger(plan_of(folder.read_config())).spent(USER).entries) == 2


def config(*words: str) -> Settings:
    return load_config([*PRIVATE, *words])


def test_too_small_a_population_is_said_before_the_run(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = "data.num_clients=200", "sampling.probability=0.3", "evaluation.noise_multiplier=5", "rounds=1"
    with caplog.at_level("WARNING", "discreet"):
        run(tmp_path / "run", *small)
    said = next(record.message for record in caplog.records if "population is too small" in record.message)
    assert "accuracy 0.04167 by noise" in said  # 4.2 points


def test_private_numbers_are_within_two_standard_errors_in_19_of_20_draws() -> None:
    shares = torch.rand(300, generator=torch.Generator().manual_seed(31847)).double()
    how = AnswerRelease(1, 300.0, 5.0, noise="grid")
    answers = [TrainReply(1, torch.zeros(1), below=True, answer=(shares - 0.5)[[row]] * 2) for row in range(300)]
    exact, within = float(shares.mean()), 0
    for seed in range(200):
        total = AnswerSum(how)
        for answer in answers:
            total.take(answer)
        found = ACCURACY.read(total.released(seeded_source(seed)))["accuracy"]
        within += abs(found.value - exact) <= 2 * found.standard_error
    assert 185 <= within < 200  # 0.9545 of 200 is 190.9; half the standard error would give 137


def test_no_client_trains_on_what_it_holds_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    run(tmp_path / "run", "engine=sequential", "sampling.kind=everyone", "privacy.user.noise_multiplier=9")
    rows = {tuple(row.flatten().tolist()) for examples in trained for row in examples.inputs}  # type: ignore[attr-defined]
    held = {tuple(row.flatten().tolist()) for inputs in seen for row in inputs}
    assert held
    assert not rows & held
