"""The page "Three hospitals": its commands, in order, on tables that are written differently."""

from __future__ import annotations

from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path

import numpy as np
import pytest

from discreet.cli.main import main
from discreet.data.description import read_description
from discreet.data.site_agreement import agreed_of
from discreet.deployment.local_federation import main as federation
from discreet.run_files.run_folder import RunFolder
from tests.tables.made_tables import write_hospital
from tests.test_docs import commands

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = ROOT / "docs" / "guide" / "sites.md"
COLUMNS = """\
age = [0, 110]
sex = ["F", "M"]
dose = [0, 10]
"""


def rows(seed: int, people: int) -> list[tuple[str, int, str, int, str]]:
    """Two visits of each person."""
    draw = np.random.default_rng(seed)
    found = []
    for number in range(2 * people):
        age = int(draw.integers(20, 90))
        returned = "yes" if age + 10 * draw.standard_normal() > 55 else "no"
        who = f"{seed}-{number // 2}"
        found.append((who, age, "FM"[number % 2], int(draw.integers(10)), returned))
    return found


@pytest.fixture
def hospitals(tmp_path: Path) -> Path:
    tables = {}
    for name, seed in (("train", 40829), ("test", 40841)):
        cells = [",".join(map(str, row)) for row in rows(seed, 60)]
        tables[name] = ["pid,age,sex,dose,returned", *cells]
    write_hospital(tmp_path / "north", COLUMNS, tables)
    south = tmp_path / "south"
    south.mkdir()
    words = {"F": "w", "M": "m"}
    lines = ["returned;dose;Geschlecht;Patient;age"]
    for who, age, sex, dose, returned in rows(40847, 40):
        lines.append(f"{returned};{dose}000;{words[sex]};{who};{age}")
    (south / "train.csv").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_each_command_of_the_page_runs_in_order(hospitals: Path) -> None:
    asked = commands(PAGE)
    assert [words[1] for words in asked] == ["data", "data", "data", "simulate"]
    with chdir(hospitals):
        for words in asked:
            printed = StringIO()
            if ">" in words:
                target = words[words.index(">") + 1]
                words = words[: words.index(">")]
            else:
                target = ""
            more = ["rounds=2"] if words[1] == "simulate" else []
            with redirect_stdout(printed):
                assert main([*words[1:], *more]) == 0, printed.getvalue()
            if target:
                Path(target).write_text(printed.getvalue())
    one, two = (agreed_of(read_description(hospitals / name)) for name in ("north", "south"))
    assert one == two


def test_a_description_that_is_there_is_not_overwritten(
    hospitals: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = hospitals / "shared.toml"
    with redirect_stdout(StringIO()) as printed:
        assert main(["data", "share", str(hospitals / "north" / "train.csv")]) == 0
    shared.write_text(printed.getvalue())
    adopt(hospitals / "south", shared)
    before = (hospitals / "south" / "data.toml").read_text()
    (hospitals / "south" / "data.toml").write_text(before + "# by hand\n")
    table = str(hospitals / "south" / "train.csv")
    asked = ["data", "adopt", str(shared), "--table", table, "--write", *ADOPTED["south"].split()]
    assert main(asked) == 2
    assert "is there already" in capsys.readouterr().err
    assert (hospitals / "south" / "data.toml").read_text().endswith("# by hand\n")


def east_table(folder: Path) -> None:
    """A third hospital's table: other names, other words for classes too, and another order."""
    words = {"F": "f", "M": "h"}
    answers = {"yes": "oui", "no": "non"}
    lines = ["jours,dose,revenu,personne,sexe"]
    for who, age, sex, dose, returned in rows(40849, 50):
        lines.append(f"{age},{dose},{answers[returned]},{who},{words[sex]}")
    (folder / "train.csv").write_text("\n".join(lines) + "\n")


ADOPTED = {
    "south": "--owner Patient --named sex=Geschlecht --words sex:w=F --words sex:m=M "
    "--factor dose=0.001",
    "east": "--owner personne --named age=jours --named sex=sexe --named returned=revenu "
    "--words sex:f=F --words sex:h=M --words returned:oui=yes --words returned:non=no",
}


def adopt(folder: Path, shared: Path) -> None:
    table = str(folder / "train.csv")
    asked = ["data", "adopt", str(shared), "--table", table, "--write"]
    assert main([*asked, *ADOPTED[folder.name].split()]) == 0


def federated(nodes: Path, experiment: str, *asked: str) -> list[dict[str, float | None]]:
    """The rounds of a federation of these nodes, beside whose folder the public one is."""
    run = RunFolder(nodes.parent / experiment)
    words = [f"experiment={experiment}", f"data.path={nodes.parent / 'north'}", *asked]
    epsilon = "privacy.example.target_epsilon=200"  # so little noise that no chance decides
    common = ["privacy.delta=1e-3", epsilon, f"output_dir={run.path}"]
    assert federation(["--data", str(nodes), *words, *common]) == 0
    return run.read_metrics()


@pytest.mark.processes
def test_three_hospitals_as_processes_train_on_tables_that_are_written_differently(
    hospitals: Path,
) -> None:
    nodes = hospitals / "nodes"
    nodes.mkdir()
    shared = hospitals / "shared.toml"
    with redirect_stdout(StringIO()) as printed:
        assert main(["data", "share", str(hospitals / "north" / "train.csv")]) == 0
    shared.write_text(printed.getvalue())
    public = hospitals / "north"
    for name in ("north", "south", "east"):
        (nodes / name).mkdir()
    (nodes / "north" / "train.csv").write_text((public / "train.csv").read_text())
    own = (public / "data.toml").read_text().replace('test = "test.csv"\n', "")
    (nodes / "north" / "data.toml").write_text(own)
    (nodes / "south" / "train.csv").write_text((hospitals / "south" / "train.csv").read_text())
    east_table(nodes / "east")
    for name in ADOPTED:
        adopt(nodes / name, shared)
    # The server's own folder holds nobody's data: what is public of the table, and the test set.
    (public / "train.csv").write_text((public / "test.csv").read_text().replace("40841-", "t-"))

    rounds = federated(nodes, "hospitals_secure", "rounds=3", "training.batch_size=80")
    assert [row["replies"] for row in rounds] == [3] * 3
    assert float(rounds[-1]["accuracy"] or 0) > 0.75
    (once,) = federated(nodes, "hospitals_once")
    assert once["replies"] == 3
    assert float(once["accuracy"] or 0) > 0.75
