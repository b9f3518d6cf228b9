"""Tuning: what may be tried, what it costs, and what is left of it."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.ledger.durable_ledger import DurableLedger, LedgerError
from discreet.mechanisms.correlated_noise import CorrelatedNoise
from discreet.planning.plan import Plan, planned
from discreet.privacy.selection import TrialCount
from discreet.run_files.call import Call
from discreet.run_files.compose import load_config
from discreet.run_files.run_folder import RunFolder
from discreet.server.model_ratings import RatingPlan
from discreet.server.population_account import ADJACENCIES, Population, create_account
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings
from discreet.simulation import many_runs, tuning
from discreet.simulation.in_process import simulate
from discreet.simulation.tuning import cost_of, planned_releases, require_room
from tests.command import tune as main
from tests.simulation.crash import crash

SMALL = [
    "rounds=1",
    "data.num_clients=20",
    "model.name=logistic_regression",
    "training.epochs=1",
    "seed=5081",
]
NOISE = "privacy.user.noise_multiplier"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([f"{NOISE}=1,1"], "at least two different candidates (got 1)"),
        (["--max-epsilon", "0.5", f"{NOISE}=1,2"], "above --max-epsilon"),
        (["--resume", "--output", "none"], "holds no unfinished tune"),
        (["--output", str(Path(__file__).parent), f"{NOISE}=1,2"], "is not empty"),
    ],
)
def test_what_can_not_be_tuned_is_refused_before_anything_is_spent(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = (
        []
        if "--output" in words or "--resume" in words
        else ["--output", str(tmp_path / "out"), *SMALL]
    )
    assert main([*own, *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


UNACCOUNTED = {
    r"privacy\.user is off": ["privacy.user.enabled=false", "privacy.user.target_epsilon=null"],
    "without noise": [f"{NOISE}=0"],
    "add up": ["privacy.example.enabled=true", "privacy.example.noise_multiplier=1"],
    r"privacy\.delta": [f"{NOISE}=1", "privacy.delta=1e-4"],
    "none costs most": [f"{NOISE}=1", "sampling.probability=0.5", "rounds=4"],
}


def test_what_can_not_be_accounted_is_refused() -> None:
    other = load_config([f"{NOISE}=4", "sampling.probability=1.0", "rounds=60"])
    for message, words in UNACCOUNTED.items():
        with pytest.raises(ConfigError, match=message):
            cost_of([planned(load_config(words)), planned(other)], TrialCount("poisson", 5))


def test_the_cost_is_the_published_one() -> None:
    words = [f"{NOISE}=1", "sampling.probability=0.01", "rounds=1000", "privacy.delta=1e-6"]
    configs = [load_config([*words, f"training.learning_rate={rate}"]) for rate in (0.1, 0.2)]
    cost = cost_of(list(map(planned, configs)), TrialCount("logarithmic", 10))
    assert (cost.one_trial, cost.selection) == pytest.approx((2.437, 3.851), abs=5e-4)


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("tune") / "out"
    words = ["--trials", "geometric", "--mean", "3", "--output", str(output)]
    assert main([*words, *SMALL, f"{NOISE}=1,2", "privacy.user.clip.norm=0.1,0.5"]) == 0
    return output


def test_as_many_trials_run_as_were_drawn_however_poor_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their number is drawn whatever the data: to run a poor one again would be one more, which is
    not accounted."""
    accuracies, ran = [0.0, 0.9, 0.1, 0.5], list[float]()
    out = tmp_path / "out"

    def simulated(*asked: Any, **how: Any) -> None:
        seen = [path.stat().st_mode & 0o77 for path in (out, out / "tune.json", out / "trials")]
        assert seen == [0, 0, 0]  # other users can't count them
        simulate(*asked, **how)
        ran.append(accuracies[len(ran) % 4])

    monkeypatch.setattr(many_runs, "simulate", simulated)
    monkeypatch.setattr(tuning, "score", lambda _: ran[-1])
    monkeypatch.setattr(TrialCount, "draw", lambda *_: 4)
    assert main(["--output", str(out), *SMALL, f"{NOISE}=1,2"]) == 0
    assert ran == accuracies


def test_only_the_chosen_run_is_left_and_nothing_tells_the_number_of_trials(tuned: Path) -> None:
    assert [path.name for path in tuned.iterdir()] == ["chosen"]
    facts = json.loads((tuned / "chosen" / "selection.json").read_text())
    said = {
        "distribution",
        "mean",
        "delta",
        "epsilon_of_one_trial",
        "epsilon",
        "accountant",
        "covers",
        "not_covered",
    }
    assert {*facts} == said
    assert facts["epsilon"] > facts["epsilon_of_one_trial"] > 0
    assert "trials" not in (tuned / "chosen" / "config.yaml").read_text()


def price(repeated: int | None = None) -> float:
    """Of the choice, from the published numbers' own code path: the ledger plays no part in it.
    `repeated`: the number of the candidate whose only round was charged twice."""
    plans = [planned(load_config([*SMALL, f"{NOISE}={noise}"])) for noise in (1, 2)]
    again = {} if repeated is None else planned_releases(plans[repeated])
    return cost_of(plans, TrialCount("geometric", 3), repeated=again).selection


def test_every_file_of_the_chosen_run_states_the_price_of_the_choice(tuned: Path) -> None:
    chosen = RunFolder(tuned / "chosen")
    privacy = json.loads((chosen.path / "privacy.json").read_text())
    assert privacy["guarantees"][0]["epsilon"] == {"rdp": pytest.approx(price())}
    assert privacy["guarantees"][0]["events"][0]["event"]["kind"] == "repeat_and_select"
    assert [row["epsilon_user"] for row in chosen.read_metrics()] == [pytest.approx(price())]
    assert chosen.read_config().privacy.accountant == "rdp"
    ledger = chosen.ledger(Plan(chosen.read_config()))
    assert ledger.verify() == []
    assert ledger.spent("user").epsilon(privacy["delta"], "rdp") == pytest.approx(price())
    with safe_open(chosen.path / "model.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["selection"])["epsilon"] == pytest.approx(price())


def trials_that_run(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The folders of the trials that run from now on."""
    ran = list[str]()

    def simulated(config: Settings, of: Call, **how: Any) -> None:
        ran.append(Path(str(of.output_dir)).name)
        simulate(config, of, **how)

    monkeypatch.setattr(many_runs, "simulate", simulated)
    return ran


def test_a_tune_that_was_killed_goes_on_with_the_trials_it_had_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "--output",
        str(tmp_path / "out"),
        "--trials",
        "geometric",
        "--mean",
        "3",
        *SMALL,
        f"{NOISE}=1,2",
    ]
    monkeypatch.setattr(TrialCount, "draw", lambda *_: 3)
    # In the second trial its only round is charged, and not done.
    assert crash("before_checkpoint", 2, words, run=main) == -signal.SIGKILL
    trials = tuning.read_tune(tmp_path / "out").trials
    drawn = [trial.folder for trial in trials]
    assert main(words) == 2
    assert "--resume continues it" in capsys.readouterr().err
    monkeypatch.setattr(
        TrialCount, "draw", lambda *_: pytest.fail("the number of trials was drawn again")
    )
    ran = trials_that_run(monkeypatch)
    assert main(["--resume", "--output", str(tmp_path / "out")]) == 0
    assert ran == drawn[1:]  # the first is not run again, the second goes on
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["chosen"]
    last = RunFolder(tmp_path / "out" / "chosen").read_metrics()[-1]
    assert last["epsilon_user"] == pytest.approx(price(repeated=trials[1].candidate))


RATED = [
    f"{NOISE}=4",
    "rounds=6",
    "evaluation.kind=private",
    "evaluation.noise_multiplier=0.6",
    "privacy.user.clip.norm=0.1,0.3",
]
IN_TURNS = [
    f"{NOISE}=1",
    "rounds=16",
    "sampling.kind=cyclic",
    "sampling.groups=8",
    "privacy.user.clip.kind=fixed",
    "privacy.user.clip.norm=30,60",
    "privacy.user.too_noisy=warn",
    "server.learning_rate=1000",  # it diverges, and ends early
]


def fails_at(function: Any, times: int) -> Any:
    """A function that fails so many times, as on a full disk, and works then."""
    left = [times]

    def failing(*args: Any, **named: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError("no space left on device")
        return function(*args, **named)

    return failing


@pytest.mark.parametrize(
    ("words", "where", "function", "failures"),
    [
        ([*RATED, "evaluation.every=6"], RatingPlan, "write", 3),
        (IN_TURNS, CorrelatedNoise, "release", 4),
        ([*RATED, "evaluation.every=2"], RatingPlan, "write", 0),
    ],
)
def test_the_price_is_that_of_what_the_trials_were_charged(
    words: list[str],
    where: type,
    function: str,
    failures: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Repeated ratings cost what ratings cost, and rounds that an early end left out pay for
    none."""
    charged = list[float]()

    def read(trials: Sequence[RunFolder]) -> None:
        spent = (DurableLedger(files.ledger_path).spent("user") for files in trials)
        charged.extend(each.epsilon(1e-3, "rdp") for each in spent)

    monkeypatch.setattr(where, function, fails_at(getattr(where, function), failures))
    monkeypatch.setattr(TrialCount, "draw", lambda *_: 1)
    monkeypatch.setattr(tuning, "require_whole", read)
    out = tmp_path / "out"
    begun = ["--output", str(out), "data.name=digits", "model.name=linear", *words]
    for number in range(failures + 1):
        asked = ["--resume", "--output", str(out)] if number else [*begun, "seed=4"]
        assert main(asked) == (1 if number < failures else 0)
    facts = json.loads((out / "chosen" / "selection.json").read_text())
    assert facts["epsilon_of_one_trial"] >= max(charged) - 1e-9
    before = f"epsilon {facts['epsilon_of_one_trial']:.4g} for one trial, {facts['epsilon']:.4g}"
    assert (before in capsys.readouterr().out) is (not failures)


@pytest.fixture
def people(tmp_path: Path) -> Path:
    config = load_config(SMALL)
    path = tmp_path / "people.db"
    create_account(
        path, Population("people", config.population_size, ADJACENCIES[0], config.privacy.delta)
    )
    return path


def over(people: Path, budget: float) -> list[str]:
    account = [f"privacy.user.account={people}", "sampling.population_name=people"]
    account.append(f"privacy.user.max_epsilon={budget}")
    tried = ["seed=null", f"{NOISE}=2", "training.learning_rate=0.1,0.2"]
    return ["--output", str(people.parent / "out"), *SMALL, *tried, *account]


def test_every_trial_charges_the_account_and_the_chosen_run_does_not_tell_how_many(
    people: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrialCount, "draw", lambda *_: 3)
    assert main(over(people, 50)) == 0
    chosen = people.parent / "out" / "chosen"
    assert DurableLedger(people).total().num_releases == 3 * load_config(SMALL).rounds
    facts = json.loads((chosen / "privacy.json").read_text())
    assert facts["account"] is None
    assert facts["selection"]["epsilon"] == pytest.approx(facts["guarantees"][0]["epsilon"]["rdp"])
    config = replace(RunFolder(chosen).read_config(), rounds=9)
    # It would charge beside what its trial did.
    with pytest.raises(LedgerError, match="lacks the spending of"):
        simulate(config, Call(str(chosen), resume=True))


def test_a_tune_that_the_account_has_no_room_for_spends_nothing(
    people: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(TrialCount, "draw", lambda *_: 40)
    assert main(over(people, 1)) == 2
    assert "no room for all trials" in capsys.readouterr().err
    assert DurableLedger(people).total().num_releases == 0


def test_a_trial_that_the_account_ended_early_is_not_published(
    people: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(TrialCount, "draw", lambda *_: 3)
    # another run takes the room meanwhile
    monkeypatch.setattr(tuning, "require_room", lambda _: None)
    plan = planned(load_config([*SMALL, f"{NOISE}=2"]))
    one = PrivacyLedger(((plan.mechanism.event(1), plan.run.rounds),)).epsilon(1e-3)
    assert main(over(people, one * 1.01)) == 2
    assert "one ended early" in capsys.readouterr().err
    assert not (people.parent / "out" / "chosen").exists()


def test_trials_over_two_accounts_are_refused(people: Path) -> None:
    words = [*SMALL, "seed=null", f"{NOISE}=2", "sampling.population_name=people"]
    configs = [load_config([*words, f"privacy.user.account={people}{more}"]) for more in ("", "2")]
    with pytest.raises(ConfigError, match=r"privacy\.user\.account must be the same"):
        require_room(list(map(planned, configs)))
