"""examples/verify/verify.py, which knows nothing of Discreet, agrees with every kind of run and
finds planted lies."""

from __future__ import annotations

import ast
import hashlib
import json
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from discreet import DPSGD, LoopPrivacy, simulate
from discreet.ledger.durable_ledger import DurableLedger
from examples.verify import verify
from examples.verify.verify import main
from tests.conftest import REPOSITORY

SCRIPT = REPOSITORY / "examples" / "verify" / "verify.py"
PLAIN = "rounds=2"
KINDS = {
    "example level": "experiment=silos",
    "masked sums": "experiment=organisations",
}
MORE_KINDS = {
    "fixed size": "sampling.kind=fixed privacy.accountant=rdp",
    "everyone": "sampling.kind=everyone",
    "turns": "experiment=mnist_tff_cyclic data.name=digits data.path=null data.num_clients=200 "
    "data.partition=iid data.examples_per_client=null model.name=logistic_regression "
    "privacy.user.too_noisy=warn",
    "full batches": "experiment=homo_lr_dpsgd",
    "local Gaussian": "experiment=gaussian_local",
    "local Laplace": "experiment=laplace_local",
    "two guarantees": "experiment=both",
    "private ratings": "experiment=private_evaluation",
    "client-side DP-FedAvg": "experiment=dp_fedavg_client_side",
    "regression": "experiment=regression",
    "adaptive clipping": "experiment=adaptive_clipping",
}


@pytest.fixture(scope="module", autouse=True)
def _an_epsilon_of_the_same_events_is_computed_once() -> Iterator[None]:
    """Lies are planted in copies of one run, whose other events are the same."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "epsilon_of", cache(verify.epsilon_of))
        yield


def made(folder: Path, words: str) -> Path:
    return simulate(*words.split(), PLAIN, "seed=50021", f"output_dir={folder}")


@pytest.mark.parametrize(
    "words",
    [
        *KINDS.values(),
        *(pytest.param(each, marks=pytest.mark.slow) for each in MORE_KINDS.values()),
    ],
    ids=[*KINDS, *MORE_KINDS],
)
def test_it_agrees_with_a_run_of_each_kind(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = made(tmp_path / "run", words)
    capsys.readouterr()
    assert main(str(run)) == 0
    said = capsys.readouterr().out
    privacy = json.loads((run / "privacy.json").read_text())
    for each in privacy["guarantees"]:
        assert (f"{each['name']} is inf by {privacy['accountant']}" in said) != each["enabled"]
    assert "recomputed" in said
    assert "verify those" not in said


def test_hospitals_heart_data_with_a_shared_noise_agree(shared_data: Path, tmp_path: Path) -> None:
    heart = f"experiment=heart_secure data.path={shared_data / 'heart'}"
    assert main(str(made(tmp_path / "run", heart))) == 0


def test_it_reads_a_ledger_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ledger.db"
    DurableLedger.create(path)
    model = torch.nn.Linear(3, 2)
    data = torch.utils.data.TensorDataset(torch.randn(50, 3), torch.randint(2, (50,)))
    privacy = LoopPrivacy(noise_multiplier=1.5, ledger=path, accountant="rdp")
    private = DPSGD(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        data,
        loss=torch.nn.CrossEntropyLoss(reduction="none"),
        batch_size=10,
        epochs=2,
        delta=1e-4,
        privacy=privacy,
    )
    for inputs, targets in private:
        private.step(inputs, targets)
    capsys.readouterr()
    assert main(str(path), "1e-4") == 0
    found = re.search(r"at most ([\d.]+) by rdp", capsys.readouterr().out)
    assert found is not None
    assert float(found[1]) == pytest.approx(private.epsilon(), rel=1e-3)


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("honest") / "run", "experiment=both sampling.kind=everyone")


def in_json(run: Path, change: Callable[[dict], None]) -> None:  # type: ignore[type-arg]
    path = run / "privacy.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def in_ledger(run: Path, *statements: str, name: str = "ledger.db") -> None:
    with sqlite3.connect(run / name) as connection:
        for statement in statements:
            connection.execute(statement)


def lower_epsilon(run: Path) -> None:
    in_json(run, lambda found: found["guarantees"][0]["epsilon"].update(pld=2.0))


def lower_example(run: Path) -> None:
    in_json(run, lambda found: found["guarantees"][1]["epsilon"].update(pld=0.5))


def lower_metrics(run: Path) -> None:
    path = run / "metrics.csv"
    head, *rows, last = path.read_text().splitlines()
    cells = last.split(",")
    cells[head.split(",").index("epsilon_user")] = "3.0"
    path.write_text("\n".join([head, *rows, ",".join(cells)]) + "\n")


def larger_delta(run: Path) -> None:
    in_json(run, lambda found: found.update(delta=found["delta"] * 10))


def switched_off(run: Path) -> None:
    in_json(run, lambda found: found["guarantees"][1].update(enabled=False))


def other_head(run: Path) -> None:
    in_json(run, lambda found: found.update(ledger_head="0" * 64))


def more_rounds(run: Path) -> None:
    in_json(run, lambda found: found.update(rounds=3))


def more_noise(run: Path) -> None:
    in_ledger(run, "update releases set event = replace(event, 'multiplier\":', 'multiplier\":9')")


def row_removed(run: Path) -> None:
    in_ledger(run, "delete from releases where number = 1")


def end_removed(run: Path) -> None:
    in_ledger(run, "delete from releases where number = (select max(number) from releases)")


def clients_end_removed(run: Path) -> None:
    last = "(select max(number) from releases)"
    in_ledger(run, f"delete from releases where number = {last}", name="clients.db")


def new_chain(run: Path) -> None:
    """A whole ledger with a chain of its own that has half of the rounds."""
    with sqlite3.connect(run / "ledger.db") as connection:
        connection.execute("delete from releases where round > 1")
        facts = dict(connection.execute("select name, value from facts"))
        rows = connection.execute("select * from releases order by number").fetchall()
        content = sorted((name, facts[name]) for name in facts.keys() - {"head", "rows"})
        head = hashlib.sha256(json.dumps(["", *content]).encode()).hexdigest()
        for *row, _ in rows:
            head = hashlib.sha256(json.dumps([head, *row]).encode()).hexdigest()
        connection.execute("update facts set value = ? where name = 'head'", (head,))
        connection.execute("update facts set value = ? where name = 'rows'", (str(len(rows)),))
    in_json(run, lambda found: found.update(ledger_head=head))


def nothing_promised(run: Path) -> None:
    in_json(run, lambda found: found.update(guarantees=[]))


def no_epsilon(run: Path) -> None:
    in_json(run, lambda found: found["guarantees"][0].update(epsilon={}))


def unknown_guarantee(run: Path) -> None:
    in_json(
        run,
        lambda found: found["guarantees"].append(
            {**found["guarantees"][0], "name": "household", "events": []}
        ),
    )


def no_rounds(run: Path) -> None:
    in_json(run, lambda found: found.update(rounds=0))


def lower_first_round(run: Path) -> None:
    path = run / "metrics.csv"
    head, first, *rows = path.read_text().splitlines()
    cells = first.split(",")
    cells[head.split(",").index("epsilon_user")] = "0.5"
    path.write_text("\n".join([head, ",".join(cells), *rows]) + "\n")


def number_for_what_is_off(run: Path) -> None:
    in_json(run, lambda found: found["guarantees"][2]["epsilon"].update(pld=1.0))


LIES = {
    nothing_promised: "nothing was charged that is off ['example', 'user']",
    no_epsilon: "privacy.json: user is nan",
    unknown_guarantee: "all 2 rounds were charged for household",
    no_rounds: "0 rounds of 2",
    lower_first_round: "metrics.csv, round 1: user is 0.5",
    number_for_what_is_off: "privacy.json: local is 1.0 by pld",
    lower_epsilon: "privacy.json: user is 2",
    lower_example: "privacy.json: example is 0.5",
    lower_metrics: "metrics.csv, round 2: user is 3",
    larger_delta: "privacy.json: delta",
    switched_off: "nothing was charged that is off",
    other_head: "ledger_head",
    more_rounds: "3 rounds of 2",
    more_noise: "ledger.db: 2 rows do not fit the chain at row 1",
    row_removed: "ledger.db: 1 rows do not fit the chain at row 1",
    end_removed: "ledger.db: 1 rows lack the last ones",
    clients_end_removed: "clients.db",
    new_chain: "all 2 rounds were charged for user",
}


@pytest.mark.parametrize(("lie", "message"), LIES.items(), ids=[lie.__name__ for lie in LIES])
def test_it_finds_a_planted_lie(
    lie: Callable[[Path], None],
    message: str,
    honest: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = tmp_path / "run"
    shutil.copytree(honest, run)
    lie(run)
    capsys.readouterr()
    assert main(str(run)) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("WRONG")]
    assert any(message in line for line in wrong)


ROW = "| {name} | {epsilon} | {delta} | all data of one client |\n"
OTHERS = ROW.format(name="local", epsilon="none (infinite)", delta="")
OTHERS += ROW.format(name="example", epsilon="40", delta="0.001")


@pytest.mark.parametrize(
    ("card", "code"),
    [
        (ROW.format(name="user", epsilon="9", delta="0.001") + OTHERS, 0),
        (ROW.format(name="**user**", epsilon="**9**", delta="`0.001`") + OTHERS, 0),
        (ROW.format(name="user", epsilon="1.5", delta="0.001") + OTHERS, 1),
        (ROW.format(name="user", epsilon="**1.5**", delta="0.001") + OTHERS, 1),
        (ROW.format(name="user", epsilon="9", delta="1e-12") + OTHERS, 1),
        (ROW.format(name="user", epsilon="about 9", delta="0.001") + OTHERS, 1),
        (ROW.format(name="user", epsilon="9", delta="0.001"), 1),
        (OTHERS, 1),
        ("Epsilon is small.\n", 1),
        (
            ROW.format(name="user", epsilon="9", delta="0.001")
            + OTHERS
            + ROW.format(name="local", epsilon="1", delta="0.001"),
            1,
        ),
    ],
)
def test_it_reads_the_model_card(card: str, code: int, honest: Path, tmp_path: Path) -> None:
    path = tmp_path / "README.md"
    path.write_text(card)
    assert main(str(honest), str(path)) == code


def test_it_is_short_and_imports_nothing_of_discreet() -> None:
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 150
    imported = set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module))
    standard = {"csv", "hashlib", "json", "logging", "math", "re", "sqlite3", "sys"}
    assert imported - standard == {"collections", "pathlib", "dp_accounting"}
