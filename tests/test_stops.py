"""A command that was killed at any change of a file can be given again, and has forgotten no
spending."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent

from discreet.cli import tune
from discreet.cli.main import main
from discreet.ledger.durable_ledger import Charge, DurableLedger
from discreet.privacy.selection import TrialCount
from discreet.reporting import model_export
from discreet.run_files.compose import load_asked
from discreet.run_files.run_folder import RunFolder
from discreet.server.population_account import ADJACENCIES, Population, create_account
from discreet.simulation.in_process import simulate
from tests.guard.made import site
from tests.stopping import every_stop, in_fork, same_files, visible

ROWS = "id,age\n" + "".join(f"p{number},{20 + number}\n" for number in range(12))
SMALL = ("rounds=2", "data.num_clients=20", "model.name=linear", "privacy.user.too_noisy=warn")
# Without a budget, which a round that is paid twice would exceed.
SMALL += ("privacy.user.noise_multiplier=2",)


def run_into(folder: Path, *words: str) -> int:
    return main(["simulate", *SMALL, *words, f"output_dir={folder}"])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    simulate(*load_asked([*SMALL, f"output_dir={folder}"]))
    return folder


def with_table(place: Path) -> None:
    (place / "table.csv").write_text(ROWS)


def with_ledger(place: Path) -> None:
    ledger = DurableLedger.create(place / "ledger.db")
    ledger.charge([Charge(1, "user", "", GaussianDpEvent(2.0))])


def backed_up(place: Path) -> int:
    return main(["ledger", "backup", str(place / "ledger.db"), str(place / "copy.db")])


def split(place: Path) -> int:
    return main(["data", "split", str(place / "table.csv"), "--owner", "id", "--test", "0.4"])


def split_site(place: Path) -> int:
    words = ["site", "split", str(place / "table.csv"), "--out", str(place / "blocks")]
    return main([*words, "--id", "id", "--blocks", "2"])


def with_site(place: Path) -> None:
    site(place, {f"p{number}": 1.0 for number in range(4)})


def site_backed_up(place: Path) -> int:
    return main(["site", "backup", str(place / "guard.toml"), "--out", str(place / "backup")])


def described(place: Path) -> int:
    return main(["data", "check", str(place / "table.csv"), "--write"])


def made(place: Path) -> int:
    return main(["new", str(place / "project")])


def exported(place: Path) -> int:
    return main(["export", str(place / "run"), str(place / "model")])


def reported(place: Path) -> int:
    words = ["--csv", str(place / "table.csv"), "--pictures", str(place / "pictures")]
    return main(["report", str(place / "run"), *words])


VERBS: dict[str, tuple[Callable[[Path], object], Callable[[Path], int], tuple[str, ...]]] = {
    "ledger backup": (with_ledger, backed_up, ("copy.db",)),
    "data split": (with_table, split, ("test.csv", "train.csv")),
    "site backup": (with_site, site_backed_up, ("backup",)),
    "site split": (with_table, split_site, ("blocks",)),
    "data check": (with_table, described, ("data.toml",)),
    "new": (lambda _: None, made, ("project",)),
}


QUICK = {"ledger backup", "data split", "data check"}


@pytest.mark.parametrize(
    "verb",
    [each if each in QUICK else pytest.param(each, marks=pytest.mark.processes) for each in VERBS],
)
def test_a_verb_that_was_killed_anywhere_leaves_nothing_half_and_can_be_given_again(
    verb: str, tmp_path: Path
) -> None:
    prepare, work, names = VERBS[verb]
    whole = tmp_path / "whole"
    whole.mkdir()
    prepare(whole)
    assert in_fork(partial(work, whole)) == 0
    stops = 0
    for stops, place in every_stop(prepare, work, tmp_path):
        for name in names:
            assert_whole(place / name, whole / name)
        assert in_fork(partial(again, work, place, names)) == 0, f"after stop {stops}"
        assert visible(place) == visible(whole)
    assert stops >= 3


def again(work: Callable[[Path], int], place: Path, names: tuple[str, ...]) -> int:
    """Gives the command again. One that had ended may find its result there."""
    there = all((place / name).exists() for name in names)
    code = work(place)
    return 0 if there else code


def assert_whole(path: Path, whole: Path) -> None:
    """Checks that there is nothing, or all of it: the same names, and no smaller files."""
    if not path.exists():
        return
    assert path.is_dir() == whole.is_dir()
    if path.suffix == ".db":
        assert DurableLedger(path).verify() == []
        return
    for each in whole.rglob("*") if whole.is_dir() else ():
        assert (path / each.relative_to(whole)).exists()
    if path.is_file():
        assert path.stat().st_size == whole.stat().st_size


def test_an_empty_folder_becomes_a_project_and_stays_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = tmp_path / "project"
    here.mkdir()
    number = here.stat().st_ino
    monkeypatch.chdir(here)
    assert main(["new", "."]) == 0
    assert here.stat().st_ino == number
    assert Path("pyproject.toml").is_file()
    assert main(["new", "."]) == 2


@pytest.mark.processes
def test_an_empty_folder_that_was_half_filled_can_be_filled_again(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    assert in_fork(partial(made, whole)) == 0
    for number, place in every_stop(lambda place: (place / "project").mkdir(), made, tmp_path):
        code = in_fork(partial(made, place))
        assert code == 0 or same_files(place / "project", whole / "project"), f"after {number}"
        assert same_files(place / "project", whole / "project")


@pytest.mark.slow
@pytest.mark.parametrize(("work", "name"), [(exported, "model"), (reported, "run")])
def test_what_is_made_of_a_run_is_whole_too(
    work: Callable[[Path], int],
    name: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # what takes long, and writes one file
    monkeypatch.setattr(model_export, "_save_program", lambda _, path: path.write_bytes(b"net"))
    monkeypatch.setattr(model_export, "_run_example", lambda _: "done\n")

    def prepare(place: Path) -> None:
        shutil.copytree(run, place / "run")

    for number, place in every_stop(prepare, work, tmp_path):
        if (place / "model").exists():
            assert (place / "model" / "README.md").read_text().endswith("\n")
        elif name == "model":
            assert in_fork(partial(work, place)) == 0, f"after stop {number}"
        if name == "run":
            assert in_fork(partial(work, place)) == 0, f"after stop {number}"


@pytest.mark.slow
def test_a_run_that_was_killed_anywhere_goes_on_and_has_forgotten_nothing(tmp_path: Path) -> None:
    resumed = 0
    for number, place in every_stop(
        lambda _: None, lambda place: run_into(place / "run"), tmp_path
    ):
        paid = rows_in(place / "run")
        words = ["resume=true"] if (place / "run" / "config.yaml").exists() else []
        resumed += bool(words)
        assert in_fork(partial(run_into, place / "run", *words)) == 0, f"after stop {number}"
        folder = RunFolder(place / "run")
        assert [row["round"] for row in folder.read_metrics()] == [1, 2]
        assert rows_in(place / "run") >= max(paid, 2)  # a charge stays
        assert rows_in(place / "run") <= paid + 2
        assert DurableLedger(folder.ledger_path).verify() == []
    assert resumed > 5


def rows_in(folder: Path, name: str = "ledger.db") -> int:
    path = folder / name
    return DurableLedger(path).position().rows if path.exists() else 0


TRIED = (
    "rounds=1",
    "data.num_clients=20",
    "model.name=logistic_regression",
    "training.epochs=1",
    "sampling.population_name=people",
    "privacy.user.max_epsilon=50",
    "privacy.user.noise_multiplier=2",
    "training.learning_rate=0.1,0.2",
)
TRIALS = 2


def with_people(place: Path) -> None:
    create_account(place / "people.db", Population("people", 20, ADJACENCIES[0], 1e-3))


def tuned(place: Path) -> int:
    output = ["--output", str(place / "out")]
    if (place / "out" / "chosen").exists() or (place / "out" / "tune.json").exists():
        return main(["tune", "--resume", *output])
    return main(["tune", *TRIED, f"privacy.user.account={place / 'people.db'}", *output])


def check_tune(place: Path, number: int) -> None:
    """Gives the tune again; each trial is paid for once, and a round that was lost once more."""
    paid = rows_in(place, "people.db")
    had_chosen = (place / "out" / "chosen").exists()
    assert in_fork(partial(tuned, place)) == 0, f"after stop {number}"
    assert visible(place / "out") == ["chosen"]
    after = rows_in(place, "people.db")
    assert after in (TRIALS, TRIALS + 1)
    assert not had_chosen or after == paid  # nothing is trained beside a chosen run
    assert DurableLedger(place / "people.db").verify() == []
    assert rows_in(place / "out" / "chosen") == 1


@pytest.fixture
def two_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrialCount, "draw", lambda *_: TRIALS)


@pytest.mark.slow
@pytest.mark.usefixtures("two_trials")
def test_a_tune_that_was_killed_while_it_trains_pays_for_no_trial_twice(tmp_path: Path) -> None:
    # Each stop takes two starts of training, so some of them are tried.
    for number, place in every_stop(with_people, tuned, tmp_path, step=11):
        check_tune(place, number)
    assert number > 100


@pytest.mark.slow
@pytest.mark.usefixtures("two_trials")
def test_a_tune_that_was_killed_while_it_chooses_trains_nothing_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = tmp_path / "done"
    done.mkdir()
    with_people(done)

    def interrupted(*_: object) -> str:
        raise SystemExit(3)

    with monkeypatch.context() as patched:
        patched.setattr(tune, "publish_best", interrupted)
        assert in_fork(partial(tuned, done)) == 3
    assert rows_in(done, "people.db") == TRIALS

    def prepare(place: Path) -> None:
        shutil.copytree(done, place, dirs_exist_ok=True)

    for number, place in every_stop(prepare, tuned, tmp_path):
        check_tune(place, number)
        assert rows_in(place, "people.db") == TRIALS
    assert number > 10
