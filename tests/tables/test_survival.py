"""Survival: a time and an event become intervals of a public grid, and a run learns hazards."""

from __future__ import annotations

import csv
import json
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from discreet import ConfigError, simulate
from discreet.cli.main import main
from discreet.data.folder import load_folder
from discreet.data.targets import SURVIVAL, FolderError
from discreet.per_example.objective import PADDING
from discreet.queries.survival import concordance, hazard_loss, risk_of, survived
from discreet.run_files.run_folder import RunFolder

TIMES = (180, 365, 730, 1460, 2190)
TOML = f"""\
format = "csv"
file = "train.csv"
test = "test.csv"
owner = "pid"
target = "days"
event = "died"
classes = ["no", "yes"]
times = {list(TIMES)}
[columns]
age = [30, 90]
lab = [0, 10]
"""


def table(patients: int, seed: int) -> str:
    """Patients whose hazard grows with age and a laboratory value, many of them censored."""
    draw = np.random.default_rng(seed)
    lines = ["pid,age,lab,days,died"]
    for number in range(patients):
        age, lab = draw.uniform(30, 90), draw.uniform(0, 10)
        event = draw.exponential(np.exp(7.4 - 0.06 * (age - 60) - 0.3 * (lab - 5)))
        end = draw.uniform(200, 3000)
        seen = "yes" if event <= end else "no"
        lines.append(f"{seed}-{number},{age:.1f},{lab:.2f},{min(event, end):.1f},{seen}")
    return "\n".join(lines) + "\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "data"
    made.mkdir()
    (made / "train.csv").write_text(table(400, 40897))
    (made / "test.csv").write_text(table(300, 40903))
    (made / "data.toml").write_text(TOML)
    return made


ROWS: dict[tuple[str, str], list[int | None]] = {
    ("0", "yes"): [1, None, None, None, None],
    ("180", "yes"): [1, None, None, None, None],
    ("181", "yes"): [0, 1, None, None, None],
    ("180", "no"): [0, None, None, None, None],
    ("179", "no"): [None, None, None, None, None],
    ("2000", "yes"): [0, 0, 0, 0, 1],
    ("9000", "yes"): [0, 0, 0, 0, 0],
    ("9000", "no"): [0, 0, 0, 0, 0],
}


def test_a_censored_row_gives_its_intervals_until_then(folder: Path) -> None:
    lines = ["pid,age,lab,days,died"]
    lines += [f"{number},50,5,{time},{seen}" for number, (time, seen) in enumerate(ROWS)]
    (folder / "train.csv").write_text("\n".join(lines) + "\n")
    task = load_folder(str(folder))
    assert task.shape.target.kind == SURVIVAL
    assert task.shape.output_shape == (len(TIMES),)
    wanted = [[PADDING if part is None else part for part in row] for row in ROWS.values()]
    assert task.train.targets.tolist() == wanted


WRONG = {
    "-1,yes": "the time is missing, negative or not finite",
    "5,perhaps": "died is not one of classes",
    ",yes": "days is empty",
}


@pytest.mark.parametrize(("cells", "message"), WRONG.items())
def test_a_time_or_event_that_is_none_is_named_with_its_line(
    folder: Path, cells: str, message: str
) -> None:
    (folder / "train.csv").write_text(f"pid,age,lab,days,died\na,50,5,9,no\nb,50,5,{cells}\n")
    with pytest.raises(FolderError, match=message) as error:
        load_folder(str(folder))
    assert "line 3" in str(error.value)


def test_words_of_an_event_without_classes_are_asked_for_in_their_order(folder: Path) -> None:
    (folder / "data.toml").write_text(TOML.replace('classes = ["no", "yes"]', ""))
    with pytest.raises(FolderError, match=r'event second, such as classes = \["no", "yes"\]'):
        load_folder(str(folder))


WORDS = {
    "yes": 'classes = ["no", "yes"]',
    "no": 'classes = ["yes", "no"]',
    # a site that writes the shared words the other way round
    "no as yes": 'classes = ["no", "yes"]\nclass_words = { no = "yes", yes = "no" }',
}


@pytest.mark.parametrize(("event", "lines"), WORDS.items())
def test_check_says_which_word_is_the_event_and_in_how_many_rows(
    event: str, lines: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "data.toml").write_text(TOML.replace('classes = ["no", "yes"]', lines))
    event = event.split()[0]
    count = (folder / "train.csv").read_text().count(f",{event}\n")
    assert main(["data", "check", str(folder / "train.csv")]) == 0
    assert f"event: died = {event} in {count} of 400 rows" in capsys.readouterr().out


def test_an_event_of_numbers_is_counted_too(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "data.toml").write_text(TOML.replace('classes = ["no", "yes"]', ""))
    (folder / "test.csv").write_text("pid,age,lab,days,died\nt,50,5,9,0\n")
    (folder / "train.csv").write_text("pid,age,lab,days,died\na,50,5,9,1\nb,50,5,9,0\n")
    assert main(["data", "check", str(folder / "train.csv")]) == 0
    assert "event: died = 1 in 1 of 2 rows" in capsys.readouterr().out


def test_check_proposes_an_event_with_its_word_second_and_hints_at_an_unnamed_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "data.toml").unlink()
    for name in ("train.csv", "test.csv"):
        words = (folder / name).read_text().replace(",yes", ",ja").replace(",no", ",nein")
        (folder / name).write_text(words)
    check = ["data", "check", str(folder / "train.csv"), "--owner", "pid", "--target", "days"]
    assert main([*check, "--write"]) == 0
    assert "--target days --event died" in capsys.readouterr().out
    path = folder / "data.toml"
    path.write_text(re.sub("(?m)^unconfirmed.*$", "", path.read_text()))
    assert main(check[:3]) == 0
    assert "--target days --event died" in capsys.readouterr().out
    path.unlink()

    assert main([*check, "--event", "died", "--write"]) == 0
    text = path.read_text()
    described = tomllib.loads(text)
    assert described["classes"] == ["nein", "ja"]
    assert {*described["columns"]} == {"age", "lab"}
    path.write_text(re.sub("(?m)^unconfirmed.*$", "", text))
    assert load_folder(str(folder)).shape.target.kind == SURVIVAL


@pytest.mark.parametrize(
    ("old", "new", "missing"),
    [
        ('event = "died"', 'event = "dead"', "column dead;"),
        ('target = "days"', 'target = "tage"', "column tage;"),
        ('owner = "pid"', 'owner = "who"', "column who;"),
        ("age = [30, 90]", "old = [30, 90]", "column old;"),
    ],
)
def test_a_column_that_there_is_not_is_named_by_check_with_those_that_there_are(
    old: str, new: str, missing: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "data.toml").write_text(TOML.replace(old, new))
    assert main(["data", "check", str(folder / "train.csv")]) == 2
    said = capsys.readouterr().err
    assert f"has no {missing} there are pid, age, lab, days, died" in said
    with pytest.raises(FolderError, match=f"has no column or array {missing[7:-1]}$"):
        load_folder(str(folder))


def test_negative_times_are_counted_by_check_with_their_column(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ["pid,age,lab,days,died", "a,50,5,-9,no", "b,50,5,9,yes", "c,50,5,-1,no"]
    (folder / "train.csv").write_text("\n".join(lines) + "\n")
    assert main(["data", "check", str(folder / "train.csv")]) == 2
    assert "days is below 0 in 2 of 3 rows, first in line 2" in capsys.readouterr().out


EVENTS = {
    ("--event", "died"): "--event needs --target",
    ("--event", "dead", "--target", "days"): "no column dead",
    ("--event", "lab", "--target", "days"): "lab says",
    ("--event", "died", "--target", "died"): "--target and --event are both died",
    ("--owner", "pid", "--target", "pid"): "--target and --owner are both pid",
    ("--event", "died", "--target", "pid"): "pid must be the time until died",
}


@pytest.mark.parametrize(("words", "message"), EVENTS.items())
def test_an_event_that_is_none_is_refused_by_check(
    words: tuple[str, ...], message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "data.toml").unlink()
    assert main(["data", "check", str(folder / "train.csv"), *words]) == 2
    assert message in capsys.readouterr().err


RULES = {
    "times = [180, 90]": "times must be the ends of the intervals",
    "times = [0, 90]": "times must be the ends of the intervals",
    "": "event and times must be given together, and not empty",
    "times = []": "event and times must be given together, and not empty",
    'times = [9]\nclass_words = { ja = "maybe" }': "class_words must map words to classes",
    "times = 30": r"times must be a list, such as times = \[30\]",
    'times = [9]\ntest_target = "x"': "times can't be combined with test_target",
}


@pytest.mark.parametrize(("line", "message"), RULES.items())
def test_a_grid_that_is_none_is_refused(folder: Path, line: str, message: str) -> None:
    (folder / "data.toml").write_text(TOML.replace(f"times = {list(TIMES)}", line))
    with pytest.raises(FolderError, match=message):
        load_folder(str(folder))


def test_the_loss_is_the_likelihood_of_what_was_seen() -> None:
    outputs = torch.tensor([[-1.0, 0.5, 2.0], [0.3, -0.2, 1.0]], dtype=torch.float64)
    targets = torch.tensor([[0.0, 1.0, PADDING], [0.0, 0.0, PADDING]])
    chances = survived(outputs)
    seen = torch.stack([chances[0, 0] - chances[0, 1], chances[1, 1]])
    assert hazard_loss(outputs, targets).tolist() == pytest.approx((-seen.log()).tolist())


def test_concordance_counts_every_pair_whose_order_is_known() -> None:
    draw = torch.Generator().manual_seed(40927)
    events = torch.randint(0, 4, (60,), generator=draw)
    seen = torch.rand(60, generator=draw) < 0.6
    targets = torch.full((60, 3), float(PADDING))
    for row, (event, known) in enumerate(zip(events.tolist(), seen.tolist(), strict=True)):
        targets[row, :event] = 0
        if known and event < 3:
            targets[row, event] = 1
    risk = torch.randint(0, 9, (60,), generator=draw).numpy()
    won = pairs = 0.0
    for one in range(60):
        for other in range(60):
            if (targets[one] == 1).any() and events[one] < events[other]:
                pairs += 1
                won += (risk[one] > risk[other]) + 0.5 * (risk[one] == risk[other])
    assert concordance(risk, targets) == pytest.approx(won / pairs)


@pytest.mark.usefixtures("example_here")
def test_a_run_learns_hazards_and_its_model_is_predicted_with_and_exported(
    folder: Path, tmp_path: Path
) -> None:
    run = simulate(
        "experiment=table",
        f"data.path={folder}",
        "data.num_clients=400",
        "rounds=30",
        "seed=40933",
        "privacy.user.target_epsilon=20",
        f"output_dir={tmp_path / 'run'}",
    )
    last = RunFolder(run).read_metrics()[-1]
    assert float(last["concordance"] or 0) > 0.75
    low, high = json.loads((run / "score_intervals.json").read_text())["concordance"][1:]
    assert low < float(last["concordance"] or 0) < high

    assert main(["predict", str(run)]) == 0
    with (run / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    chances = torch.tensor([[float(row[f"survival_{time}"]) for time in TIMES] for row in rows])
    assert bool((chances.diff(dim=1) <= 0).all())
    test = load_folder(str(folder)).test
    assert concordance(risk_of(chances), test.targets) == pytest.approx(
        float(last["concordance"] or 0), abs=1e-3
    )

    assert main(["export", str(run), str(tmp_path / "exported")]) == 0
    card = (tmp_path / "exported" / "README.md").read_text()
    assert "`days`, the time until `died`, on the grid 180, 365, 730, 1460, 2190" in card
    assert "log odds of the event by 365, if not before" in card


def test_clients_rate_hazards_by_their_loss_alone(folder: Path) -> None:
    private = (f"data.path={folder}", "data.num_clients=400", "evaluation.kind=private")
    with pytest.raises(ConfigError, match="different names of loss"):
        simulate("experiment=table", *private, "rounds=1")
