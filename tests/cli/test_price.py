"""The price before a run, and the same run without privacy."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant

from discreet.planning.plan import planned
from discreet.planning.run_price import price_lines
from discreet.privacy.mechanisms import analytic_gaussian_noise_multiplier
from discreet.run_files.compose import load_config
from discreet.run_files.run_folder import RunFolder
from tests.command import plan, report, simulate
from tests.tables.made_tables import TOML, make_project

SMALL = ("data.num_clients=20", "rounds=2", "model.name=linear", "training.epochs=1")


def test_a_plan_says_every_cost_and_what_a_run_then_says_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan([*SMALL]) == 0
    said = capsys.readouterr().out
    epsilon, in_all = re.findall(
        r"user-level: epsilon ([\d.]+) after the first round, ([\d.]+) after all 2", said
    )[0]
    assert float(in_all) == pytest.approx(8, abs=0.01)
    assert "2.6 kB a round (650 parameters)" in said
    assert ": it can learn" in said
    assert re.search(r"[\d.e-]+ s a round, [\d.e-]+ s in all", said)
    assert re.search(r"memory: [\d.]+ GB", said)
    assert simulate([*SMALL, "seed=40127", f"output_dir={tmp_path / 'run'}"]) == 0
    head, *_ = capsys.readouterr().out.partition("round 1/2")
    assert "after the first round, 8 after all 2" in head
    assert re.search(r"memory: [\d.]+ GB", head)
    assert RunFolder(tmp_path / "run").read_metrics()[0]["epsilon_user"] == pytest.approx(
        float(epsilon), abs=1e-3
    )


def test_a_run_that_will_not_learn_is_priced_and_not_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert plan(["data.num_clients=20", "rounds=30", "model.name=mlp200"]) == 0
    assert "it will not learn" in capsys.readouterr().out


def test_a_budget_that_ends_a_run_early_is_in_its_price_and_the_run_ends_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "rounds=8", "privacy.user.max_epsilon=5", "seed=40127"]
    assert plan(words) == 0
    room = re.findall(
        r"the budget of epsilon 5 has room for (\d) of the 8 rounds", capsys.readouterr().out
    )
    assert simulate([*words, f"output_dir={tmp_path / 'run'}"]) == 0
    assert [len(RunFolder(tmp_path / "run").read_metrics())] == [int(each) for each in room]


def test_a_run_whose_budget_has_no_room_for_a_round_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*SMALL, "privacy.user.max_epsilon=0.5", f"output_dir={tmp_path / 'run'}"]
    assert plan(words) == 0
    assert "the budget of epsilon 0.5 has room for 0 of the 2 rounds" in capsys.readouterr().out
    assert simulate(words) == 2
    assert "privacy.user.max_epsilon=0.5 has no room for a round" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("off", ["privacy.user.enabled=false", "privacy.user.noise_multiplier=0"])
def test_a_plan_without_noise_protects_nobody(off: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan([*SMALL, off]) == 0
    assert "no guarantee of this run has noise: it protects nobody" in capsys.readouterr().out


def test_a_plan_warns_of_owners_at_several_clients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_project(tmp_path, people=40, tested=20)
    words = ["experiment=table", f"data.path={folder}", "data.num_clients=5", "data.partition=iid"]
    assert plan(words) == 0
    assert "deals the rows of one patient_id to several" in capsys.readouterr().out


@pytest.mark.parametrize("experiment", ["silos", "gaussian_local", "organisations"])
def test_each_guarantee_has_its_line(experiment: str) -> None:
    lines = [*price_lines(planned(load_config([f"experiment={experiment}"])))]
    level = {"silos": "example", "gaussian_local": "local", "organisations": "user"}[experiment]
    assert sum(line.startswith(f"{level}-level: epsilon") for line in lines) == 1


def test_the_price_of_an_average_client_is_not_said_of_each() -> None:
    words = [
        "privacy.user.enabled=false", "privacy.example.enabled=true", "sampling.kind=everyone",
        "privacy.example.noise_multiplier=1", "rounds=2",
    ]  # fmt: skip
    for more, whose in (
        ([], "of a client with the average of 143 examples (fewer cost more), in its own account"),
        (["data.public_num_examples=100"], "of each client, in its own account"),
    ):
        first, *_ = price_lines(planned(load_config([*words, *more])), 143)
        assert whose in first


def test_owners_in_hospitals_are_priced_by_what_their_first_round_then_costs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_project(tmp_path, people=120, tested=40)
    words = ["experiment=hospitals", f"data.path={folder}", "rounds=2", "seed=40127"]
    assert plan(words) == 0
    said = capsys.readouterr().out
    one = re.findall(r"example-level: epsilon ([\d.]+) after the first round, 2 after all 2", said)
    (ratio,) = re.findall(r"with 40 owners a client, the noise .* be ([\d.]+) times", said)
    assert simulate([*words, f"output_dir={tmp_path / 'run'}"]) == 0
    head, *_ = capsys.readouterr().out.partition("round 1/2")
    assert f"epsilon {one[0]} after the first round" in head
    spent = RunFolder(tmp_path / "run").read_metrics()[0]["epsilon_example"]
    assert spent == pytest.approx(float(one[0]), abs=1e-3)
    # batches of 128 hold all 40 owners: two unsampled Gaussians, in the mean of three hospitals
    noise = math.sqrt(2) * analytic_gaussian_noise_multiplier(2.0, delta=1e-4)
    (parameters,) = re.findall(r"a round \((\d+) parameters", said)
    assert float(ratio) == pytest.approx(noise * math.sqrt(int(parameters) / 3) / 128, rel=0.02)


def test_local_noise_is_priced_for_replacement_in_the_mean_of_a_round() -> None:
    words = ["experiment=gaussian_local", "privacy.local.epsilon=null"]
    plan_of = planned(load_config([*words, "privacy.local.noise_multiplier=5"]))
    said = "\n".join(price_lines(plan_of, 9))
    ten = PLDAccountant().compose(GaussianDpEvent(5), 10).get_epsilon(1e-4)
    (spent,) = re.findall(r"([\d.]+) after all 10 rounds", said)
    assert float(spent) == pytest.approx(ten, abs=0.01)
    ratio = 2 * 5 * math.sqrt(plan_of.num_params / 50)
    assert f"is expected to be {ratio:.3g} times the clip norm: no rule says" in said


def test_a_baseline_trains_the_same_clients_and_is_marked_as_not_private(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--baseline", *SMALL, "seed=40127", f"output_dir={tmp_path / 'run'}"]
    assert simulate(words) == 0
    assert "now without privacy, NOT PRIVATE" in capsys.readouterr().out
    private, plain = (RunFolder(tmp_path / name).read_config() for name in ("run", "run-baseline"))
    assert (plain.data, plain.sampling, plain.seed) == (
        private.data,
        private.sampling,
        private.seed,
    )
    assert not plain.privacy.user.enabled
    assert report([str(tmp_path / "run"), str(tmp_path / "run-baseline")]) == 0
    page = (tmp_path / "run" / "report.html").read_text()
    assert "1 of 2 runs has no guarantee" in page
    assert "not private: user.enabled false" in page


def test_a_baseline_on_data_that_nobody_calls_public_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_project(tmp_path, people=20, tested=20)
    words = [
        "--baseline",
        "experiment=table",
        f"data.path={folder}",
        "data.num_clients=20",
        "rounds=1",
    ]
    assert simulate([*words, f"output_dir={tmp_path / 'run'}"]) == 2
    assert "public = true in data.toml" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    (folder / "data.toml").write_text(f"public = true\n{TOML}")
    assert simulate([*words, f"output_dir={tmp_path / 'run'}"]) == 0
    assert (tmp_path / "run-baseline" / "model.json").exists()
