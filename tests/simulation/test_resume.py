"""kill -9 between any two steps of a round: nothing spent is forgotten, and the run, or two at
once, go on."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch

from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.ledger.durable_ledger import Charge, DurableLedger, LedgerError
from discreet.run_files.compose import load_asked
from discreet.run_files.run_folder import RunFolder
from discreet.server.population_account import ADJACENCIES, Population, create_account
from discreet.simulation.in_process import simulate
from tests.simulation.crash import AFTER_ACCOUNT, POINTS, crash, crash_all

pytestmark = pytest.mark.usefixtures("with_workers")

ROUNDS, KILLED = 3, 2
SMALL = [
    f"rounds={ROUNDS}",
    "seed=90217",
    "data.num_clients=20",
    "model.name=logistic_regression",
    "training.epochs=1",
    "sampling.probability=0.5",
    "privacy.user.noise_multiplier=1.0",
]


def overrides(folder: Path, *more: str) -> list[str]:
    return [*SMALL, f"output_dir={folder}", *more]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    return simulate(
        *load_asked(overrides(tmp_path_factory.mktemp("whole") / "run"))
    ).checkpoint.params


@pytest.mark.parametrize("point", POINTS)
def test_a_killed_run_is_resumed_and_nothing_spent_is_forgotten(
    point: str, tmp_path: Path, undisturbed: torch.Tensor
) -> None:
    folder = tmp_path / "run"
    assert crash(point, KILLED, overrides(folder)) == -signal.SIGKILL
    charged = DurableLedger(folder / "ledger.db").spent("user").num_releases
    finished = 2 if point == "after_checkpoint" else 1
    assert charged == (1 if point == "before_ledger" else 2)

    outcome = simulate(*load_asked(overrides(folder, "resume=true")))
    ledger = DurableLedger(folder / "ledger.db")
    wasted = charged - finished
    assert wasted in (0, 1)
    assert ledger.spent("user").num_releases == ROUNDS + wasted
    assert ledger.verify() == []
    assert [row["round"] for row in RunFolder(folder).read_metrics()] == [1, 2, 3]
    # With a seed a round's draws depend on its number alone: the model is the one that was never
    # disturbed.
    assert torch.equal(outcome.checkpoint.params, undisturbed)


CHANGES = {
    "privacy.user.noise_multiplier=2": "privacy.user.noise_multiplier was 1.0, is 2.0",
    "sampling.probability=0.25": "sampling.probability was 0.5, is 0.25",
    "sampling.population_size=30": "sampling.population_size was 20, is 30",
    "privacy.delta=1e-4": "privacy.delta was 0.001, is 0.0001",
    "data.partition=dirichlet": "data.partition was iid, is dirichlet",
}


def test_resuming_under_other_privacy_settings_is_refused(tmp_path: Path) -> None:
    simulate(*load_asked(overrides(tmp_path / "run", "rounds=1")))
    for change, message in CHANGES.items():
        with pytest.raises(LedgerError) as error:
            simulate(*load_asked(overrides(tmp_path / "run", "resume=true", change)))
        assert message in str(error.value)


def test_a_folder_that_other_users_can_read_is_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    for mode, warned in ((0o755, True), (0o700, False)):
        folder.mkdir()
        folder.chmod(mode)
        caplog.clear()
        simulate(*load_asked(overrides(folder, "rounds=1")))
        assert ("other users of this machine can read" in caplog.text) == warned
        shutil.rmtree(folder)


def test_a_run_reports_what_the_ledger_has_spent_not_what_its_rounds_would_cost(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    simulate(*load_asked(overrides(folder, "rounds=1")))
    ledger = DurableLedger(folder / "ledger.db")
    ((event, _),) = ledger.spent("user").entries
    # as after a crash between the charge and the checkpoint
    ledger.charge([Charge(2, "user", "", event)])
    simulate(*load_asked(overrides(folder, "resume=true", "rounds=2")))
    said = json.loads((folder / "privacy.json").read_text())["guarantees"][0]["epsilon"]
    assert said["pld"] == pytest.approx(PrivacyLedger(((event, 3),)).epsilon(1e-3), rel=1e-9)
    assert said["rdp"] == pytest.approx(PrivacyLedger(((event, 3),)).epsilon(1e-3, "rdp"), rel=1e-9)
    assert RunFolder(folder).read_metrics()[-1]["epsilon_user"] == pytest.approx(
        said["pld"], rel=1e-6
    )


OF_PEOPLE = (
    f"rounds={ROUNDS}",
    "data.num_clients=20",
    "model.name=logistic_regression",
    "training.epochs=1",
    "sampling.population_name=people",
    "privacy.user.noise_multiplier=2",
    "privacy.user.too_noisy=warn",
)
# (of the first run, of the second one): where each is killed in round 2.
PAIRS = (
    ("before_ledger", AFTER_ACCOUNT),
    (AFTER_ACCOUNT, "after_ledger"),
    ("before_checkpoint", AFTER_ACCOUNT),
    ("after_checkpoint", "before_metrics"),
)


def charged(path: Path, folder: Path) -> int:
    """How many releases the account knows of a run."""
    ledger, identity = DurableLedger(path), DurableLedger(folder / "ledger.db").position().identity
    (data_owner,) = (run for run in ledger.data_owners("user") if run.endswith(identity))
    return ledger.spent("user", data_owner=data_owner).num_releases


@pytest.mark.parametrize("points", PAIRS, ids=" and ".join)
def test_two_runs_that_are_killed_at_once_forget_nothing(
    points: tuple[str, str], tmp_path: Path
) -> None:
    path, folders = tmp_path / "people.db", [tmp_path / "first", tmp_path / "second"]
    create_account(path, Population("people", 20, ADJACENCIES[0], 1e-3))
    words = [
        [*OF_PEOPLE, f"privacy.user.account={path}", f"output_dir={folder}"] for folder in folders
    ]
    runs = [(point, KILLED, each) for point, each in zip(points, words, strict=True)]
    assert crash_all(runs) == [-signal.SIGKILL] * 2
    for folder in folders:
        done = RunFolder(folder).load_checkpoint()
        own = DurableLedger(folder / "ledger.db").spent("user").num_releases
        assert done.round <= own <= charged(path, folder) <= done.round + 1
    before = [charged(path, folder) for folder in folders]
    for number, each in enumerate(words):
        done = RunFolder(folders[number]).load_checkpoint()
        simulate(*load_asked([*each, "resume=true"]))
        assert charged(path, folders[number]) == before[number] + ROUNDS - done.round
    assert DurableLedger(path).verify() == []
    said = json.loads((folders[1] / "privacy.json").read_text())["account"]
    assert said["releases"] == sum(charged(path, folder) for folder in folders)


RATED = ("evaluation.kind=private", "evaluation.every=1", "privacy.user.too_noisy=warn")


def test_a_rated_run_that_was_killed_before_its_first_checkpoint_goes_on(tmp_path: Path) -> None:
    words = [*SMALL, *RATED, f"output_dir={tmp_path / 'run'}"]
    assert crash("before_checkpoint", 1, words) == -signal.SIGKILL
    simulate(*load_asked([*words, "resume=true"]))
    rows = RunFolder(tmp_path / "run").read_metrics()
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert all(row["accuracy_error"] for row in rows)


def test_fewer_rounds_than_a_run_has_are_told_when_it_is_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = [*SMALL, f"output_dir={tmp_path / 'run'}"]
    simulate(*load_asked(words))
    simulate(*load_asked([*words, "resume=true"]))
    assert "no round is added" not in caplog.text
    simulate(*load_asked([*words, "resume=true", "rounds=2"]))
    assert "rounds=2: no round is added, and none taken away: the run has 3 already" in caplog.text


def test_answers_of_clients_in_a_resumed_run_are_not_held_against_the_test_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    words = [*SMALL, *RATED, "evaluation.metrics=[accuracy,loss]", f"output_dir={tmp_path / 'run'}"]
    simulate(*load_asked(words))
    folder = RunFolder(tmp_path / "run")
    answered = {"accuracy": 0.01, "loss": 9.0}
    folder.replace_metrics([row | answered for row in folder.read_metrics()])
    caplog.clear()
    with caplog.at_level("INFO", "discreet"):
        simulate(*load_asked([*words, "resume=true"]))
    assert "on the test set a constant guess has" in caplog.text
    assert "loss 9.000 is above" not in caplog.text
    assert "is not above the share" not in caplog.text


LOCAL = ("privacy.user.enabled=false", "privacy.local.kind=gaussian", "server.learning_rate=0.01")


@pytest.mark.parametrize("known", ["a row", "the clients' ledger"])
def test_what_a_lost_round_cost_its_clients_stays_in_what_is_published(
    known: str, tmp_path: Path
) -> None:
    words = [*SMALL[:-1], *LOCAL, "privacy.local.noise_multiplier=9", f"output_dir={tmp_path}"]
    simulate(*load_asked([*words, "rounds=1"]))
    folder = RunFolder(tmp_path)
    clients = DurableLedger(folder.clients_ledger_path)
    (event, _), *_ = clients.spent("local", data_owner=clients.data_owners("local")[0]).entries
    lost = PrivacyLedger(((event, 7),)).epsilon(1e-3)
    if known == "a row":  # as a crash before the checkpoint leaves it, in a federation too
        (row,) = folder.read_metrics()
        folder.append_metrics({**row, "round": 2, "epsilon_local": lost})
    else:
        clients.charge([Charge(2, "local", "in no later cohort", event, 7)])
    simulate(*load_asked([*words, "rounds=3", "resume=true"]))
    said = json.loads((tmp_path / "privacy.json").read_text())["guarantees"][2]["epsilon"]["pld"]
    assert said == pytest.approx(lost, rel=1e-6)
    assert folder.read_metrics()[-1]["epsilon_local"] == pytest.approx(lost, rel=1e-6)


def test_a_damaged_header_of_the_metrics_damages_no_row_of_a_run_that_goes_on(
    tmp_path: Path,
) -> None:
    words = overrides(tmp_path / "run")
    assert crash("after_checkpoint", KILLED, words) == -signal.SIGKILL
    path = RunFolder(tmp_path / "run").metrics_path
    path.write_text(path.read_text().replace("clip_norm", "clip_borm"))
    simulate(*load_asked([*words, "resume=true"]))
    rows = RunFolder(tmp_path / "run").read_metrics()
    assert [row["round"] for row in rows] == [1, 2, 3]
    assert rows[-1]["clip_norm"]
