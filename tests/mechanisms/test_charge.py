"""A mechanism that would release without a charge is stopped before anything is out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from dp_accounting import NoOpDpEvent

from discreet.ledger.durable_ledger import DurableLedger
from discreet.mechanisms.masked_sums import MaskedGaussian
from discreet.mechanisms.mechanism import Uncharged
from discreet.mechanisms.sums import UnopenedSum
from discreet.planning.state import initial_state
from discreet.privacy.randomness import seeded_source
from discreet.run_files.compose import load_asked
from discreet.run_files.run_folder import RunFolder
from discreet.settings.rules import ConfigError
from discreet.simulation.in_process import simulate
from tests.mechanisms.made import masked
from tests.mechanisms.signs import Signs
from tests.rounds import round_of

HERE = "tests.mechanisms.test_charge"
RUN = ("rounds=2", "model.name=linear", "data.num_clients=20", "privacy.user.too_noisy=warn")


@dataclass(frozen=True)
class Free(Signs):
    """Says no cost."""

    def event(self, number: int, *, again: bool = False) -> Any:
        return None


@dataclass(frozen=True)
class Costless(Signs):
    """Says that its rounds release nothing but noise."""

    def event(self, number: int, *, again: bool = False) -> Any:
        return NoOpDpEvent()


@dataclass(frozen=True)
class AtNobody(Signs):
    """Is charged to nobody's ledger."""

    charged_at: ClassVar[frozenset[str]] = frozenset()


@dataclass(frozen=True)
class Forgetful(Signs):
    """Says no cost for a round that is made again after a crash."""

    def event(self, number: int, *, again: bool = False) -> Any:
        return None if again else super().event(number)


@pytest.mark.parametrize("name", ["Free", "Costless", "AtNobody"])
def test_a_mechanism_that_costs_nothing_is_refused_before_a_folder_is_made(
    name: str, tmp_path: Path
) -> None:
    words = [*RUN, f"privacy.user.mechanism={HERE}:{name}", "privacy.user.noise_multiplier=1"]
    with pytest.raises(ConfigError, match=r"no cost|cost nothing|charged at the server"):
        simulate(*load_asked([*words, f"output_dir={tmp_path / 'run'}"]))
    assert not (tmp_path / "run").exists()


def words_of(name: str, folder: Path) -> list[str]:
    own = (f"privacy.user.mechanism={HERE}:{name}", "privacy.user.noise_multiplier=1")
    return [*RUN, *own, f"output_dir={folder}"]


def test_a_round_for_which_a_mechanism_says_no_cost_releases_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise OSError("no space left")

    words = words_of("Forgetful", tmp_path)
    with monkeypatch.context() as before:
        before.setattr(RunFolder, "append_metrics", crash)
        with pytest.raises(OSError, match="no space"):
            simulate(*load_asked(words))
    with pytest.raises(Uncharged, match="no cost for round 1"):
        simulate(*load_asked([*words, "resume=true"]))
    assert DurableLedger(tmp_path / "ledger.db").spent("user").num_releases == 1


def test_a_round_costs_what_its_mechanism_said_before_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = load_asked(words_of("Signs", tmp_path))
    simulate(*asked, on_round=lambda _: monkeypatch.setattr(Signs, "event", Costless.event))
    (entry,) = DurableLedger(tmp_path / "ledger.db").spent("user").entries
    event, count = entry
    assert event != NoOpDpEvent()
    assert count == 2


def test_a_masked_sum_is_not_opened_before_it_is_charged(monkeypatch: pytest.MonkeyPatch) -> None:
    how, opened = masked(1.0, nodes=4, size=3), list[str]()
    total = torch.zeros(how.vector.length, dtype=torch.int64)
    real = MaskedGaussian.add_up

    def early(self: MaskedGaussian, replies: Any, state: Any) -> UnopenedSum:
        summed = real(self, replies, state)
        value = summed.open()
        return UnopenedSum(lambda: value, summed.replies)

    monkeypatch.setattr(MaskedGaussian, "add_up", early)
    sums = [UnopenedSum(lambda: opened.append("opened") or total, 4)]  # type: ignore[func-returns-value]
    with pytest.raises(Uncharged, match="before it was charged"):
        round_of(how, initial_state(torch.zeros(3), clip_norm=1.0), sums, seeded_source(3))
    assert opened == []
