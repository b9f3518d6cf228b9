"""Whatever clients do, the run goes on, its noise and denominator stay, and what went wrong is
counted and logged."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from discreet.ledger.durable_ledger import DurableLedger
from discreet.models import models
from discreet.planning.state import State
from discreet.protocol.messages import TrainReply, TrainRequest
from discreet.run_files.compose import load_asked
from discreet.run_files.run_folder import RunFolder, read_status
from discreet.server.session import Session, finish, prepare, training_run
from discreet.server.transport import Failure, NobodyAnswers
from discreet.settings.rules import ConfigError

ROUNDS, CLIENTS, SIZE = 3, 10, 650
SMALL = [
    f"rounds={ROUNDS}",
    f"data.num_clients={CLIENTS}",
    "model.name=logistic_regression",
    "seed=41051",
]
SMALL += ["sampling.kind=everyone", "privacy.user.noise_multiplier=1.0", "server.momentum=0"]
FIXED = ["privacy.user.clip.kind=fixed", "privacy.user.clip.norm=0.5"]

EXAMPLE_ON = ("privacy.example.enabled=true", "privacy.example.noise_multiplier=1")

Answer = Callable[[int, int], TrainReply | Failure]


@dataclass(frozen=True)
class Scripted:
    """A transport whose clients answer by a function of the round and the client."""

    answer: Answer
    clients: int = CLIENTS

    def available_clients(self) -> Sequence[int]:
        return range(self.clients)

    def ask(
        self, asked: TrainRequest, params: Tensor, cohort: Sequence[int]
    ) -> Iterable[TrainReply | Failure]:
        return [self.answer(asked.round, client) for client in cohort]


def session(folder: Path, *words: str) -> Session:
    return prepare(
        *load_asked([*SMALL, *words, f"output_dir={folder}"]), simulated=False, held=ExitStack()
    )


def run(folder: Path, transport: Scripted, *words: str) -> State:
    ready = session(folder, *words)
    outcome = training_run(ready, transport).run()
    assert outcome.stopped is None
    return outcome.checkpoint


def fails(number: int, client: int) -> Failure:
    return Failure(
        client, ("refused", "malformed", "error", "late")[client % 4], f"of round {number}"
    )


def replies(number: int, client: int) -> TrainReply:
    return TrainReply(number, torch.full((SIZE,), 0.01), below=True)


def test_a_run_in_which_every_client_fails_has_the_noise_of_one_that_asks_nobody(
    tmp_path: Path,
) -> None:
    failed = run(tmp_path / "failed", Scripted(fails), "rounds=1")
    empty = run(tmp_path / "empty", Scripted(fails, clients=0), "rounds=1")
    assert torch.equal(failed.params, empty.params)
    assert failed.clip_norm == empty.clip_norm
    for name, asked in (("failed", CLIENTS), ("empty", 0)):  # charged and reported like any other
        rows, spent = (
            RunFolder(tmp_path / name).read_metrics(),
            DurableLedger(tmp_path / name / "ledger.db").spent("user"),
        )
        assert [(row["cohort"], row["replies"]) for row in rows] == [(asked, 0)]
        assert spent.num_releases == 1
        assert rows[-1]["epsilon_user"] == pytest.approx(spent.epsilon(1e-3), rel=1e-6)


@pytest.mark.parametrize("replying", [1, 4, CLIENTS])
def test_who_fails_changes_neither_the_noise_nor_the_denominator(
    replying: int, tmp_path: Path
) -> None:
    def some(number: int, client: int) -> TrainReply | Failure:
        return replies(number, client) if client < replying else fails(number, client)

    found = run(tmp_path / "some", Scripted(some), "rounds=1", *FIXED)
    nobody = run(tmp_path / "nobody", Scripted(fails), "rounds=1", *FIXED)
    # Each update has norm 0.01 * sqrt(650) < 0.5, lies on the grid to 0.5 / 1024 in norm, and is
    # divided by 10.
    expected = replying * 0.01 / CLIENTS
    assert (
        float((found.params - nobody.params - expected).norm())
        <= replying * 0.5 / 1024 / CLIENTS + 1e-5
    )


def test_without_a_seed_the_servers_draws_are_secure_and_those_of_no_other_run(
    tmp_path: Path,
) -> None:
    sources = [session(tmp_path / name, "seed=null").context.source for name in ("one", "other")]
    drawn = [source.child("round", 1).child("noise").words(4) for source in sources]
    assert all(source.is_secure for source in sources)
    assert not (drawn[0] == drawn[1]).any()  # equal by chance once in 2^62


def test_what_is_not_finite_or_huge_counts_as_zero_or_is_clipped(tmp_path: Path) -> None:
    wild = [math.nan, math.inf, -math.inf, 3e38]

    def odd(number: int, client: int) -> TrainReply | Failure:
        filled = torch.full((SIZE,), wild[client % 4])
        return TrainReply(number, filled, below=False) if client < 4 else fails(number, client)

    found = run(tmp_path / "odd", Scripted(odd), "rounds=1", *FIXED)
    nobody = run(tmp_path / "nobody", Scripted(fails), "rounds=1", *FIXED)
    # Three are zero; the huge one is clipped to 0.5, and the sum divided by 10.
    assert float((found.params - nobody.params).norm()) == pytest.approx(0.5 / CLIENTS, rel=2e-3)


@pytest.mark.parametrize("kind", ["refused", "malformed", "error", "late"])
def test_a_run_ends_after_the_second_round_in_a_row_in_which_nobody_replies(
    kind: str, tmp_path: Path
) -> None:
    silent = Scripted(
        lambda number, client: Failure(client, kind, f"for a reason of round {number}")
    )
    with pytest.raises(
        NobodyAnswers,
        match=f"^in 2 rounds in a row .*; the last failure: client 9 {kind}: .* of round 2$",
    ):
        run(tmp_path / "run", silent, "rounds=20")
    assert DurableLedger(tmp_path / "run" / "ledger.db").spent("user").num_releases == 2
    resumed = training_run(
        session(tmp_path / "run", "rounds=20", "resume=true"), Scripted(replies)
    ).run()
    assert (resumed.checkpoint.round, resumed.stopped) == (20, None)


def test_rounds_that_ask_nobody_or_bring_a_reply_do_not_end_a_run(tmp_path: Path) -> None:
    cohorts = [1, 1, 0, 1, 0, 0, 1, 1]  # of these only the one of the second round replies

    def answer(number: int, client: int) -> TrainReply | Failure:
        return replies(number, client) if number == 2 else fails(number, client)

    class Coming(Scripted):
        def available_clients(self) -> Sequence[int]:
            return range(cohorts.pop(0))

    ready = training_run(session(tmp_path / "run", "rounds=8"), Coming(answer))
    with pytest.raises(NobodyAnswers, match="in 2 rounds in a row"):
        ready.run()
    assert ready.folder.read_metrics()[-1]["round"] == 7


def test_a_run_that_all_clients_refuse_from_the_start_is_no_run_that_has_ended_well(
    tmp_path: Path,
) -> None:
    refuses = Scripted(
        lambda number, client: Failure(client, "refused", "the policy of this client")
    )
    words = ("privacy.user.enabled=false", "privacy.user.noise_multiplier=null", *EXAMPLE_ON)
    with pytest.raises(
        NobodyAnswers, match="every client refuses; the last reason: client 9 refused: the policy"
    ):
        run(tmp_path / "run", refuses, *words)


class NoRatings(Scripted):
    """Clients that refuse to rate a model."""

    def ask(
        self, asked: TrainRequest, params: Tensor, cohort: Sequence[int]
    ) -> Iterable[TrainReply | Failure]:
        if asked.work.trains:
            return super().ask(asked, params, cohort)
        return [Failure(client, "refused", "a rating costs too much") for client in cohort]


RATED = ("evaluation.kind=private", "evaluation.every=1")


@pytest.mark.parametrize("refusing", [0, 2])
def test_clients_that_refuse_to_rate_a_model_may_train_on(refusing: int, tmp_path: Path) -> None:
    def answer(number: int, client: int) -> TrainReply | Failure:
        if number == 2 and client < refusing:
            return Failure(client, "refused", "its budget is spent")
        return replies(number, client)

    words = ("privacy.user.enabled=false", "privacy.user.noise_multiplier=null", *EXAMPLE_ON)
    ready = session(tmp_path / "run", *words, *RATED)
    outcome = training_run(ready, NoRatings(answer)).run()
    assert (outcome.checkpoint.round, outcome.stopped) == (ROUNDS, None)
    assert [row["replies"] for row in ready.folder.read_metrics()] == [10, 10 - refusing, 10]


def test_a_client_that_refused_once_and_now_trains_keeps_the_run_going(tmp_path: Path) -> None:
    def answer(number: int, client: int) -> TrainReply | Failure:
        if client % 2 == number % 2:
            return Failure(client, "refused", "it took too long")
        return replies(number, client)

    words = ("privacy.user.enabled=false", "privacy.user.noise_multiplier=null", *EXAMPLE_ON)
    outcome = training_run(session(tmp_path / "run", *words), Scripted(answer)).run()
    assert (outcome.checkpoint.round, outcome.stopped) == (ROUNDS, None)


def test_what_a_client_says_it_spent_can_only_raise_what_is_reported(tmp_path: Path) -> None:
    said = [2.0, 0.0, 1.0]

    def reports(number: int, client: int) -> TrainReply:
        return TrainReply(number, torch.zeros(SIZE), below=True, epsilon_example=said[number - 1])

    words = ["privacy.example.enabled=true", "privacy.example.noise_multiplier=1"]
    assert run(tmp_path / "run", Scripted(reports), *words).epsilon_example == 2.0
    assert [row["epsilon_example"] for row in RunFolder(tmp_path / "run").read_metrics()] == [
        2.0,
        2.0,
        2.0,
    ]


@pytest.mark.parametrize("liars", [1, 3, CLIENTS])
def test_infinite_epsilons_are_counted_and_the_largest_other_one_is_published(
    liars: int, tmp_path: Path
) -> None:
    def reports(number: int, client: int) -> TrainReply:
        said = math.inf if client < liars else 0.5 * number
        return TrainReply(
            number, torch.zeros(SIZE), below=True, epsilon_example=said, client=client
        )

    ready = session(tmp_path / "run", *EXAMPLE_ON)
    outcome = training_run(ready, Scripted(reports)).run()
    finish(ready, outcome)
    example = json.loads((tmp_path / "run" / "privacy.json").read_text())["guarantees"][1]
    # Where nobody has a finite one, there is nothing to publish but infinity.
    assert example["epsilon"]["pld"] == ("inf" if liars == CLIENTS else 0.5 * ROUNDS)
    assert example["clients_without_epsilon"] == liars
    assert f"{liars} of them reported infinity" in example["epsilon_is"]
    status = read_status(ready.folder)
    assert status.failures == {"unaccounted": liars * ROUNDS}
    assert RunFolder(tmp_path / "run").read_metrics()[-1]["replies"] == CLIENTS
    resumed = training_run(
        session(tmp_path / "run", *EXAMPLE_ON, "resume=true"), Scripted(reports)
    ).run()
    assert resumed.checkpoint.unaccounted == [*range(liars)]


def test_a_model_that_can_not_be_clipped_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(
        models.MODELS,
        "own",
        lambda _, classes: nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64), nn.Linear(64, classes)),
    )
    with pytest.raises(ConfigError, match="1 is a BatchNorm1d"):
        session(tmp_path / "run", "model.name=own")
    assert not (tmp_path / "run").exists()
