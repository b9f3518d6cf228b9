"""examples/verify/verify.py, which knows nothing of Discreet, agrees with every kind of run and
finds planted lies."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from discreet import DPSGD, LoopPrivacy, simulate
from discreet.ledger.durable_ledger import DurableLedger
from discreet.server.population_account import Population, create_account
from examples.verify import verify
from examples.verify.verify import main
from tests.command import ledger, statistics, tune

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
    computed = cache(verify.epsilon_of)

    def once(rows: Iterable[verify.Row], delta: float, accountant: str) -> float:
        decisive = (row._replace(number=0, nonce="", digest="") for row in rows)
        return computed(tuple(decisive), delta, accountant)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verify, "epsilon_of", once)
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
        assert (f": {each['name']} is " in said) == each["enabled"]
    assert "recomputed" in said
    assert "verify those" not in said
    assert said.endswith("\nALL RIGHT\n")


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


def chained_anew(ledger: Path, condition: str) -> str:
    """Deletes rows of a ledger and makes a chain of its own of the others; returns its head."""
    with sqlite3.connect(ledger) as connection:
        connection.execute(f"delete from releases where {condition}")
        facts = dict(connection.execute("select name, value from facts"))
        rows = connection.execute("select * from releases order by number").fetchall()
        content = sorted((name, facts[name]) for name in facts.keys() - {"head", "rows"})
        head = hashlib.sha256(json.dumps(["", *content]).encode()).hexdigest()
        for *row, old in rows:
            head = hashlib.sha256(json.dumps([head, *row]).encode()).hexdigest()
            connection.execute("update releases set digest = ? where digest = ?", (head, old))
        connection.execute("update facts set value = ? where name = 'head'", (head,))
        connection.execute("update facts set value = ? where name = 'rows'", (str(len(rows)),))
    return head


def new_chain(run: Path) -> None:
    """A whole ledger that has half of the rounds."""
    head = chained_anew(run / "ledger.db", "round > 1")
    in_json(run, lambda found: found.update(ledger_head=head))


def clients_new_chain(run: Path) -> None:
    """A whole ledger of the clients that has half of the rounds."""
    chained_anew(run / "clients.db", "round > 1")


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


def pure_epsilon(run: Path) -> None:
    in_json(run, lambda found: found["guarantees"][0]["epsilon"].update(pure=60.0))


def clients_head_left_out(run: Path) -> None:
    """The clients' ledger could then be any other whole one."""
    in_json(run, lambda found: found.update(clients_head=None))


LIES = {
    pure_epsilon: "privacy.json: user is 60.0 by pure",
    clients_head_left_out: "(clients_head)",
    nothing_promised: "nothing was charged that is off example user",
    no_epsilon: "privacy.json: user is missing",
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
    clients_new_chain: "(clients_head)",
    new_chain: "all 2 rounds were charged for user",
}


def told_otherwise(honest: Path, lie: Callable[[Path], None], folder: Path) -> Path:
    """A copy of a run folder with a lie in it."""
    run = folder / "run"
    shutil.copytree(honest, run)
    lie(run)
    return run


@pytest.mark.parametrize(("lie", "message"), LIES.items(), ids=[lie.__name__ for lie in LIES])
def test_it_finds_a_planted_lie(
    lie: Callable[[Path], None],
    message: str,
    honest: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = told_otherwise(honest, lie, tmp_path)
    code, _, wrong, _ = lines(capsys, run)
    assert code == 1
    assert any(message in line for line in wrong)


def lines(
    capsys: pytest.CaptureFixture[str], run: Path, *words: str
) -> tuple[int, str, list[str], str]:
    """The exit code, all that was said, the lines that call something wrong, and the last line but
    for the verdict."""
    capsys.readouterr()
    code = main(str(run), *words)
    said = capsys.readouterr().out
    *found, last, verdict = said.splitlines()
    wrong = [line for line in (*found, last) if line.startswith("WRONG")]
    unknown = [line for line in (*found, last) if line.startswith("NOT VERIFIED")]
    if wrong:
        assert (code, verdict) == (1, f"WRONG: {len(wrong)} of the lines above")
    elif unknown:
        assert (code, verdict) == (3, f"NOT VERIFIED: {len(unknown)} of the lines above")
    else:
        assert (code, verdict) == (0, "ALL RIGHT")
    return code, said, wrong, last


def test_it_agrees_with_a_chosen_run_of_a_tune_and_finds_a_lower_price_of_the_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--trials", "geometric", "--mean", "2", "--output", str(tmp_path / "out")]
    small = ["rounds=3", "data.num_clients=50", "privacy.user.too_noisy=warn"]
    assert tune([*words, *small, "privacy.user.noise_multiplier=1,2"]) == 0
    run = tmp_path / "out" / "chosen"
    code, said, wrong, _ = lines(capsys, run)
    assert (code, wrong) == (0, [])
    assert "all 3 rounds were charged for user" in said
    for key, place in (("epsilon", "selection: epsilon"), ("epsilon_of_one_trial", "one trial")):
        lied = tmp_path / key
        shutil.copytree(run, lied)
        in_json(lied, lambda found, key=key: found["selection"].update({key: 0.3}))
        code, _, wrong, _ = lines(capsys, lied)
        assert code == 1
        assert [place in line for line in wrong] == [True]
    assert lines(capsys, told_otherwise(run, lower_first_round, tmp_path))[0] == 1


ACCOUNT = "privacy.user.noise_multiplier=1 privacy.user.max_epsilon=20 data.num_clients=200 "
ACCOUNT += "privacy.user.too_noisy=warn sampling.population_name=people rounds=2"


def test_an_account_has_a_total_and_is_not_verified_in_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    account = tmp_path / "people.db"
    create_account(account, Population("people", 200, "add or remove one client", 1e-3))
    for name in ("first", "second"):
        words = [*ACCOUNT.split(), f"privacy.user.account={account}", "privacy.delta=1e-3"]
        run = simulate(*words, f"output_dir={tmp_path / name}")
    privacy = json.loads((run / "privacy.json").read_text())
    total = privacy["account"]["epsilon"]["rdp"]
    assert total > 1.2 * privacy["guarantees"][0]["epsilon"]["rdp"]
    code, said, _, last = lines(capsys, account)
    found = re.findall(r"at most ([\d.]+) by rdp at delta 0.001", said)
    assert (code, len(found)) == (0, 1)
    assert float(found[0]) == pytest.approx(total, rel=2e-3)
    assert "at delta 1e-05" in lines(capsys, account, "1e-5")[1]
    code, _, wrong, last = lines(capsys, run)
    assert (code, wrong) == (3, [])
    assert last.startswith("NOT VERIFIED: account")
    in_json(run, lambda found: found["account"].update(epsilon={"pld": 0.01, "rdp": 0.01}))
    code, _, wrong, last = lines(capsys, run)
    assert (code, len(wrong)) == (1, 2)
    assert all("account) is 0.01" in line for line in wrong)


@pytest.fixture(scope="module")
def noised_locally(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made(tmp_path_factory.mktemp("local") / "run", "experiment=laplace_local")


def test_a_simulation_without_its_clients_ledger_is_wrong(
    noised_locally: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(noised_locally, run)
    assert lines(capsys, run)[0] == 0
    (run / "clients.db").unlink()
    with pytest.raises(FileNotFoundError, match=r"clients\.db"):
        main(str(run))
    in_json(run, lambda found: found.update(clients_head=None))
    code, said, wrong, last = lines(capsys, run)
    assert (code, wrong) == (3, [])
    assert last.startswith("NOT VERIFIED: local is {")
    assert "recomputed 0" not in said


def test_statistics_alone_are_verified_by_their_ledger(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert statistics([*ASKED, f"output_dir={tmp_path / 'run'}"]) == 0
    code, said, _, last = lines(capsys, tmp_path / "run")
    assert (code, "privacy.json" in said) == (0, False)
    assert "user, all rows: at most" in last
    in_ledger(tmp_path / "run", "update releases set event = replace(event, ':5', ':50')")
    assert lines(capsys, tmp_path / "run")[0] == 1


ASKED = ["data.num_clients=50", "statistics.noise_multiplier=5", "privacy.user.too_noisy=warn"]
ASKED += ["privacy.user.noise_multiplier=2", "privacy.user.max_epsilon=20"]


@pytest.fixture(scope="module")
def asked_after(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("after") / "run"
    simulate(*ASKED, "rounds=2", f"output_dir={run}")
    assert statistics(["resume=true", f"output_dir={run}"]) == 0
    return run


def test_statistics_after_a_run_cost_more_than_it_says(
    asked_after: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said, wrong, last = lines(capsys, asked_after)
    assert (code, wrong) == (0, [])
    assert "\nafter privacy.json: 1 rows, of statistics alone\n" in said
    epsilons = json.loads((asked_after / "privacy.json").read_text())["guarantees"][0]["epsilon"]
    found = re.search(r"user, all rows: at most ([\d.]+) by rdp", last)
    assert found is not None
    assert float(found[1]) > 1.001 * epsilons["rdp"]


def test_a_run_that_went_on_after_statistics_agrees(
    asked_after: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(asked_after, run)
    ledger(["adopt", str(run)])
    simulate("resume=true", f"output_dir={run}")
    code, said, *_ = lines(capsys, run)
    assert (code, "\nafter privacy.json: 0 rows, of statistics alone\n" in said) == (0, True)
    less_than_half(run)
    assert lines(capsys, run)[0] == 1


def less_than_half(run: Path) -> None:
    in_json(run, lambda found: found["guarantees"][0]["epsilon"].update(pld=0.3))


def earlier_head(run: Path) -> None:
    """Leaves the last round out of privacy.json, and of metrics.csv, as if it were statistics."""
    with sqlite3.connect(run / "ledger.db") as connection:
        ((head,),) = connection.execute("select digest from releases where number = 1")
    in_json(run, lambda found: found.update(ledger_head=head, rounds=1))
    path = run / "metrics.csv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))


@pytest.mark.parametrize("lie", [row_removed, end_removed, less_than_half, earlier_head])
def test_a_lie_beside_later_statistics_is_wrong(
    lie: Callable[[Path], None],
    asked_after: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = told_otherwise(asked_after, lie, tmp_path)
    code, _, wrong, _ = lines(capsys, run)
    assert code == 1
    assert wrong


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
