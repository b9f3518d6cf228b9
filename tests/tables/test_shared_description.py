"""Sites that write one table in their own way share one description, and a node with another one
refuses a run."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict

from discreet import check_table, table_digests
from discreet.data.csv_table import CsvTable
from discreet.data.description import read_description
from discreet.data.folder import load_folder
from discreet.data.site_agreement import agreed_of, difference
from discreet.data.targets import FolderError
from discreet.ledger.durable_ledger import DurableLedger
from discreet.node.account import Refused
from discreet.node.nodes import node_client
from discreet.run_files.run_folder import RunFolder
from discreet.server.resolve import resolve
from discreet.tables.shared_description import Writing, adopted_text, read_shared, shared_text
from tests.command import data
from tests.flower.flower_apps import Nodes, arrays, changed_by, strategy
from tests.node.clients import config, received, request

DESCRIPTION = """\
format = "csv"
file = "train.csv"
target = "y"
owner = "pid"
classes = ["no", "yes"]
[columns]
age = [0, 110]
sex = ["F", "M"]
dose = { kind = "number", low = 0, high = 10, curves = 2 }
[[pairs]]
columns = ["age", "sex"]
"""
CODES = ("I21.4", "D50", "e11", "J45", "C50.1", "K35", "N18")
HERE = Writing(
    {"dose": "Dosis", "sex": "Geschlecht", "y": "wieder da"},
    {"sex": {"w": "F", "m": "M"}, "y": {"ja": "yes", "nein": "no"}},
    {"dose": 0.001},
)


@pytest.fixture
def sites(tmp_path: Path) -> tuple[Path, Path]:
    """Two sites with the same patients: the second writes them in its own way."""
    draw = np.random.default_rng(40627)
    rows = [
        (f"P{n}", draw.integers(20, 90), "FM"[n % 2], n % 10, ("no", "yes")[n % 3 == 0])
        for n in range(40)
    ]
    one, two = (tmp_path / name for name in ("one", "two"))
    for folder in (one, two):
        folder.mkdir()
    table = ["pid,age,sex,dose,y", *(",".join(map(str, row)) for row in rows)]
    (one / "train.csv").write_text("\n".join(table) + "\n")
    (one / "data.toml").write_text(DESCRIPTION)
    words = {"F": "w", "M": "m", "yes": "ja", "no": "nein"}
    other = ["wieder da;Dosis;pid;Geschlecht;age"]
    other += [f"{words[y]};{dose}000,0;{who};{words[sex]};{age}" for who, age, sex, dose, y in rows]
    (two / "train.csv").write_text("\n".join(other) + "\n")
    return one, two


def adopted(one: Path, two: Path, writing: Writing = HERE) -> Path:
    shared = one.parent / "shared.toml"
    shared.write_text(shared_text(read_description(one)))
    table = CsvTable(two / "train.csv")
    text = adopted_text(read_shared(shared), table, owner="pid", writing=writing)
    (two / "data.toml").write_text(text)
    return two


def test_a_site_with_names_words_order_and_units_of_its_own_reads_the_same_numbers(
    sites: tuple[Path, Path],
) -> None:
    one, two = sites
    tasks = [load_folder(str(folder)) for folder in (one, adopted(one, two))]
    assert tasks[0].train.inputs.numpy() == pytest.approx(tasks[1].train.inputs.numpy())
    assert tasks[0].train.targets.equal(tasks[1].train.targets)
    assert agreed_of(read_description(one)) == agreed_of(read_description(two))


def test_an_app_of_ones_own_passes_the_digests_and_its_clients_check_them(
    sites: tuple[Path, Path], tmp_path: Path
) -> None:
    one, two = sites
    swapped = tmp_path / "swapped"
    swapped.mkdir()
    (swapped / "train.csv").write_text((one / "train.csv").read_text())
    told = (one / "data.toml").read_text()
    (swapped / "data.toml").write_text(told.replace('["no", "yes"]', '["yes", "no"]'))
    assert (swapped / "data.toml").read_text() != told
    folders = {1: one, 2: adopted(one, two), 3: swapped}
    said: list[str] = []

    def client(message: Message) -> RecordDict | Error:
        asked = message.content["config"]
        assert isinstance(asked, ConfigRecord)
        try:
            check_table(asked["table"], folders[message.metadata.dst_node_id])
        except FolderError as error:
            said.append(str(error))
            return Error(1, str(error))
        return changed_by(0.01)(message)  # type: ignore[return-value]

    config = ConfigRecord({"table": table_digests(one)})
    everybody = {"population_size": 3, "fraction_train": 1.0, "sampling": "everyone"}
    strategy(tmp_path / "run", **everybody).start(
        Nodes(dict.fromkeys(folders, client)), arrays(), num_rounds=1, train_config=config
    )
    (row,) = RunFolder(tmp_path / "run").read_metrics()
    assert row["replies"] == 2
    (refusal,) = said
    assert "target is described otherwise" in refusal


def test_what_is_shared_names_no_file_and_no_owner(sites: tuple[Path, Path]) -> None:
    text = shared_text(read_description(sites[0]))
    assert "train.csv" not in text
    assert "pid" not in text


def test_all_that_does_not_fit_is_said_at_once(sites: tuple[Path, Path]) -> None:
    one, two = sites
    with pytest.raises(FolderError) as wrong:
        adopted(one, two, Writing({"dosse": "Dosis"}, {}, {"sex": 2.0}))
    said = str(wrong.value).splitlines()[1:]
    wanted = (
        "no column sex",
        "no column dose",
        "no column y",
        "did you mean dose",
        "sex is no num",
    )
    assert len(said) == len(wanted)
    for line, words in zip(said, wanted, strict=True):
        assert words in line
    with pytest.raises(FolderError) as wrong:
        adopted(one, two, Writing(HERE.named, {}, {}))
    assert "sex has m, w, and its levels are F, M" in str(wrong.value)
    assert "y has ja, nein, and its levels are no, yes" in str(wrong.value)


OTHERS = {
    "another order": (
        'age = [0, 110]\nsex = ["F", "M"]\n',
        'sex = ["F", "M"]\nage = [0, 110]\n',
        "input 1 of the run is age, and here it is sex",
    ),
    "levels": ('["F", "M"]', '["M", "F"]', "sex is described otherwise"),
    "range": ("[0, 110]", "[0, 1000]", "age is described otherwise"),
    "classes": ('["no", "yes"]', '["yes", "no"]', "the target is described otherwise"),
    "curves": ("curves = 2", "curves = 3", "dose is described otherwise"),
    "a column less": (
        'dose = { kind = "number", low = 0, high = 10, curves = 2 }\n',
        "",
        "dose is missing here",
    ),
    "a column more": (
        "[[pairs]]",
        'more = { kind = "number", low = 0, high = 9, named = "dose" }\n[[pairs]]',
        "[[pairs]]",
    ),
    "no pair": ('[[pairs]]\ncolumns = ["age", "sex"]\n', "", "[[pairs]] is missing here"),
}


def asked_of(folder: Path, server: Path, ledger: Path) -> object:
    """What a node with this folder does with the first request of a run of the server's."""
    words = (
        "data.name=folder",
        f"data.path={server}",
        "data.num_clients=40",
        "data.partition=natural",
        "model.name=linear",
        "rounds=2",
        "evaluation.kind=none",
        "privacy.user.enabled=false",
        "privacy.example.enabled=true",
        "privacy.example.noise_multiplier=3",
        "privacy.delta=1e-3",
    )
    plan, _ = resolve(config(*words))
    asked = request(config(*words))

    node = {"data": str(folder), "ledger": str(ledger)}
    return node_client(received(replace(asked, run=plan.run), node), node)


@pytest.mark.parametrize(("old", "new", "said"), OTHERS.values(), ids=OTHERS.keys())
def test_a_node_that_describes_its_table_otherwise_refuses_before_a_charge(
    old: str, new: str, said: str, sites: tuple[Path, Path], tmp_path: Path
) -> None:
    server = sites[0]
    node = tmp_path / "node"
    shutil.copytree(server, node)
    assert old in DESCRIPTION
    (node / "data.toml").write_text(DESCRIPTION.replace(old, new))
    DurableLedger.create(tmp_path / "node.db")
    with pytest.raises(Refused, match="describes its table otherwise") as refused:
        asked_of(node, server, tmp_path / "node.db")
    assert said in str(refused.value)
    assert DurableLedger(tmp_path / "node.db").spent("example").num_releases == 0


def test_a_node_that_has_adopted_the_description_takes_part(
    sites: tuple[Path, Path], tmp_path: Path
) -> None:
    DurableLedger.create(tmp_path / "node.db")
    assert asked_of(adopted(*sites), sites[0], tmp_path / "node.db")


def test_differences_are_named_at_the_first_of_the_runs_columns() -> None:
    assert difference(["a 1", "b 2"], ["a 1", "b 2"]) == ""
    assert difference(["a 1", "c 2", "b 2"], ["a 1", "b 2"]).startswith("input 2 of the run is b")


def test_the_commands_share_and_adopt(
    sites: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = sites
    assert data(["share", str(one / "train.csv")]) == 0
    shared = one / "shared.toml"
    shared.write_text(capsys.readouterr().out)
    words = ["--table", str(two / "train.csv"), "--owner", "pid", "--write"]
    for name, column in HERE.named.items():
        words += ["--named", f"{name}={column}"]
    for name, levels in HERE.words.items():
        for word, level in levels.items():
            words += ["--words", f"{name}:{word}={level}"]
    assert data(["adopt", str(shared), *words, "--factor", "dose=0.001"]) == 0
    assert data(["check", str(two / "train.csv")]) == 0
    assert data(["adopt", str(shared), *words, "--factor", "dose=a lot"]) == 2
    assert "--factor takes NAME=NUMBER" in capsys.readouterr().err


MISTAKES = {
    "--named dose=age": "its column age can't be age and dose",
    "--named dose=y": "its column y can't be dose and y",
    "--owner dose": "its column dose can't be dose and the owner",
    "--named dose=age --named dose=y": "dose is given twice, as age and as y",
    "--factor dose=inf": "factor must be within (0, 1e+30] (got inf)",
    "--words y:ja=maybe": "--words y:ja=maybe: the shared words of y are no, yes.",
    "--words sex:w=F --words sex:M=m": "--words sex:M=m: the shared words of sex are F, M.",
    "--words sex:F=M": "--words sex:WORD=LEVEL",
}


@pytest.mark.parametrize(("words", "said"), MISTAKES.items())
def test_a_mapping_that_no_run_could_read_is_not_written(
    words: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = tmp_path / "shared.toml"
    shared.write_text(
        'target = "y"\nclasses = ["no", "yes"]\n[columns]\nage = [0, 110]\ndose = [0, 10]\n'
        'sex = ["F", "M"]\n'
    )
    table = tmp_path / "train.csv"
    table.write_text("pid,age,dose,y,sex\n" + "A,40,3,yes,F\n" * 4)
    asked = ["adopt", str(shared), "--table", str(table), "--write", *words.split()]
    assert data(asked) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "data.toml").exists()


def test_codes_that_fold_are_shared_and_adopted(tmp_path: Path) -> None:
    (tmp_path / "data.toml").write_text(
        'format = "csv"\nfile = "train.csv"\ntarget = "y"\nclasses = ["no", "yes"]\n'
        '[columns]\nicd = { kind = "category", fold = "icd10" }\n'
    )
    rows = [f"{code},{('no', 'yes')[at % 2]}" for at, code in enumerate(CODES)]
    (tmp_path / "train.csv").write_text("\n".join(["icd,y", *rows]) + "\n")
    shared = tmp_path / "shared.toml"
    shared.write_text(shared_text(read_description(tmp_path)))
    nothing = Writing({}, {}, {})
    table = tmp_path / "train.csv"
    text = adopted_text(read_shared(shared), CsvTable(table), owner=None, writing=nothing)
    assert 'fold = "icd10"' in text
    table.write_text("\n".join(["icd,y", *rows, "measles,no"]) + "\n")
    with pytest.raises(FolderError, match="icd has measles, and its levels are A00-B99"):
        adopted_text(read_shared(shared), CsvTable(table), owner=None, writing=nothing)


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ('age = { kind = "number", low = 0, high = 9, unit = "mg" }', "age has unit, which each"),
        ('"a\\u001bge\\nfine" = [0, 9]', r"can't be printed: 'a\x1bge\nfine'"),
    ],
)
def test_a_shared_file_says_nothing_for_a_site_and_forges_no_line(
    column: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "shared.toml"
    path.write_text(f'target = "y"\nclasses = ["no", "yes"]\n[columns]\n{column}\n')
    with pytest.raises(FolderError, match=re.escape(said)):
        read_shared(path)


@pytest.mark.parametrize(
    ("head", "said", "words"),
    [
        (
            'target = "t"\nevent = "e"\ntimes = [2, 4, 8]\nclasses = ["no", "yes"]\n',
            "write --named t=COLUMN",
            ["--named", "t=days"],
        ),
        (
            'targets = ["days", "more"]\ntarget_low = 0\ntarget_high = 9\n',
            "days is one of several targets",
            [],
        ),
    ],
)
def test_all_columns_of_a_target_are_shared_and_adopted(
    head: str,
    said: str,
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    one = tmp_path / "one"
    other = tmp_path / "other"
    toml = f'format = "csv"\nfile = "train.csv"\n{head}[columns]\nage = [0, 110]\n'
    for folder, names in ((one, "age,t,e,more"), (other, "age,days,e,more")):
        folder.mkdir()
        rows = [f"{20 + at},{1 + at % 9},{('no', 'yes')[at % 2]},{at % 9}" for at in range(9)]
        (folder / "train.csv").write_text("\n".join([names, *rows]) + "\n")
    (one / "data.toml").write_text(toml)
    assert data(["share", str(one / "train.csv")]) == 0
    (tmp_path / "shared.toml").write_text(capsys.readouterr().out)
    table = str(other / "train.csv")
    asked = ["adopt", str(tmp_path / "shared.toml"), "--table", table, "--write"]
    assert data([*asked, *(() if words else ("--named", "days=more"))]) == 2
    assert said in capsys.readouterr().err
    assert data([*asked, *words]) == 0
    assert data(["check", table]) == 0
    here, there = (agreed_of(read_description(folder)) for folder in (one, other))
    assert here == there
