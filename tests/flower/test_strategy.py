"""DPFedAvg drives clients of any Flower app: what is sent, what counts, what is spent, and what is
not looked at."""

from __future__ import annotations

import json
import logging
import math
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.pld import PLDAccountant
from flwr.app import Array, ArrayRecord, Error, Message, MessageType, MetricRecord, RecordDict
from safetensors.numpy import load_file

import discreet
from discreet import AdaptiveClipping, FixedClipping, PrivateEvaluation
from discreet.ledger.durable_ledger import DurableLedger
from discreet.planning.plan import Plan
from discreet.run_files.predictions import load_model
from discreet.run_files.resuming import asked_settings
from discreet.run_files.run_folder import RunFolder
from discreet.settings.adjacency import USER
from discreet.settings.rules import ConfigError
from tests.command import ledger, report, status
from tests.flower.flower_apps import (
    NODES,
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
from tests.mechanisms.signs import Signs

EXACT: dict[str, Any] = {"noise": "float", "noise_multiplier": 0.0}


def noiseless(clip_norm: float = 0.5) -> dict[str, Any]:
    fixed = noised(**EXACT, clipping=FixedClipping(clip_norm))
    return {"sampling": "everyone", "population_size": NODES, **fixed}


def test_without_noise_the_model_moves_by_the_mean_of_the_differences(tmp_path: Path) -> None:
    moved = values_of(run(tmp_path / "run", num_rounds=3, **noiseless()))
    assert np.allclose(moved["weight"], START["weight"] + 0.03, atol=1e-6)
    assert np.allclose(moved["bias"], 0.03, atol=1e-6)


def test_the_difference_is_clipped_as_one_vector_over_all_arrays(tmp_path: Path) -> None:
    grid = Nodes(dict.fromkeys(range(1, NODES + 1), changed_by(100.0)))
    moved = values_of(run(tmp_path / "run", grid, num_rounds=1, **noiseless()))
    change = np.concatenate([(moved[name] - START[name]).ravel() for name in ("weight", "bias")])
    assert np.allclose(change, 0.5 / math.sqrt(8), rtol=1e-3)


def test_a_bit_says_whether_the_difference_was_within_the_clip_norm(tmp_path: Path) -> None:
    far, near = changed_by(9.0), changed_by(0.01)
    grid = Nodes({1: far, 2: far, 3: far, 4: near})
    mechanism = noised(**EXACT, clipping=AdaptiveClipping(0.5, count_stddev=1e-6))
    run(tmp_path / "run", grid, sampling="everyone", population_size=4, **mechanism)
    assert RunFolder(tmp_path / "run").read_metrics()[0]["fraction_below"] == pytest.approx(
        0.25, abs=1e-4
    )


def test_a_mechanism_of_ones_own_does_the_rounds_and_they_are_charged(tmp_path: Path) -> None:
    own = {"mechanism": Signs(noise_multiplier=2.0), "delta": 1e-3, "clip_norm": 1.0}
    moved = values_of(run(tmp_path / "run", **own))
    assert not np.allclose(moved["bias"], START["bias"])
    spent = DurableLedger(tmp_path / "run" / "ledger.db").spent("user")
    assert spent.entries == ((GaussianDpEvent(2.0), 2),)
    kept = RunFolder(tmp_path / "run").read_config().privacy.user.mechanism
    assert kept == "tests.mechanisms.signs:Signs"


def test_an_on_round_that_fails_ends_the_run_and_costs_no_round(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "run", num_rounds=3, on_round=lambda row: 1 / 0)
    run(tmp_path / "run", num_rounds=3, resume=True)
    assert DurableLedger(tmp_path / "run" / "ledger.db").spent("user").num_releases == 3


def test_the_ledger_holds_what_an_accountant_of_its_own_computes(tmp_path: Path) -> None:
    run(tmp_path / "run", num_rounds=3, fraction_train=0.4)
    wanted = (
        PLDAccountant()
        .compose(PoissonSampledDpEvent(0.4, GaussianDpEvent(1.0)), 3)
        .get_epsilon(1e-3)
    )
    spent = DurableLedger(tmp_path / "run" / "ledger.db").spent("user")
    assert spent.num_releases == 3
    assert spent.epsilon(1e-3) == pytest.approx(wanted, rel=1e-3)


def test_what_clients_report_beside_their_arrays_changes_nothing(tmp_path: Path) -> None:
    told = MetricRecord({"num-examples": 10**6, "loss": math.nan, "accuracy": 1.0})
    other = Nodes(dict.fromkeys(range(1, NODES + 1), changed_by(0.01, metrics=told)))
    plain, with_metrics = run(tmp_path / "plain"), run(tmp_path / "other", other)
    assert all(
        np.array_equal(values_of(plain)[name], values_of(with_metrics)[name]) for name in START
    )
    assert with_metrics.train_metrics_clientapp == with_metrics.evaluate_metrics_clientapp == {}


def announcing(shape: str) -> ArrayRecord:
    """Arrays of which one says in its own header that it has another shape."""
    data = Array(START["bias"]).data.replace(b"(2,)", shape.encode())
    return ArrayRecord({**arrays(), "bias": Array("float32", (2,), "numpy.ndarray", data)})


BAD = {
    "an error": Error(2, "it crashed"),
    "late": None,
    "no arrays": RecordDict({"metrics": MetricRecord({"num-examples": 1})}),
    "two records of arrays": RecordDict({"arrays": arrays(), "more": arrays()}),
    "an array is missing": RecordDict({"arrays": ArrayRecord({"weight": Array(START["weight"])})}),
    "another name": RecordDict({"arrays": arrays(other=START["bias"])}),
    "another shape": RecordDict({"arrays": arrays(bias=np.zeros(3, np.float32))}),
    "a shape that would broadcast": RecordDict(
        {"arrays": arrays(weight=np.zeros((1, 3), np.float32))}
    ),
    "whole numbers of another shape": RecordDict({"arrays": arrays(steps=np.zeros(4, np.int64))}),
    "whole numbers for floats": RecordDict({"arrays": arrays(bias=np.zeros(2, np.int64))}),
    "NaN": RecordDict({"arrays": arrays(bias=np.array([np.nan, 0], np.float32))}),
    "infinity": RecordDict({"arrays": arrays(bias=np.array([np.inf, 0], np.float32))}),
    "beyond float32": RecordDict({"arrays": arrays(bias=np.array([1e300, 0]))}),
    "a shape beyond belief": RecordDict({"arrays": announcing("(9000000000000,)")}),
    "a negative shape": RecordDict({"arrays": announcing("(-2, -1)")}),
    "bytes of no array": RecordDict(
        {"arrays": ArrayRecord({**arrays(), "bias": Array("float32", (2,), "numpy.ndarray", b"")})}
    ),
}


def test_a_reply_that_can_not_be_used_counts_as_zero_and_the_noise_stays(tmp_path: Path) -> None:
    still, nodes = changed_by(0.0), range(1, len(BAD) + 1)
    settings = {
        "sampling": "everyone",
        "population_size": 20,
        **noised(clipping=FixedClipping(0.5)),
    }
    bad = strategy(tmp_path / "bad", **settings)
    grid = Nodes({0: still, **dict(zip(nodes, map(replying, BAD.values()), strict=True))})
    found = bad.start(grid, arrays(), num_rounds=1, timeout=0.5)
    wanted = run(
        tmp_path / "good", Nodes(dict.fromkeys((0, *nodes), still)), num_rounds=1, **settings
    )
    assert all(np.array_equal(values_of(found)[name], values_of(wanted)[name]) for name in START)
    assert sum(status_of(tmp_path / "bad").failures.values()) == len(BAD)


def test_a_round_is_logged_and_the_budget_ends_the_run_well(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = strategy(
        tmp_path / "run", fraction_train=0.5, **noised(max_epsilon=4.0, too_noisy="warn")
    )
    with caplog.at_level(logging.INFO, logger="discreet"):
        result = made.start(Nodes(), arrays(), num_rounds=50, timeout=2.0)
    folder = RunFolder(tmp_path / "run")
    assert "beyond max_epsilon=4" in made.outcome.stopped
    assert status_of(folder.path).reason == made.outcome.stopped
    assert DurableLedger(folder.ledger_path).spent("user").epsilon(1e-3) <= 4
    assert set(values_of(result)) == set(START)
    assert sum("round 1/50  clip 0.5" in message for message in caplog.messages) == 1
    assert sum("they are not private" in message for message in caplog.messages) == 1


def test_the_servers_own_evaluation_is_logged_returned_and_kept(tmp_path: Path) -> None:
    seen = []

    def evaluate(number: int, found: ArrayRecord) -> MetricRecord | None:
        seen.append((number, list(found)))
        return MetricRecord({"test_loss": 2.0 - number, "accuracy": 0.5}) if number != 1 else None

    result = strategy(tmp_path / "run").start(
        Nodes(), arrays(), num_rounds=2, timeout=2.0, evaluate_fn=evaluate
    )
    assert seen == [(number, list(START)) for number in (0, 1, 2)]
    assert {n: dict(found) for n, found in result.evaluate_metrics_serverapp.items()} == {
        0: {"test_loss": 2.0, "accuracy": 0.5},
        2: {"test_loss": 0.0, "accuracy": 0.5},
    }
    assert [row["loss"] for row in RunFolder(tmp_path / "run").read_metrics()] == [None, 0.0]


def test_other_commands_accept_the_run_folder_and_its_statement_is_about_a_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    result = run(folder)
    assert status([str(folder)]) == 0
    assert report([str(folder)]) == 0
    assert ledger(["show", str(folder)]) == 0
    assert ledger(["verify", str(folder)]) == 0
    said = capsys.readouterr().out
    assert "round      2 of 2" in said
    assert "2 x GaussianDpEvent(noise_multiplier=1.0)" in said
    saved = load_file(folder / "model.safetensors")
    assert all(np.array_equal(saved[name], values) for name, values in values_of(result).items())
    user, *others = json.loads((tmp_path / "run" / "privacy.json").read_text())["guarantees"]
    stated = [user[name] for name in ("unit", "adjacency", "trusted")]
    assert stated == ["everything that one node holds", "add or remove one node", "the server"]
    held = [
        any(word in part for part in user["not_covered"])
        for word in ("train_config", "evaluate_fn", "keep state")
    ]
    assert held == [True, True, False]
    assert [other["epsilon"] for other in others] == [{"pld": "inf"}, {"pld": "inf"}]
    with pytest.raises(ConfigError, match="arrays of another Flower app"):
        load_model(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"run of another Flower app: .*resume=True"):
        asked_settings(["resume=true", f"output_dir={tmp_path / 'run'}"])


def test_half_precision_stays_finite_however_far_the_model_goes(tmp_path: Path) -> None:
    start = arrays(bias=np.full(2, 6e4, np.float16))
    grid = Nodes(
        dict.fromkeys(
            range(1, NODES + 1), replying(RecordDict({"arrays": arrays(bias=np.full(2, 1e8))}))
        )
    )
    made = strategy(tmp_path / "run", **noiseless(1e6))
    result = made.start(grid, start, num_rounds=3, timeout=2.0)
    assert np.array_equal(values_of(result)["bias"], np.full(2, 65504, np.float16))


RATED: dict[str, Any] = {
    "private_evaluation": discreet.PrivateEvaluation(every=2, metric="acc", noise_multiplier=1e-3)
}


def saying(share: float) -> Answer:
    def answer(message: Message) -> RecordDict:
        if message.metadata.message_type == MessageType.EVALUATE:
            return RecordDict({"metrics": MetricRecord({"loss": 3.0, "acc": share})})
        return changed_by(0.01)(message)

    return answer


def rated(
    folder: Path, shares: list[float], **settings: Any
) -> tuple[list[dict[str, float | None]], Nodes]:
    grid = Nodes({number: saying(share) for number, share in enumerate(shares, start=1)})
    everyone = {"sampling": "everyone", "population_size": len(shares), **RATED, **settings}
    run(folder, grid, num_rounds=3, **everyone)
    return RunFolder(folder).read_metrics(), grid


def test_the_mean_of_what_clients_say_is_in_the_row_of_the_round_that_made_the_model(
    tmp_path: Path,
) -> None:
    found, grid = rated(tmp_path / "run", [0.5, 0.75, 1.0, 0.25])
    assert [row["accuracy"] is not None for row in found] == [False, True, True]
    assert found[1]["accuracy"] == pytest.approx(0.625, abs=0.01)
    assert found[1]["accuracy_error"] == pytest.approx(1e-3 / 8)
    asked = [
        message
        for message in grid.sent.values()
        if message.metadata.message_type == MessageType.EVALUATE
    ]
    assert len(asked) == 8


@pytest.mark.parametrize("wild", [1e30, -7.0, math.nan, math.inf])
def test_one_client_moves_the_mean_by_no_more_than_its_share(tmp_path: Path, wild: float) -> None:
    found, _ = rated(tmp_path / "run", [0.5, 0.5, 0.5, wild])
    assert abs(float(str(found[1]["accuracy"])) - 0.5) <= 0.5 / 4 + 0.01


def test_a_rating_is_charged_as_an_event_of_its_own(tmp_path: Path) -> None:
    rated(tmp_path / "run", [0.5] * NODES, **noised(noise_multiplier=2.0))
    folder = RunFolder(tmp_path / "run")
    spent = folder.ledger(Plan(folder.read_config())).spent(USER)
    assert [(event.noise_multiplier, count) for event, count in spent.entries] == [
        (2.0, 3),
        (1e-3, 2),
    ]


def clipped(norm: float | None = None) -> dict[str, Any]:
    return {"population_size": 60, **noised(clipping=AdaptiveClipping(norm))}


def many(step: float = 0.35) -> Nodes:
    """Nodes whose differences are sqrt(8) times so long."""
    return Nodes(dict.fromkeys(range(1, 61), changed_by(step)))


def rows(folder: Path) -> list[dict[str, Any]]:
    return RunFolder(folder).read_metrics()


def test_each_clip_norm_follows_from_what_was_released(tmp_path: Path) -> None:
    run(tmp_path / "run", many(), num_rounds=6, **clipped())
    found = rows(tmp_path / "run")
    assert found[0]["clip_norm"] == 0.1
    for before, after in pairwise(found):
        miss = before["fraction_below"] - 0.5
        sure = math.copysign(max(0.0, abs(miss) - 2 * max(60 / 20, 2.54) / 60), miss)
        step = 0.2 * miss + 5 / 2 ** (before["round"] - 1) * sure
        assert after["clip_norm"] == pytest.approx(before["clip_norm"] * math.exp(-step), rel=1e-6)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (lambda number, _: MetricRecord({"loss": 2.0 - 0.1 * number}), None),
        (lambda number, _: MetricRecord({"accuracy": 0.1 * number}), None),
        (
            lambda *_: MetricRecord({"loss": 2.0, "accuracy": 0.1}),
            ", and the model does not improve. ",
        ),
        (None, ". "),
    ],
    ids=["loss falls", "accuracy rises", "neither moves", "nothing is known"],
)
def test_a_run_that_clips_nearly_all_updates_warns_once_unless_the_model_improves(
    found: Any, said: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    strategy(tmp_path / "run", **clipped(0.01)).start(many(), arrays(), 5, 2.0, evaluate_fn=found)
    told = [record.message for record in caplog.records if "clipped" in record.message]
    start = "more than 80 % of the updates were clipped in each of the last 3 rounds"
    assert [message.rpartition("The clip norm is ")[0] for message in told] == (
        [] if said is None else [start + said]
    )
    assert all(
        re.search(r"is now 0\.0\d+: consider a larger clip_norm$", message) for message in told
    )


@pytest.mark.parametrize(
    ("found", "rating", "unseen"),
    [
        (None, None, True),
        ({"test_acc": 0.5}, None, False),
        ({"f1": 0.5}, None, True),
        (None, PrivateEvaluation(every=1), False),
    ],
)
def test_a_run_that_nobody_evaluates_says_that_nobody_will_see_whether_it_learns(
    found: dict[str, float] | None,
    rating: PrivateEvaluation | None,
    unseen: bool,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = strategy(tmp_path / "run", private_evaluation=rating)
    made.start(
        Nodes(),
        arrays(),
        2,
        0.3,
        evaluate_fn=None if found is None else lambda *_: MetricRecord(found),
    )
    assert caplog.text.count("no accuracy will be reported: give start an evaluate_fn") == unseen
