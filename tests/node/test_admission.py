"""What is asked of an account before work: a cohort is admitted as its clients would be
sequentially, within each budget."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from dp_accounting import DpEvent, GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from discreet.accounting.distributed_gaussian import DistributedDiscreteGaussianDpEvent
from discreet.accounting.events import poisson_round_event
from discreet.ledger.durable_ledger import Charge, DurableLedger
from discreet.node import account
from discreet.node.account import Accounts, Budget, Refused
from discreet.node.admission import Admitted, admit
from discreet.node.work import work_of
from discreet.planning.state import Outcome
from discreet.protocol.messages import TrainRequest
from discreet.run_files.compose import load_asked, load_config
from discreet.run_files.run_folder import RunFolder
from discreet.settings.adjacency import EXAMPLE, LOCAL, USER
from discreet.settings.client_settings import ClientSettings
from discreet.settings.settings import client_settings
from discreet.simulation.in_process import simulate
from tests.node.clients import ledger_at

EVENT = poisson_round_event(0.2, noise_multiplier=1.1)
SHARED = (
    "privacy.example.aggregation=secure",
    "privacy.user.enabled=false",
    "privacy.accountant=rdp",
    "sampling.kind=everyone",
    "data.num_clients=4",
)
BOTH = (
    "privacy.user.enabled=false",
    "privacy.local.kind=gaussian",
    "privacy.local.noise_multiplier=2",
)


def run(*words: str) -> ClientSettings:
    work = ("training.epochs=1", "training.batch_size=8")
    words = ("privacy.example.enabled=true", "privacy.example.noise_multiplier=1.1", *work, *words)
    return client_settings(load_config(words))


def ask(*words: str, number: int = 1) -> TrainRequest:
    return TrainRequest(number, 1.0, run(*words))


def accounts(folder: Path) -> Accounts:
    return Accounts(ledger_at(folder / "clients.db"), 1e-3, "pld")


def enter(
    folder: Path, sizes: dict[str, int], *words: str, number: int = 1
) -> dict[str, Admitted | Refused]:
    return admit(work_of(ask(*words, number=number)), sizes, accounts=accounts(folder))


def spent(found: Admitted | Refused) -> float:
    assert isinstance(found, Admitted)
    return found.epsilon_example


@pytest.mark.parametrize("words", [(), BOTH], ids=["example", "example and local"])
def test_many_clients_at_once_are_admitted_as_sequentially(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    sizes = {"4": 9, "2": 5, "7": 0, "9": 9}
    many, each = accounts(tmp_path / "many"), accounts(tmp_path / "each")
    for number in (1, 2):
        together = admit(work_of(ask(*words, number=number)), sizes, accounts=many)
        alone = {}
        for name, size in sizes.items():
            alone |= admit(work_of(ask(*words, number=number)), {name: size}, accounts=each)
        assert together == alone
    rows = [
        [(row.round, row.guarantee, row.data_owner, row.count) for row in who.ledger.releases()]
        for who in (many, each)
    ]
    assert rows[0] == rows[1]


def test_a_client_that_one_of_two_budgets_refuses_is_charged_for_neither(tmp_path: Path) -> None:
    found = enter(tmp_path, {"0": 40}, *BOTH, "privacy.local.max_epsilon=0.1")
    assert "the local-level budget is spent" in str(found["0"])
    assert DurableLedger(tmp_path / "clients.db").releases() == []


def test_a_client_without_examples_is_charged_nothing_and_takes_part(tmp_path: Path) -> None:
    assert spent(enter(tmp_path, {"5": 0})["5"]) == 0
    assert DurableLedger(tmp_path / "clients.db").releases() == []


def test_what_is_forgotten_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(account, "REMEMBERED", 1)
    many = accounts(tmp_path)
    found = [
        spent(admit(work_of(ask(number=number)), {"0": 9, "1": 9}, accounts=many)["1"])
        for number in range(1, 4)
    ]
    assert found == sorted(set(found))


def test_budgets_are_looked_at_again_if_another_run_has_charged_a_client_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = spent(enter(tmp_path / "elsewhere", {"0": 40})["0"])
    many, other = accounts(tmp_path), DurableLedger(tmp_path / "clients.db")
    after = Accounts.after

    def slow(self: Accounts, charges: list[Charge], budgets: object) -> object:
        found = after(self, charges, budgets)  # type: ignore[arg-type]
        if not other.releases():
            other.charge([Charge(1, EXAMPLE, "0", EVENT, 5)])
        return found

    monkeypatch.setattr(Accounts, "after", slow)
    found = admit(work_of(ask(f"privacy.example.max_epsilon={once}")), {"0": 40}, accounts=many)
    assert isinstance(found["0"], Refused)
    assert len(other.releases()) == 1


STEP = PoissonSampledDpEvent(0.25, GaussianDpEvent(1.5))
DELTA = 1e-4


def account_at(path: Path, *, accountant: str = "pld", delta: float = DELTA) -> Accounts:
    return Accounts(ledger_at(path), delta, accountant)


def charge(
    mine: Accounts,
    event: DpEvent,
    count: int,
    *budgets: Budget,
    guarantee: str = EXAMPLE,
    by: str = "",
) -> float:
    """Charges as an admission does, and returns the epsilon spent with it."""
    one = Charge(1, guarantee, by, event, count)
    after = mine.after([one], budgets)
    assert mine.write([one])
    return mine.epsilon(after[guarantee])


def oracle(*events: tuple[DpEvent, int]) -> float:
    accountant = PLDAccountant(value_discretization_interval=1e-3)
    for event, count in events:
        accountant.compose(SelfComposedDpEvent(event, count))
    return float(accountant.get_epsilon(DELTA))


def test_epsilon_is_cumulative_over_runs_with_other_noise(tmp_path: Path) -> None:
    charge(account_at(tmp_path / "ledger.db"), STEP, 4)
    other = PoissonSampledDpEvent(0.1, GaussianDpEvent(0.9))
    after = charge(account_at(tmp_path / "ledger.db"), other, 2)
    assert after == pytest.approx(oracle((STEP, 4), (other, 2)), rel=5e-3)


def test_a_charge_that_would_pass_the_budget_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    mine, budget = account_at(tmp_path / "ledger.db"), Budget(oracle((STEP, 10)), DELTA, EXAMPLE)
    charge(mine, STEP, 8, budget)
    head = mine.ledger.position().head
    with pytest.raises(Refused, match=r"example-level budget is spent: .*epsilon .* of "):
        charge(mine, STEP, 4, budget)
    assert mine.ledger.position().head == head
    assert charge(mine, STEP, 1, budget) <= budget.epsilon


def test_each_budget_holds_at_its_own_delta(tmp_path: Path) -> None:
    # At delta 0.98, which a server may name, the same releases cost next to nothing.
    mine, budgets = (
        account_at(tmp_path / "ledger.db", delta=0.98),
        (Budget(4, 0.98), Budget(oracle((STEP, 10)), DELTA)),
    )
    assert charge(mine, STEP, 9, *budgets) < 0.1
    with pytest.raises(Refused, match=r"at delta 0\.0001$"):
        charge(mine, STEP, 2, *budgets)


def test_beside_other_releases_a_masked_sum_counts_as_a_change_of_data(
    tmp_path: Path,
) -> None:
    # Zeroing a client out moves the sum by its norm, other data in its place by up to twice as
    # much: noise 2, and 1.
    masked, mine = (
        DistributedDiscreteGaussianDpEvent(100, 1, 25, 3),
        account_at(tmp_path / "ledger.db"),
    )
    alone, both = (
        RdpAccountant().compose(GaussianDpEvent(noise)).get_epsilon(DELTA) for noise in (2.0, 1.0)
    )
    charge(mine, masked, 1, Budget(alone * 1.02, DELTA), guarantee=USER)
    with pytest.raises(Refused, match="for all guarantees together"):
        charge(mine, GaussianDpEvent(1e4), 1, Budget(both * 0.98, DELTA), guarantee=LOCAL)
    charge(mine, GaussianDpEvent(1e4), 1, Budget(both * 1.02, DELTA), guarantee=LOCAL)


CLIENTS = 6
SMALL = [
    f"data.num_clients={CLIENTS}",
    "model.name=logistic_regression",
    "training.epochs=1",
    "seed=30911",
]
SMALL += [
    "privacy.user.enabled=false",
    "training.batch_size=64",
    "sampling.kind=everyone",
    "rounds=9",
]

# In shards of unlike size the clients' steps differ in number and probability, so their budgets
# last unequally long.
UNEQUAL = ["data.partition=dirichlet", "data.alpha=0.3"]
EXAMPLE_LEVEL = [
    *SMALL,
    *UNEQUAL,
    "privacy.example.enabled=true",
    "privacy.example.noise_multiplier=1.5",
]
EXAMPLE_LEVEL += ["privacy.accountant=rdp", "privacy.example.max_epsilon=4"]
LOCAL_LEVEL = [*SMALL, "privacy.local.noise_multiplier=4", "privacy.local.max_epsilon=1"]


def simulated(folder: Path, *words: str) -> Outcome:
    return simulate(*load_asked([*words, f"output_dir={folder}"]))


def rounds_of(folder: Path, guarantee: str) -> dict[str, int]:
    """How many rounds each client took part in."""
    return dict(
        Counter(
            row.data_owner
            for row in DurableLedger(folder / "clients.db").releases()
            if row.guarantee == guarantee
        )
    )


def test_clients_whose_example_level_budget_is_spent_stay_out_and_the_others_go_on(
    tmp_path: Path,
) -> None:
    simulated(tmp_path / "run", *EXAMPLE_LEVEL)
    replies = [row["replies"] or 0 for row in RunFolder(tmp_path / "run").read_metrics()]
    assert replies[0] == CLIENTS
    assert len(set(replies)) > 2  # some went before others
    assert replies == sorted(replies, reverse=True)  # and who is out stays out
    ledger = DurableLedger(tmp_path / "run" / "clients.db")
    for client in rounds_of(tmp_path / "run", "example"):
        assert ledger.spent("example", data_owner=client).epsilon(1e-3, "rdp") <= 4


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_a_cohort_that_refuses_does_not_end_the_run_while_others_have_budget(
    kind: str, tmp_path: Path
) -> None:
    words = [
        "sampling.kind=poisson",
        "sampling.probability=0.2",
        "rounds=60",
        "training.batch_size=512",
    ]
    # or the noise of few clients would drive the model, and end the run first
    words += ["server.learning_rate=0.001"]
    outcome = simulated(tmp_path / "run", *LOCAL_LEVEL, *words, f"privacy.local.kind={kind}")
    rounds = rounds_of(tmp_path / "run", "local")
    # With single clients in a cohort, a round in which all that were asked refuse comes long before
    # the last.
    idle = [
        row["round"]
        for row in RunFolder(tmp_path / "run").read_metrics()
        if row["cohort"] and not row["replies"]
    ]
    assert len(idle) > 1
    assert set(rounds) == {str(client) for client in range(CLIENTS)}
    assert len(set(rounds.values())) == 1  # everybody spent what it had
    assert outcome.checkpoint.round < 60
    assert outcome.stopped is not None
