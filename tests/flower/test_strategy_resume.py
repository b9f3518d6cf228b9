"""A run of DPFedAvg that goes on, its neighbours, its turns, and its form under secure
aggregation."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, Context, Error, Message, MetricRecord, RecordDict

import discreet
from discreet import AdaptiveClipping, FixedClipping
from discreet.ledger.durable_ledger import DurableLedger, LedgerError
from discreet.planning.server_optimizer import ServerSGD
from discreet.privacy.mechanisms import analytic_gaussian_noise_multiplier
from discreet.privacy.randomness import RandomSource
from discreet.protocol.messages import MASKING
from discreet.run_files.run_folder import RunFolder
from discreet.server.population_account import ADJACENCIES, Population, create_account
from discreet.server.transport import NobodyAnswers
from discreet.settings.rules import ConfigError
from tests.flower.flower_apps import (
    NODES,
    NOISED,
    SETTINGS,
    START,
    Answer,
    Nodes,
    arrays,
    changed_by,
    noised,
    replying,
    run,
    status_of,
    strategy,
    values_of,
)
from tests.replay import Replay, replay


def test_a_run_that_goes_on_ends_as_one_that_was_never_ended(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", num_rounds=4, server_optimizer=ServerSGD(momentum=0.5))
    run(tmp_path / "parts", num_rounds=2, server_optimizer=ServerSGD(momentum=0.5))
    parts = run(
        tmp_path / "parts", num_rounds=4, server_optimizer=ServerSGD(momentum=0.5), resume=True
    )
    assert all(np.array_equal(values_of(whole)[name], values_of(parts)[name]) for name in START)
    heads = [RunFolder(tmp_path / name).read_metrics()[-1] for name in ("whole", "parts")]
    assert heads[0]["epsilon_user"] == heads[1]["epsilon_user"]


def test_what_is_not_learned_keeps_the_value_that_the_run_began_with(tmp_path: Path) -> None:
    table, other = (
        np.arange(6).reshape(2, 3),
        {"table": np.zeros((2, 3), int), "steps": np.array(99)},
    )
    start = arrays(table=np.asfortranarray(table))
    strategy(tmp_path / "run").start(Nodes(), start, num_rounds=1, timeout=2.0)
    again = strategy(tmp_path / "run", resume=True)
    result = values_of(again.start(Nodes(), arrays(**other), num_rounds=2, timeout=2.0))
    assert result["steps"] == 3
    assert np.array_equal(result["table"], table)


def test_an_interrupted_run_says_so_and_how_it_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def evaluate(number: int, found: ArrayRecord) -> MetricRecord:
        if number == 2:
            raise KeyboardInterrupt
        return MetricRecord({"loss": 1.0})

    with pytest.raises(KeyboardInterrupt):
        strategy(tmp_path / "run").start(
            Nodes(), arrays(), num_rounds=3, timeout=2.0, evaluate_fn=evaluate
        )
    folder = RunFolder(tmp_path / "run")
    assert status_of(folder.path).state == "interrupted"
    assert (
        f'interrupted after round 1: to resume, use resume=True, output_dir="{folder.path}"'
        in caplog.text
    )
    # Round 2 was charged before it was evaluated, and is done again: the ledger says more, never
    # less.
    run(tmp_path / "run", num_rounds=3, resume=True)
    assert DurableLedger(folder.ledger_path).spent("user").num_releases == 4
    assert status_of(folder.path).state == "finished"


CHANGED: dict[str, tuple[dict[str, Any], str]] = {
    "less noise": (
        noised(noise_multiplier=0.5),
        r"noise_multiplier=0\.5 can't change in a resumed run",
    ),
    "a larger delta": (
        noised(delta=1e-2),
        r"delta=0\.01 can't change in a resumed run, which has delta=0\.001\. Settings that may "
        r"change: num_rounds, min_available_nodes, account, server_optimizer\.learning_rate, "
        r"server_optimizer\.momentum, timeout$",
    ),
    "a smaller fraction": ({"fraction_train": 0.5}, r"fraction_train=0\.5 can't change"),
    "a larger budget": (noised(max_epsilon=90.0), r"max_epsilon=90\.0 can't change"),
    "another clip norm": (noised(clipping=AdaptiveClipping(5.0)), r"clip_norm=5\.0 can't change"),
    "other frozen arrays": (
        {"frozen": "bias"},
        "initial_arrays must have the names, shapes, dtypes and frozen",
    ),
}


def test_a_run_that_goes_on_keeps_what_decides_privacy(tmp_path: Path) -> None:
    run(tmp_path / "run", num_rounds=1)
    for settings, said in CHANGED.values():
        with pytest.raises(ConfigError, match=said):
            run(tmp_path / "run", num_rounds=2, resume=True, **settings)


def test_without_the_arrays_that_it_began_with_a_run_does_not_go_on(tmp_path: Path) -> None:
    run(tmp_path / "run", num_rounds=1)
    RunFolder(tmp_path / "run").arrays_path.unlink()
    with pytest.raises(LedgerError, match=r"arrays\.safetensors is missing"):
        run(tmp_path / "run", num_rounds=2, resume=True)


def test_a_run_goes_on_with_its_account_where_it_was_moved(tmp_path: Path) -> None:
    people = Population("people", 10, ADJACENCIES[0], NOISED.delta)
    old, new = tmp_path / "old.db", tmp_path / "new.db"
    create_account(old, people)
    named = {"population_name": "people", "seed": None}
    run(tmp_path / "run", num_rounds=1, account=str(old), **named)
    for ending in ("", "-wal", "-shm"):
        if (beside := old.with_name(old.name + ending)).exists():
            beside.rename(new.with_name(new.name + ending))
    DurableLedger(new).adopt()
    run(tmp_path / "run", num_rounds=2, account=str(new), resume=True, **named)
    assert DurableLedger(new).total().num_releases == 2
    assert not old.exists()


def test_a_target_is_kept_and_its_noise_does_not_follow_the_rounds(tmp_path: Path) -> None:
    target = noised(noise_multiplier=None, target_epsilon=5.0)
    run(tmp_path / "run", num_rounds=2, **target)
    made = strategy(tmp_path / "run", resume=True, **target)
    made.start(Nodes(), arrays(), num_rounds=9, timeout=2.0)
    assert "beyond max_epsilon=5" in str(made.outcome.stopped)
    assert DurableLedger(tmp_path / "run" / "ledger.db").spent("user").num_releases == 2


def test_a_loss_that_ran_away_stays_so_however_often_the_run_is_resumed(tmp_path: Path) -> None:
    def evaluate(number: int, found: ArrayRecord) -> MetricRecord:
        return MetricRecord({"loss": 1.0 + 5.0 * number})

    first, again = strategy(tmp_path / "run"), strategy(tmp_path / "run", resume=True)
    for made in (first, again):
        made.start(Nodes(), arrays(), num_rounds=20, timeout=2.0, evaluate_fn=evaluate)
        assert "diverged" in str(made.outcome.stopped)
    assert DurableLedger(tmp_path / "run" / "ledger.db").spent("user").num_releases == 5


def test_one_client_of_a_real_federation_can_not_be_given_a_seed(tmp_path: Path) -> None:
    class Real:
        get_node_ids = staticmethod(lambda: [1])

    with pytest.raises(ConfigError, match="seed must be null"):
        strategy(tmp_path / "run").start(Real(), arrays())  # type: ignore[arg-type]
    assert not (tmp_path / "run").exists()


ROUNDS, Z = 3, 1.3
OTHERS: dict[int, Answer] = {1: changed_by(0.01), 2: changed_by(-3.0), 3: changed_by(0.2)}
MANY_EXAMPLES = MetricRecord({"num-examples": 10**9, "loss": 1e9})

WILD: dict[str, Answer] = {
    "near": changed_by(0.02),
    "far": changed_by(1e30, metrics=MANY_EXAMPLES),
    "still": changed_by(0.0),
    "NaN": replying(RecordDict({"arrays": arrays(bias=np.array([np.nan, 1], np.float32))})),
    "the other way": replying(RecordDict({"arrays": arrays(bias=np.array([-1e4, 1e4]))})),
    "malformed": replying(RecordDict({"arrays": arrays(bias=np.zeros(5, np.float32))})),
    "an error": replying(Error(2, "it crashed")),
}


def released(answers: dict[int, Answer], source: RandomSource) -> list[object]:
    """Everything that a run releases, but who took part and how many replied, which is not
    covered."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        settings = {
            "sampling": "everyone",
            "seed": int(1e6 * float(source.uniform(1))),
            **noised(noise_multiplier=Z),
        }
        result = run(path, Nodes(dict(answers)), num_rounds=ROUNDS, **settings)
        rows = RunFolder(path).read_metrics()
    left: list[object] = [torch.from_numpy(values_of(result)[name].copy()) for name in START]
    return left + [
        row[name] for row in rows for name in ("clip_norm", "fraction_below", "epsilon_user")
    ]


def with_and_without(node: Answer) -> list[Replay]:
    with_it, without = {**OTHERS, 4: node}, OTHERS
    return [replay(released, one, other) for one, other in ((with_it, without), (without, with_it))]


@pytest.mark.parametrize("node", WILD.values(), ids=WILD.keys())
def test_one_node_more_or_less_moves_each_noise_step_within_its_sensitivity(node: Answer) -> None:
    for found in with_and_without(node):
        assert found.faults == ()
        assert len(found.shares) == 2 * ROUNDS
        assert found.gaussian_distance <= (1 + 1e-9) * ROUNDS**0.5 / Z


def test_a_node_that_is_far_away_puts_the_bound_to_the_test() -> None:
    for found in with_and_without(WILD["far"]):
        # Differences on the grid are truncated towards zero, by less than 1 part in 1000.
        assert found.shares == pytest.approx([1.0] * 2 * ROUNDS, rel=1e-3)
        assert found.gaussian_distance == pytest.approx(ROUNDS**0.5 / Z, rel=1e-3)


GAUSSIAN = discreet.MaskedGaussian(
    noise_multiplier=1e-9, delta=1e-3, too_noisy="warn", clipping=discreet.FixedClipping(1.0)
)
MASKED = {"mechanism": GAUSSIAN, "sampling": "everyone", "population_size": NODES, "seed": None}


def with_mod(answer: Answer, seen: list[Message]) -> Answer:
    """A client whose app has the mod; `seen` are the messages that reach the app."""

    def app(message: Message, context: Context) -> Message:
        seen.append(message)
        content = answer(message)
        assert isinstance(content, RecordDict)
        return Message(content, reply_to=message)

    def reply(message: Message) -> Any:
        said = discreet.secure_sum_mod(message, Context(1, 1, {}, RecordDict(), {}), app)
        return said.error if said.has_error() else said.content

    return reply


def grid_of(seen: list[Message]) -> Nodes:
    return Nodes(
        answers={node: with_mod(changed_by(0.01 * node), seen) for node in range(1, NODES + 1)}
    )


def test_the_mean_change_is_applied_and_no_change_was_sent_in_the_clear(
    tmp_path: Path,
) -> None:
    seen: list[Message] = []
    grid = grid_of(seen)
    result = run(tmp_path / "run", grid, num_rounds=1, **MASKED)
    # All are asked, and no update is clipped. A step of the grid is 1 / 4096, the noise about one
    # step.
    moved = values_of(result)["weight"] - arrays()["weight"].numpy()
    np.testing.assert_allclose(moved, 0.035, atol=1e-3)
    assert {*seen[0].content} == {"arrays", "config"}  # the app sees what it always saw
    assert len(seen) == NODES
    for_apps = [each for each in grid.sent.values() if MASKING not in each.content]
    assert len(for_apps) == NODES  # each app had a copy of its own
    assert DurableLedger(tmp_path / "run" / "ledger.db").spent("user").num_releases == 1
    assert [row["replies"] for row in RunFolder(tmp_path / "run").read_metrics()] == [NODES]


def test_a_client_with_the_mod_refuses_to_train_in_the_clear(tmp_path: Path) -> None:
    seen: list[Message] = []
    run(tmp_path / "run", grid_of(seen), num_rounds=1, population_size=NODES)
    assert seen == []
    assert [row["replies"] for row in RunFolder(tmp_path / "run").read_metrics()] == [0]


IN_THE_CLEAR: list[Answer] = [
    lambda _: RecordDict({"metrics": MetricRecord({"loss": 1.0})}),
    lambda _: Error(500, "KeyError: 'arrays'"),
]


@pytest.mark.parametrize("answer", IN_THE_CLEAR)
def test_clients_without_the_mod_are_told_so_before_anything_is_charged(
    answer: Answer, tmp_path: Path
) -> None:
    grid = Nodes(answers=dict.fromkeys(range(1, NODES + 1), answer))
    needed = rf"none of {NODES} clients .* ClientApp\(mods=\[discreet\.secure_sum_mod\]\)"
    with pytest.raises(NobodyAnswers, match=needed):
        run(tmp_path / "run", grid, num_rounds=2, **MASKED)
    assert len(grid.sent) == NODES
    assert DurableLedger(tmp_path / "run" / "ledger.db").spent("user").num_releases == 0


WRONG: dict[str, dict[str, Any]] = {
    "sampling must be everyone with mechanism=MaskedGaussian": {"sampling": "poisson"},
    "^accountant must be rdp": {"mechanism": replace(GAUSSIAN, accountant="pld")},
    "^dropouts must be": {"mechanism": replace(GAUSSIAN, dropouts=5)},
    "private_evaluation must be None": {"private_evaluation": discreet.PrivateEvaluation()},
}


def test_what_secure_aggregation_needs_is_said_of_the_argument() -> None:
    for message, given in WRONG.items():
        with pytest.raises(ConfigError, match=message):
            discreet.DPFedAvg(**{**SETTINGS, **MASKED, **given})


TURNS = {"target_epsilon": 4.0, "delta": 1e-3, "clipping": FixedClipping(0.5), "groups": 3}


def turns(**changed: Any) -> dict[str, Any]:
    return {"sampling": "cyclic", "mechanism": discreet.CorrelatedNoise(**{**TURNS, **changed})}


def test_each_node_is_asked_in_its_turn_alone_and_the_target_is_met(tmp_path: Path) -> None:
    grid = Nodes()
    run(tmp_path / "run", grid, num_rounds=7, **turns())
    asked = [
        (int(each.metadata.group_id), each.metadata.dst_node_id) for each in grid.sent.values()
    ]
    assert asked == [
        (number, node)
        for number in range(1, 8)
        for node in range(1, NODES + 1)
        if node % 3 == (number - 1) % 3
    ]
    spent = DurableLedger(tmp_path / "run" / "ledger.db").spent("user")
    assert 3.99 < spent.epsilon(1e-3) <= 4.0 * (1 + 1e-9)
    events = [
        event.noise_multiplier**-2 * count
        for event, count in spent.entries
        if hasattr(event, "noise_multiplier")
    ]
    assert analytic_gaussian_noise_multiplier(4.0, delta=1e-3) == pytest.approx(
        sum(events) ** -0.5, rel=1e-3
    )
    said = json.loads((tmp_path / "run" / "privacy.json").read_text())["guarantees"][0]
    assert "3 public groups in turn" in said["mechanism"]
    assert "one node" in said["adjacency"]


def test_nodes_that_miss_their_turn_change_neither_noise_nor_account(tmp_path: Path) -> None:
    there, gone = (
        Nodes(),
        Nodes({node: changed_by(0.01) if node % 2 else replying(None) for node in range(1, 7)}),
    )
    for name, grid in (("there", there), ("gone", gone)):
        run(tmp_path / name, grid, num_rounds=3, **turns())
    one, other = (
        DurableLedger(tmp_path / name / "ledger.db").spent("user") for name in ("there", "gone")
    )
    assert one == other


NO_TURNS: dict[str, dict[str, Any]] = {
    "groups must be given with sampling=cyclic": turns(groups=None),
    "clipping must be fixed": turns(clipping=discreet.AdaptiveClipping(0.5)),
    "noise must be grid": turns(noise="float"),
    "fraction_train must be 1 with sampling=cyclic": {**turns(), "fraction_train": 0.5},
}


def test_what_does_not_go_with_turns_is_refused_in_the_words_of_the_arguments(
    tmp_path: Path,
) -> None:
    for said, words in NO_TURNS.items():
        with pytest.raises(ConfigError, match=f"^{said}"):
            run(tmp_path / "run", **words)
