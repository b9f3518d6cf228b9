"""`data.normalise=private`: a run that asks its clients for means and deviations before its first
round."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
import torch

from discreet.flower.serving import ask_and_end
from discreet.ledger.durable_ledger import DurableLedger
from discreet.protocol.messages import NORMALISE
from discreet.run_files.compose import load_asked
from discreet.run_files.predictions import load_model, predict
from discreet.run_files.resuming import asked_settings
from discreet.run_files.run_folder import RunFolder
from discreet.server.data_questions import answers_by
from discreet.server.session import normalised, prepare
from discreet.settings.rules import ConfigError
from discreet.simulation.in_process import InProcessTransport, simulate

DATA = (
    'format="csv"\nfile="train.csv"\ntest="test.csv"\ntarget="y"\nnum_classes=2\n'
    "low=[0,0,0]\nhigh=[1000000,1,300]\n"
)
SMALL = (
    "data.name=folder",
    "data.num_clients=150",
    "model.name=linear",
    "seed=31991",
    "rounds=8",
    "training.epochs=3",
    "privacy.delta=1e-3",
    "privacy.user.noise_multiplier=0.5",
    "statistics.noise_multiplier=0.005",
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two features that tell the class: an income of thousands in a range up to a million, and a
    share."""
    folder, source = tmp_path_factory.mktemp("data"), np.random.default_rng(30727)
    (folder / "data.toml").write_text(DATA)
    for name, count in (("train", 1500), ("test", 800)):
        y = source.integers(0, 2, count)
        columns = [
            30000 + 4000 * source.standard_normal(count) + 4000 * (2 * y - 1),
            0.5 + 0.1 * source.standard_normal(count) - 0.03 * (2 * y - 1),
            170 + 8 * source.standard_normal(count),
        ]
        table = np.column_stack([*columns, y])
        np.savetxt(
            folder / f"{name}.csv", table, "%.9g", ",", header="income,share,height,y", comments=""
        )
    return folder


def words(data: Path, folder: Path, *more: str) -> list[str]:
    return [*SMALL, f"data.path={data}", f"output_dir={folder}", *more]


@pytest.fixture(scope="module")
def private(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("private") / "run"
    simulate(*load_asked(words(data, folder, "data.normalise=private")))
    return folder


def test_features_of_very_different_scale_are_learned(
    private: Path, data: Path, tmp_path: Path
) -> None:
    simulate(*load_asked(words(data, tmp_path / "plain")))
    plain, normalised = (
        RunFolder(folder).read_metrics()[-1]["accuracy"] for folder in (tmp_path / "plain", private)
    )
    assert normalised > 0.82
    assert normalised > plain + 0.1


def test_the_means_and_deviations_are_those_of_the_clients(private: Path, data: Path) -> None:
    rows = np.loadtxt(data / "train.csv", delimiter=",", skiprows=1)[:, :3]
    scaled = rows / np.array([1e6, 1, 300]) * 2 - 1
    found = RunFolder(private).read_config().normaliser
    assert found.means == pytest.approx(scaled.mean(axis=0), abs=0.005)
    # Of income the deviation is 0.011: smaller than its noise, which it is then set to.
    assert found.deviations[1:] == pytest.approx(scaled.std(axis=0)[1:], abs=0.03)  # type: ignore[index]


def test_the_saved_model_normalises_what_it_predicts_of(private: Path) -> None:
    saved = load_model(private)
    found = RunFolder(private).read_config().normaliser
    inputs = torch.rand(5, 3, generator=torch.Generator().manual_seed(71)) * 2 - 1
    by_hand = (inputs.double() - torch.tensor(found.means)) / torch.tensor(found.deviations)
    with torch.no_grad():
        assert torch.allclose(
            predict(saved, inputs), saved.model(by_hand.float()).double().softmax(dim=1)
        )


def test_a_run_that_goes_on_does_not_ask_again(private: Path) -> None:
    before = RunFolder(private).read_config().normaliser
    outcome = simulate(*asked_settings(["resume=true", f"output_dir={private}", "rounds=9"]))
    assert outcome.checkpoint.round == 9
    assert RunFolder(private).read_config().normaliser == before
    events = dict(DurableLedger(private / "ledger.db").spent("user").entries)
    assert sorted(events.values()) == [1, 9]


def test_clients_that_a_transport_asks_answer_the_same(
    data: Path, private: Path, tmp_path: Path
) -> None:
    asked = load_asked(words(data, tmp_path / "run", "data.normalise=private"))
    with ExitStack() as held:
        session = prepare(*asked, simulated=True, held=held)
        transport = InProcessTransport(session.plan, str(session.folder.path))
        found = normalised(session, lambda: answers_by(transport, session.plan, NORMALISE))
    assert found.plan.run.normaliser == RunFolder(private).read_config().normaliser
    assert session.context.ledger.spent("user").num_releases == 1


def test_a_run_goes_on_where_clients_were_only_asked(data: Path, tmp_path: Path) -> None:
    asked = load_asked(words(data, tmp_path / "run", "statistics.only=true", "rounds=1"))
    with ExitStack() as held:
        session = prepare(*asked, simulated=True, held=held)
        ask_and_end(session, InProcessTransport(session.plan, str(session.folder.path)))
    assert (tmp_path / "run" / "statistics.json").exists()
    outcome = simulate(*asked_settings(["resume=true", f"output_dir={tmp_path / 'run'}"]))
    assert (outcome.checkpoint.round, outcome.stopped) == (1, None)
    assert DurableLedger(tmp_path / "run" / "ledger.db").spent("user").num_releases == 2


def test_what_would_pass_the_budget_asks_nobody(data: Path, tmp_path: Path) -> None:
    asked = words(data, tmp_path / "run", "data.normalise=private", "privacy.user.max_epsilon=1")
    with pytest.raises(
        ConfigError,
        match=r"statistics\.noise_multiplier is needed: asking clients .* beyond "
        r"privacy\.user\.max_epsilon=1",
    ):
        simulate(*load_asked(asked))
    assert DurableLedger(tmp_path / "run" / "ledger.db").spent("user").num_releases == 0
