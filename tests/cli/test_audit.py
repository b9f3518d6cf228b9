"""`discreet audit`: what it prints and writes, and how it ends."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from discreet.audit.canaries import Claim, Experiment, Observation, Releases
from discreet.cli import audit
from tests.audit.made import gaussian_scores
from tests.command import audit as main

SMALL = (
    "model.name=linear",
    "data.num_clients=600",
    "rounds=1",
    "sampling.kind=everyone",
    "seed=7919",
)


def made(noise: float, rounds: int) -> Experiment:
    """Rounds of a Gaussian mechanism that is claimed to have noise 1."""
    generator, claim = np.random.default_rng(515), Claim(3.139, 1e-3, "add or remove one client")
    names = [*(f"round {number + 1}" for number in range(rounds)), "run"]
    seen = (
        Observation(name, claim, gaussian_scores(generator, canaries=300, noise=noise))
        for name in names
    )
    return Experiment("user level", tuple(seen), {}, Releases(max(1, rounds), 1.0, 1.0, claim))


@pytest.fixture
def audited(monkeypatch: pytest.MonkeyPatch) -> list[Experiment]:
    """What the experiment is to find, one for each call."""
    found: list[Experiment] = []
    monkeypatch.setattr(audit, "experiment_of", lambda config, asked: found.pop())
    return found


def test_a_run_is_audited_from_its_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        *SMALL,
        "privacy.user.noise_multiplier=1",
        "privacy.user.too_noisy=warn",
        "--output",
        str(tmp_path),
    ]
    assert main([*words, "--canaries", "500", "--honest", "0"]) == 0
    printed = capsys.readouterr().out
    assert "not refuted" in printed
    record = json.loads((tmp_path / "audit.json").read_text())
    run = record["observations"][-1]
    assert run["claimed"] == pytest.approx(3.139, abs=1e-3)  # of noise 1 at delta 1e-3
    assert run["interval"][0] < run["claimed"] < run["interval"][1] + 0.3
    assert set(run["bounds"]) <= set(record["assumes"])
    assert record["refuted"] is False
    assert (tmp_path / "audit.svg").exists()


MASKED = (
    "privacy.accountant=rdp",
    "sampling.kind=everyone",
    "data.num_clients=4",
    "model.name=linear",
    "seed=7919",
)
USERS = (
    "privacy.user.aggregation=secure",
    "privacy.user.target_epsilon=16",
    "privacy.user.too_noisy=warn",
    "rounds=1",
)
RATED = ("evaluation.kind=private", "evaluation.noise_multiplier=2", "--of", "evaluation")
STEPS = (
    "privacy.user.enabled=false",
    "privacy.user.target_epsilon=null",
    "training.epochs=1",
    "training.batch_size=400",
    "privacy.example.enabled=true",
    "privacy.example.aggregation=secure",
    "privacy.example.target_epsilon=8",
)
OFF = ("privacy.user.enabled=false", "privacy.user.target_epsilon=null")
LOCAL = (
    *OFF,
    "privacy.local.noise_multiplier=2",
    "privacy.local.kind=laplace",
    "privacy.noise=float",
)
OF_EXAMPLES = (
    *OFF,
    "privacy.example.enabled=true",
    "privacy.example.noise_multiplier=2",
    "data.num_clients=4",
)
LATER = pytest.mark.processes
FITTED = "in nine of ten audits they refute the claim if noise has"


@pytest.mark.parametrize(
    ("words", "mechanism", "said"),
    [
        ((*OF_EXAMPLES, "rounds=1"), "example level", FITTED),
        (LOCAL, "local level", "and as many without show epsilon"),
        ((*RATED, "sampling.kind=everyone"), "private evaluation", FITTED),
        (("--of", "statistics", "statistics.noise_multiplier=1"), "statistics", FITTED),
        ((*MASKED, *USERS), "a masked sum", FITTED),
        # Further masked sums, each a whole audit.
        pytest.param((*MASKED, *USERS, *RATED), "a masked sum of ratings", FITTED, marks=LATER),
        pytest.param(
            (*MASKED, *USERS, *RATED, "evaluation.cohort=same"),
            "a masked sum that also rates the model",
            FITTED,
            marks=LATER,
        ),
        pytest.param((*MASKED, *STEPS), "a step that clients share", FITTED, marks=LATER),
    ],
)
def test_what_is_on_or_asked_for_is_audited_and_it_is_said_first_what_could_be_found(
    words: tuple[str, ...],
    mechanism: str,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(
            [
                "model.name=linear",
                "seed=7919",
                *words,
                "--canaries",
                "200",
                "--output",
                str(tmp_path),
            ]
        )
        == 0
    )
    record = json.loads((tmp_path / "audit.json").read_text())
    assert record["mechanism"] == mechanism
    assert 0 < record["observations"][-1]["claimed"] < float("inf")
    printed = capsys.readouterr().out
    first = " ".join(printed[: printed.index("bound:")].split())
    assert first.startswith("what it could have found: without any noise 200 ")
    assert said in first


def test_a_verdict_that_could_not_have_been_another_is_none(
    audited: list[Experiment], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = made(1.0, 0)
    audited.append(replace(found, releases=replace(found.releases, probability=0.01)))
    main(["--output", str(tmp_path)])
    printed = capsys.readouterr().out
    assert printed.startswith("it could have found nothing")
    assert "without the Gaussian fit), and 3.139 is claimed; the Gaussian fit would find" in printed
    assert "missing noise with no number of them: audit more rounds" in printed
    assert "no verdict: nothing was found" in printed
    assert "not refuted" not in printed


def test_a_refuted_claim_ends_with_code_1_and_many_rounds_are_printed_in_part(
    audited: list[Experiment], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audited += [made(1.0, 14), made(0.5, 2)]
    assert main(["--output", str(tmp_path)]) == 1
    assert "REFUTED (false-alarm rate 0.01): round 1, round 2, run" in capsys.readouterr().out
    assert main(["--output", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "round 10 " in printed
    assert "round 11" not in printed
    assert "4 more rounds" in printed
    assert all(f"bound: {name} assumes" in printed for name in ("one run", "f-DP", "Gaussian fit"))
    assert len(json.loads((tmp_path / "audit.json").read_text())["observations"]) == 15


REFUSED = {
    "--false-alarm 0.2": "--false-alarm must be within",
    "--run no/such/run": "no/such/run",
    "privacy.user.enabled=false": "privacy.user",
}


def test_what_can_not_be_audited_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in REFUSED.items():
        assert main(words.split()) == 2
        refused = capsys.readouterr().err.splitlines()[-1]
        assert refused.startswith("discreet: ")
        assert said in refused
