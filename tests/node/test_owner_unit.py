"""A client whose unit is an owner: what it charges, whom it protects, and what it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

from discreet.data.examples import Examples
from discreet.ledger.owner_account import BY_OWNER
from discreet.node.account import Refused
from discreet.node.masked_work import MaskedWork
from discreet.node.policy import ClientPolicy, policy_from
from discreet.node.work import work_of
from discreet.privacy.randomness import seeded_source
from discreet.protocol.messages import TrainReply
from discreet.settings.client_settings import ClientSettings
from discreet.settings.rules import ConfigError
from discreet.settings.settings import client_settings
from discreet.training.units import units_of
from tests.node.clients import EXAMPLE, client, config, examples, ledger_at, linear, params_of
from tests.node.clients import request as asked

OWNER = (*EXAMPLE, "privacy.example.unit=owner", "data.partition=owners")
OWNERS = torch.tensor([0, 0, 1, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3, 4])


def held(owners: torch.Tensor | None = OWNERS) -> Examples:
    rows = examples(16)
    return Examples(rows.inputs, rows.targets, owners)


def reply(
    ledger: Path,
    *words: str,
    data: Examples | None = None,
    policy: ClientPolicy | None = None,
    number: int = 1,
) -> TrainReply:
    who = client(data or held(), ledger, policy=policy)
    return who.answer(work_of(asked(config(*words), number)), params_of(linear()))


def test_it_charges_steps_over_owners_under_a_name_that_says_so(tmp_path: Path) -> None:
    reply(tmp_path / "ledger.db", *OWNER)  # batches of 4 of the 5 owners, not of the 16 rows
    ledger = ledger_at(tmp_path / "ledger.db")
    spent = ledger.spent("example", data_owner=BY_OWNER)
    event = PoissonSampledDpEvent(4 / 5, GaussianDpEvent(1.5))
    assert spent.entries == ((event, 2),)
    assert ledger.spent("example", data_owner="").entries == ()


def test_the_statement_speaks_of_an_owner() -> None:
    from discreet.mechanisms.local_dp_sgd import LocalDpSgd

    words = (*OWNER, "privacy.example.rows_per_owner=3")
    said = LocalDpSgd(client_settings(config(*words))).statement()
    assert said.unit == "one owner of one client, with all its rows"
    assert said.adjacency.startswith("zero-out: one owner")
    assert "each with at most 3 rows" in said.mechanism
    assert not any("example" in gap for gap in said.not_covered if "num_examples" not in gap)
    declared = LocalDpSgd(client_settings(config(*words, "data.public_num_examples=100")))
    assert declared.statement().adjacency == "add or remove one owner, with all its rows"


def test_a_step_reads_at_most_so_many_rows_of_an_owner_drawn_anew() -> None:
    units = units_of(held(), 2)
    seen = set[int]()
    for step in range(60):
        drawn = units.drawn(torch.arange(5), seeded_source(977).child(step))
        assert torch.equal(OWNERS[drawn.rows], drawn.units)
        assert torch.bincount(drawn.units).tolist() == [2, 1, 2, 2, 1]
        seen |= set(drawn.rows.tolist())
    assert len(seen) == 16


def test_without_owners_in_its_data_a_client_refuses(tmp_path: Path) -> None:
    with pytest.raises(Refused, match="owner of each row"):
        reply(tmp_path / "ledger.db", *OWNER, data=held(owners=None))
    assert ledger_at(tmp_path / "ledger.db").releases() == []


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        (EXAMPLE, OWNER, "charged for single examples: no epsilon of an owner"),
        (OWNER, EXAMPLE, "charged for owners: no epsilon of a single example"),
    ],
)
def test_a_ledger_that_was_charged_for_the_other_unit_is_refused(
    first: tuple[str, ...], then: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    reply(tmp_path / "ledger.db", *first)
    with pytest.raises(Refused, match=said):
        reply(tmp_path / "ledger.db", *then, number=2)


def test_a_policy_can_require_that_owners_are_the_unit(tmp_path: Path) -> None:
    policy = policy_from({"require": "owner"})
    assert reply(tmp_path / "owners.db", *OWNER, policy=policy).epsilon_example > 0
    with pytest.raises(Refused, match="requires the owner-level guarantee"):
        reply(tmp_path / "rows.db", *EXAMPLE, policy=policy)


def test_an_owners_budget_holds_for_all_rounds(tmp_path: Path) -> None:
    ledger, policy = tmp_path / "ledger.db", ClientPolicy(max_epsilon=3.0, max_delta=1e-3)
    once = reply(ledger, *OWNER, policy=policy).epsilon_example
    assert 2 < once < 3
    with pytest.raises(Refused, match="for all guarantees together"):
        reply(ledger, *OWNER, policy=policy, number=2)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (
            "data.partition=iid",
            "data.partition must be owners or site with privacy.example.unit=owner",
        ),
        ("evaluation.kind=private", "evaluation.kind must be public or none with"),
    ],
)
def test_what_an_owner_can_not_have_is_refused_by_name(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        made(*OWNER, word)


def test_a_masked_sum_over_owners_has_an_account_that_says_so() -> None:
    words = (
        "privacy.example.aggregation=secure",
        "sampling.kind=everyone",
        "sampling.probability=1",
        "privacy.accountant=rdp",
        "data.num_clients=5",
        "sampling.population_size=5",
    )
    asked_work = work_of(asked(config(*OWNER, *words)))
    masked = MaskedWork(asked_work, None, ClientPolicy(), "", lambda _: torch.zeros(0))
    assert masked.account == BY_OWNER


def made(*words: str) -> ClientSettings:
    return client_settings(config(*words))
