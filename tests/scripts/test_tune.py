"""Tuning: what may be tried, what it costs, and what is left of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from discreet.config import ConfigError, RunConfig, load_config
from discreet.privacy.selection import TrialCount
from discreet.reports import report_of
from discreet.runs import RunFolder
from scripts import tune
from scripts.tune import MOST_CANDIDATES, candidates_of, cost_of, main
from simulation.in_process import simulate

SMALL = ["rounds=1", "data.num_clients=20", "model.name=logistic_regression", "training.epochs=1", "seed=5081"]
NOISE = "privacy.user.noise_multiplier"


def test_a_comma_lists_what_is_tried() -> None:
    assert candidates_of(["rounds=3", "a.b=1,2", "c=x,y"]) == [
        ["rounds=3", f"a.b={b}", f"c={c}"] for b in (1, 2) for c in ("x", "y")
    ]


def test_a_list_in_brackets_is_one_value() -> None:
    assert candidates_of(["privacy.local.schedule=[1,2]"]) == [["privacy.local.schedule=[1,2]"]]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["x=interval(0,1)"], "no list of values"),
        ([f"x=range(0,{MOST_CANDIDATES + 1})"], "combinations"),
        (["x=[1"], r"x=\[1: "),
    ],
)
def test_what_is_no_list_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        candidates_of(words)


def test_the_cost_is_the_published_one() -> None:
    words = [f"{NOISE}=1", "sampling.probability=0.01", "rounds=1000", "privacy.delta=1e-6"]
    configs = [load_config([*words, f"training.learning_rate={rate}"]) for rate in (0.1, 0.2)]
    cost = cost_of(configs, TrialCount("logarithmic", 10))
    assert (cost.one_trial, cost.selection) == pytest.approx((2.437, 3.851), abs=5e-4)


REFUSED = {
    "the user level is off": (
        ["privacy.user.enabled=false", "privacy.user.target_epsilon=null"],
        "privacy.user is off",
    ),
    "there is no noise": ([f"{NOISE}=0"], "without noise"),
    "clients noise too": (["privacy.example.enabled=true", "privacy.example.noise_multiplier=1"], "add up"),
    "a folder is given": (["output_dir=somewhere"], "--output"),
    "samplings differ": ([f"{NOISE}=1", "sampling.probability=0.5", "rounds=4"], "none costs most"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_can_not_be_accounted_is_refused(reason: str) -> None:
    words, message = REFUSED[reason]
    other = load_config([f"{NOISE}=4", "sampling.probability=1.0", "rounds=60"])
    with pytest.raises(ConfigError, match=message):
        cost_of([load_config(words), other], TrialCount("poisson", 5))


def test_deltas_that_differ_are_refused() -> None:
    configs = [load_config([f"{NOISE}=1", f"privacy.delta={delta}"]) for delta in (1e-3, 1e-4)]
    with pytest.raises(ConfigError, match=r"privacy\.delta"):
        cost_of(configs, TrialCount("poisson", 5))


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("tune") / "out"
    words = ["--trials", "geometric", "--mean", "3", "--output", str(output)]
    assert main([*words, *SMALL, f"{NOISE}=1,2", "privacy.user.clip.norm=0.1,0.5"]) == 0
    return output


def test_as_many_trials_run_as_were_drawn_however_poor_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their number is drawn whatever the data: to run a poor one again would be one more, which is not accounted."""
    accuracies, ran = [0.0, 0.9, 0.1, 0.5], list[float]()

    def simulated(config: RunConfig) -> None:
        simulate(config)
        ran.append(accuracies[len(ran) % 4])

    monkeypatch.setattr(tune, "simulate", simulated)
    monkeypatch.setattr(tune, "_accuracy", lambda _: ran[-1])
    monkeypatch.setattr(TrialCount, "draw", lambda *_: 4)
    assert main(["--output", str(tmp_path / "out"), *SMALL, f"{NOISE}=1"]) == 0
    assert ran == accuracies


def test_only_the_chosen_run_is_left(tuned: Path) -> None:
    assert [path.name for path in tuned.iterdir()] == ["chosen"]
    assert RunFolder(tuned / "chosen").read_config().output_dir == str(tuned / "chosen")


def test_nothing_that_is_left_tells_the_number_of_trials(tuned: Path) -> None:
    facts = json.loads((tuned / "chosen" / "selection.json").read_text())
    assert {*facts} == {
        "distribution",
        "mean",
        "delta",
        "epsilon_of_one_trial",
        "epsilon",
        "accountant",
        "covers",
        "not_covered",
    }
    assert facts["epsilon"] > facts["epsilon_of_one_trial"] > 0
    assert "trials" not in (tuned / "chosen" / "config.yaml").read_text()


def test_the_report_states_what_the_choice_has_cost(tuned: Path, tmp_path: Path) -> None:
    report_of([tuned]).write_page(tmp_path / "report.html")
    facts = json.loads((tuned / "chosen" / "selection.json").read_text())
    page = (tmp_path / "report.html").read_text()
    assert "geometric distribution of mean 3" in page
    assert f"{facts['epsilon']:.4g} with the choice" in page


def test_a_choice_beyond_the_budget_does_not_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--max-epsilon", "0.5", "--output", str(tmp_path / "out"), *SMALL, f"{NOISE}=1,2"]
    assert main(words) == 2
    assert "above --max-epsilon" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_cost_alone_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cost", *SMALL, f"{NOISE}=1,2"]) == 0
    assert "2 candidates" in capsys.readouterr().out


def test_a_folder_that_is_not_empty_is_left_alone(tuned: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--output", str(tuned), *SMALL, f"{NOISE}=1"]) == 2
    assert "is not empty" in capsys.readouterr().err
