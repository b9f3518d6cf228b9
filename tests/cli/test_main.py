"""The command `discreet`: its verbs, their help, what it takes to start, and the verbs that have no
file of their own."""

from __future__ import annotations

import errno
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from dp_accounting import GaussianDpEvent

from benchmarks import per_example_speed as per_example
from discreet.cli.main import main
from discreet.cli.verbs import VERBS
from discreet.data.description import read_description
from discreet.ledger.durable_ledger import DurableLedger
from discreet.planning.plan import Plan
from discreet.privacy.sampling import CohortSampling
from discreet.run_files.compose import load_asked
from discreet.run_files.model_description import input_names
from discreet.run_files.run_folder import RunFolder, state_of
from discreet.simulation.in_process import simulate
from tests.command import simulate as simulate_command

LOADED = "import sys; from discreet.cli.main import main; main(sys.argv[1:]); print(*sys.modules)"


def test_every_verb_has_a_line_in_the_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert all(f"{name} {verb.line}" in shown for name, verb in VERBS.items())


WRONG = {
    "simulated": "No such command 'simulated'. (Did you mean one of: 'simulate', 'site'?)",
    "ledger shwo run": "Invalid value for 'ACTION:",
    "status": "Missing argument 'RUN'.",
    "calibrate --epsilon 3": "Missing argument 'GUARANTEE:{user|example|local}'. Choose from: user,",
    "status run --jsno": "No such option '--jsno'. Did you mean '--json'?",
    "run --rounds 5": "No such option '--rounds'. A setting has no dashes: write NAME=VALUE",
}


def test_words_that_are_wrong_are_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    for words, said in WRONG.items():
        assert main(words.split()) == 2
        refused = capsys.readouterr().err
        assert refused.startswith(f"discreet: {said}")
        assert refused.count("\n") == 1


@pytest.mark.processes
@pytest.mark.parametrize(
    "words",
    [
        "--help",
        "plan --help",
        "calibrate user --population=200 --cohort=60 --rounds=15 --noise=1",
        "plan",
    ],
)
def test_a_command_whose_output_nobody_reads_ends_without_a_word(words: str) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-m", "discreet", *words.split()]
    ran = subprocess.run(command, stdout=theirs, stderr=subprocess.PIPE, text=True, check=False)
    os.close(theirs)
    assert (ran.returncode, ran.stderr) == (128 + signal.SIGPIPE, "")


def test_a_project_that_does_not_fit_on_a_disk_is_refused_for_the_first_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise shutil.Error([(f"from/{name}", f"to/{name}", f"no room: {name}") for name in "ab"])

    monkeypatch.setattr(shutil, "copytree", full)
    assert main(["new", str(tmp_path / "project")]) == 2
    said = f"discreet: {tmp_path / 'project'} can't be made: no room: a\n"
    assert capsys.readouterr().err == said


@pytest.mark.processes
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_run_whose_output_does_not_fit_on_a_disk_says_so_once_and_goes_on(
    tmp_path: Path,
) -> None:
    small = ("rounds=2", "data.num_clients=20", "privacy.user.too_noisy=warn")
    words = ("simulate", *small, "model.name=logistic_regression", f"output_dir={tmp_path / 'run'}")
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "discreet", *words]
        ran = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    said = "discreet: the output can't be written, and is lost from here on: "
    assert (ran.returncode, ran.stderr) == (1, f"{said}{os.strerror(errno.ENOSPC)}\n")
    assert state_of(RunFolder(tmp_path / "run")) == "finished"


@pytest.mark.processes
@pytest.mark.parametrize("name", ["stdout", "stderr"])
def test_a_command_that_was_started_without_an_output_ends_well(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, name, None)
    assert main(["plan", "rounds=2"]) == 0
    getattr(sys, name).close()


def test_a_question_that_nobody_answers_ends_a_command_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["advise"]) == 2
    assert capsys.readouterr().err.strip().startswith("discreet: ended at a question")


HEAVY = {"torch", "flwr", "sklearn", "dp_accounting", "scipy", "numpy"}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("words", "unneeded"),
    [
        ("--help", {*HEAVY, "hydra"}),
        ("status no/such/run", {*HEAVY, "hydra"}),
        ("simulate training.learnig_rate=1", HEAVY),
        ("simulate --multirun rounds=0,2", HEAVY),
        ("tune rouns=1,2", HEAVY),
        (
            "calibrate user --population 100 --cohort 10 --rounds 1 --noise 1",
            {"torch", "flwr", "sklearn"},
        ),
    ],
)
def test_a_command_starts_without_what_it_does_not_need(words: str, unneeded: set[str]) -> None:
    command = [sys.executable, "-c", LOADED, *words.split()]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert not unneeded & set(ran.stdout.split())


def test_sections_are_written_as_json_and_an_unknown_one_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(per_example, "rows", lambda: [{"what": "something", "ms": 1.5}])
    assert main(["benchmark", "per_example", "--json", str(tmp_path / "out.json")]) == 0
    written = json.loads((tmp_path / "out.json").read_text())
    assert written["per_example"] == [{"what": "something", "ms": 1.5}]
    assert written["machine"]["cores"] >= 1
    assert main(["benchmark", "weather"]) == 2
    assert "no section weather; known are per_example, loop" in capsys.readouterr().err


STATISTICS = [
    "data.name=digits",
    "data.num_clients=30",
    "seed=40931",
    "privacy.user.noise_multiplier=1",
    "statistics.noise_multiplier=0.01",
]


def asked(folder: Path, *more: str) -> tuple[int, dict[str, dict[str, dict[str, float]]]]:
    code = main(["statistics", *STATISTICS, f"output_dir={folder}", *more])
    path = folder / "statistics.json"
    return code, json.loads(path.read_text())["statistics"] if code == 0 else {}


def test_it_prints_each_number_with_its_error_and_charges_the_ledger_of_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = asked(tmp_path / "run")
    assert code == 0
    printed = capsys.readouterr().out
    # Of all pixels of digits, and of the classes, as scikit-learn has them.
    assert found["mean"]["column 1"]["value"] == pytest.approx(0.305, abs=0.01)
    assert found["deviation"]["column 1"]["value"] == pytest.approx(0.376, abs=0.01)
    assert found["share"]["class 3"]["value"] == pytest.approx(0.102, abs=0.01)
    one = found["mean"]["column 1"]
    assert f"{one['value']:.5g}" in printed
    assert f"{one['standard_error']:.2g}" in printed
    assert "the noise protects nobody" in printed
    spent = DurableLedger(tmp_path / "run" / "ledger.db").spent("user")
    assert spent.entries == ((GaussianDpEvent(0.01), 1),)
    said = json.loads((tmp_path / "run" / "statistics.json").read_text())["privacy"]["epsilon"]
    assert said == pytest.approx(spent.epsilon(1e-3))


def test_statistics_of_a_described_table_name_its_columns_and_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [f"{at % 10},{'ab'[at % 2]},{('no', 'yes')[at % 4 == 0]}" for at in range(40)]
    (tmp_path / "t.csv").write_text("\n".join(["age,ward,back", *rows]) + "\n")
    (tmp_path / "data.toml").write_text(
        'format = "csv"\nfile = "t.csv"\ntarget = "back"\nclasses = ["no", "yes"]\n'
        '[columns]\nage = [0, 10]\nward = ["a", "b"]\n'
    )
    words = ["experiment=table", f"data.path={tmp_path}", "data.num_clients=40", "seed=40931"]
    words += ["data.partition=iid", "evaluation.kind=none", "statistics.noise_multiplier=0.01"]
    words += ["privacy.user.noise_multiplier=1"]
    of = "statistics.of=[moments,targets]"
    assert main(["statistics", *words, of, f"output_dir={tmp_path / 'run'}"]) == 0
    assert "age" in capsys.readouterr().out
    found = json.loads((tmp_path / "run" / "statistics.json").read_text())["statistics"]
    inputs = input_names(read_description(tmp_path))
    assert [*found["mean"]] == inputs
    assert found["mean"]["age"]["value"] == pytest.approx(-0.1, abs=0.01)
    assert found["share"]["class yes"]["value"] == pytest.approx(0.25, abs=0.01)


UNANSWERED = {
    "needs privacy.user.enabled=true": ["privacy.user.enabled=false"],
    "privacy.example.enabled=false": [
        "privacy.example.enabled=true",
        "privacy.example.noise_multiplier=1",
    ],
    "needs sampling.kind=poisson or everyone": ["sampling.kind=fixed", "privacy.accountant=rdp"],
    "a larger statistics.noise_multiplier is needed": ["privacy.user.max_epsilon=0.1"],
}


def test_what_it_can_not_do_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, (said, words) in enumerate(UNANSWERED.items()):
        assert asked(tmp_path / str(number), "statistics.noise_multiplier=1", *words)[0] == 2
        error = capsys.readouterr().err
        assert said in error
        assert error.count("\n") == 1


SMALL = ["rounds=1", "data.num_clients=10", "model.name=logistic_regression", "training.epochs=1"]


def sweep(*words: str) -> int:
    return simulate_command(["--multirun", *words])


def test_all_runs_of_a_sweep_are_checked_before_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(f"hydra.sweep.dir={tmp_path}", *SMALL, "model.name=mlp,cnn,lstm") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("discreet: run 3 of 3 (model.name=lstm): model.name: lstm reads text")
    assert not any(tmp_path.iterdir())


def test_a_sweep_goes_on_where_it_was_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn, draw = [0], CohortSampling.draw

    def killed_in_round_4(*given: Any, **more: Any) -> list[int]:
        drawn[0] += 1
        if drawn[0] == 4:
            raise KeyboardInterrupt
        return draw(*given, **more)

    there = f"hydra.sweep.dir={tmp_path / 'a sweep'}"
    monkeypatch.setattr(CohortSampling, "draw", killed_in_round_4)
    assert (
        sweep(there, *SMALL, "rounds=2", "seed=5501", "privacy.user.noise_multiplier=1,2,4") == 130
    )
    before = [RunFolder(tmp_path / "a sweep" / name).metrics_path for name in "01"]
    lines = [path.read_text().splitlines() for path in before]
    assert list(map(len, lines)) == [3, 2]
    sweep("resume=true", there)
    printed = capsys.readouterr().out
    assert "run 1 of 3 (privacy.user.noise_multiplier=1) has ended already" in printed
    assert "run 3 of 3 (privacy.user.noise_multiplier=4)" in printed
    assert [path.read_text().splitlines()[:2] for path in before] == [each[:2] for each in lines]
    folders = [RunFolder(tmp_path / "a sweep" / name) for name in "012"]
    assert [len(folder.read_metrics()) for folder in folders] == [2, 2, 2]
    assert [len(folder.ledger(Plan(folder.read_config())).releases()) for folder in folders] == [
        2,
        2,
        2,
    ]


@pytest.mark.parametrize(
    ("words", "sizes"),
    [(["sampling.kind=fixed", "privacy.accountant=rdp"], {5}), (["sampling.kind=everyone"], {10})],
)
def test_each_way_of_sampling_draws_the_cohort_that_is_accounted(
    words: list[str], sizes: set[int], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    noise = ["privacy.user.noise_multiplier=2", "sampling.probability=0.5", "rounds=3", "seed=5501"]
    simulate(*load_asked([*SMALL, *noise, *words, f"output_dir={folder}"]))
    rows = RunFolder(folder).read_metrics()
    assert {row["cohort"] for row in rows} == sizes
    event = RunFolder(folder).ledger(Plan(RunFolder(folder).read_config())).releases()[0].event
    assert ("sampled_without_replacement" in event) == ("sampling.kind=fixed" in words)
    assert "poisson" not in event
