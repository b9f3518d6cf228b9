"""`local_dp_mod`: what leaves a node of an ordinary Flower app, what it costs, and what never
leaves."""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Context,
    Error,
    Message,
    MetricRecord,
    RecordDict,
)
from flwr.clientapp import ClientApp
from scipy.optimize import brentq
from scipy.stats import norm

from discreet import ConfigError, DPFedAvg, local_dp_mod
from discreet.flower.local_dp_mod import _warn_of_evaluation
from discreet.ledger.durable_ledger import DurableLedger
from tests.flower.flower_apps import START, arrays, changed_by

GIVEN = {"clip_norm": 0.5, "target_epsilon": 8.0, "delta": 1e-5}


def delta_of(z: float, epsilon: float) -> float:
    """Of one Gaussian of multiplier z: Balle and Wang 2018, Theorem 8."""
    return float(
        norm.cdf(0.5 / z - epsilon * z) - math.exp(epsilon) * norm.cdf(-0.5 / z - epsilon * z)
    )


Z = brentq(lambda z: delta_of(z, 8.0) - 1e-5, 0.1, 10)
WIDE = {"weight": np.zeros((300, 300), np.float32), "steps": np.array(3, np.int64)}


@pytest.fixture(autouse=True)
def _identity(monkeypatch: pytest.MonkeyPatch) -> None:
    import flwr.supercore.task_identity as identity

    for name in ("_run_id", "_node_id", "_task_id"):
        monkeypatch.setattr(identity.TaskIdentity, name, 1)


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    DurableLedger.create(tmp_path / "node.db")
    return tmp_path / "node.db"


def message(record: ArrayRecord, kind: str = "train") -> Message:
    content = RecordDict({"arrays": record, "config": ConfigRecord({"server-round": 3})})
    return Message(content, dst_node_id=1, message_type=kind)


def answer(mod, sent: Message, app, **node: str) -> Message:
    context = Context(1, 1, node, RecordDict(), {})

    def call_next(given: Message, _: Context) -> Message:
        return Message(app(given), reply_to=given)

    return mod(sent, context, call_next)


def returning(values: dict[str, np.ndarray], **metrics: float):
    record = ArrayRecord({name: Array(value) for name, value in values.items()})
    return lambda _: RecordDict(
        {"arrays": record, "metrics": MetricRecord({"num-examples": 71, **metrics})}
    )


def test_the_difference_is_clipped_and_noised_for_replacement_and_integers_stay(
    ledger: Path,
) -> None:
    mod = local_dp_mod(**GIVEN, rounds=4, ledger=ledger)
    sent = ArrayRecord({name: Array(value) for name, value in WIDE.items()})
    reply = answer(
        mod, message(sent), returning({"weight": WIDE["weight"] + 100, "steps": np.array(9)})
    ).content
    noise = reply["arrays"]["weight"].numpy().ravel()
    # four rounds take twice Z; the sensitivity is 2 * 0.5
    deviation, wanted = (
        noise.std(),
        2 * Z * (2 * 0.5),
    )
    # false alarm 1e-10
    assert deviation == pytest.approx(wanted, rel=6.5 / math.sqrt(2 * noise.size))
    assert abs(noise.mean() - 0.5 / 300) < 6.5 * wanted / math.sqrt(noise.size)
    assert reply["arrays"]["steps"].numpy() == 3
    assert dict(reply["metrics"]) == {"num-examples": 1}


def test_it_is_charged_before_the_app_is_called_and_ends_at_the_target(ledger: Path) -> None:
    mod, seen = local_dp_mod(**GIVEN, rounds=3, ledger=ledger), []

    def app(given: Message) -> RecordDict:
        seen.append(DurableLedger(ledger).spent("local").num_releases)
        return changed_by(0.1)(given)

    replies = [answer(mod, message(arrays()), app) for _ in range(4)]
    assert [reply.has_error() for reply in replies] == [False, False, False, True]
    assert seen == [1, 2, 3]
    assert "local-level budget is spent" in replies[-1].error.reason
    spent = DurableLedger(ledger).spent("local")
    assert spent.epsilon(1e-5, "pld") == pytest.approx(8.0, abs=0.01)
    alone = PLDAccountant().compose(GaussianDpEvent(Z * math.sqrt(3)), 3).get_epsilon(1e-5)
    assert spent.epsilon(1e-5, "pld") == pytest.approx(alone, abs=0.01)


@pytest.mark.parametrize(
    "values",
    [
        {**START, "bias": np.array([np.nan, 1], np.float32)},
        {
            **START,
            "bias": np.array([3e38, -3e38], np.float32),
            "weight": np.full((2, 3), np.inf, np.float32),
        },
        {**START, "weight": np.zeros((3, 3), np.float32)},
        {"other": np.zeros(2, np.float32)},
    ],
    ids=["nan", "infinite", "shape", "names"],
)
def test_what_does_not_fit_counts_as_no_change_and_is_not_told(
    values: dict[str, np.ndarray], ledger: Path
) -> None:
    reply = answer(
        local_dp_mod(**GIVEN, rounds=2, ledger=ledger), message(arrays()), returning(values)
    )
    assert not reply.has_error()
    assert {*reply.content["arrays"]} == {*START}
    assert all(np.isfinite(array.numpy()).all() for array in reply.content["arrays"].values())


def ends(_: Message) -> RecordDict:
    sys.exit("patient Ann Lee has HIV")


def raises(_: Message) -> RecordDict:
    raise ValueError("patient Ann Lee has HIV")


def named_by_its_data(_: Message) -> RecordDict:
    return RecordDict({"has HIV": arrays(), "Ann": MetricRecord({"Ann Lee": 1})})


FAILING = {
    "raises": raises,
    "ends": ends,
    "error": lambda _: Error(1, "patient Ann Lee has HIV"),
    "no arrays": lambda _: RecordDict({"metrics": MetricRecord({"Ann Lee": 1})}),
    "two records": lambda _: RecordDict({"has HIV": arrays(), "Ann Lee": arrays()}),
    "named by its data": named_by_its_data,
}


@pytest.mark.parametrize("app", FAILING.values(), ids=FAILING.keys())
def test_a_reply_of_the_same_kind_leaves_whatever_the_app_does(app, ledger: Path) -> None:
    ranges = {"loss": (0.0, 4.0)}
    mod = local_dp_mod(**GIVEN, rounds=2, ledger=ledger, metrics=ranges)
    try:
        failed, worked = (answer(mod, message(arrays()), each) for each in (app, changed_by(0.1)))
    except SystemExit:
        pytest.fail("the app ended the process")
    for reply in (failed, worked):
        assert not reply.has_error()
        assert [*reply.content] == ["arrays", "metrics"]
        assert [*reply.content["metrics"]] == ["num-examples", "loss"]
        assert {name: array.shape for name, array in reply.content["arrays"].items()} == {
            name: value.shape for name, value in START.items()
        }
    assert DurableLedger(ledger).spent("local").num_releases == 4


BELOW = [
    {"require": "secure"},
    {"require": "example"},
    {"min-noise-multiplier": "50"},
    {"max-delta": "1e-7"},
    {"max-epsilon": "0.5", "max-delta": "1e-5"},
    {"min-groups": "3"},
    {"max-epsilonn": "1"},
]


@pytest.mark.parametrize("policy", BELOW, ids=map(str, BELOW))
def test_a_policy_of_the_owner_that_it_does_not_meet_is_a_refusal_at_no_cost(
    policy: dict[str, str], ledger: Path
) -> None:
    called = []
    mod = local_dp_mod(**GIVEN, rounds=4, ledger=ledger)
    assert answer(mod, message(arrays()), called.append, **policy).has_error()
    assert called == []
    assert DurableLedger(ledger).spent("local").num_releases == 0


def test_a_policy_that_it_meets_is_no_refusal(ledger: Path) -> None:
    met = {
        "require": "local",
        "min-noise-multiplier": "0.5",
        "max-epsilon": "9",
        "max-delta": "1e-5",
    }
    mod = local_dp_mod(**GIVEN, rounds=4, ledger=ledger)
    assert not answer(mod, message(arrays()), changed_by(0.1), **met).has_error()


@pytest.mark.parametrize("kind", ["evaluate", "query", "evaluate.default"])
def test_other_messages_are_refused_and_the_app_is_not_called(kind: str, ledger: Path) -> None:
    called = []
    reply = answer(
        local_dp_mod(**GIVEN, rounds=2, ledger=ledger), message(arrays(), kind), called.append
    )
    assert "only train messages" in reply.error.reason
    assert "set fraction_evaluate=0," in reply.error.reason
    assert called == []
    assert DurableLedger(ledger).spent("local").num_releases == 0


@pytest.mark.parametrize(("share", "count"), [(0.5, 1), (0.0, 0), (None, 0)])
def test_a_templates_share_of_evaluation_is_told_once_and_before_anything_is_spent(
    share: float | None, count: int, ledger: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _warn_of_evaluation.cache_clear()
    config = {} if share is None else {"fraction-evaluate": share}
    mod = local_dp_mod(**GIVEN, rounds=2, ledger=ledger)
    spent = []

    def told_so_far(given: Message, _: Context) -> Message:
        spent.append([each.getMessage() for each in caplog.records])
        return Message(changed_by(0.1)(given), reply_to=given)

    for _ in range(2):
        mod(message(arrays()), Context(1, 1, {}, RecordDict(), config), told_so_far)
    assert [len(told) for told in spent] == [count, count]
    for said in spent[0]:
        assert "fraction-evaluate=0.5" in said
        assert "start(evaluate_fn=...)" in said
        assert "local_dp_mod(metrics=" in said


def test_an_argument_that_is_not_known_is_an_error_with_the_one_that_is_meant() -> None:
    with pytest.raises(TypeError, match=r"^local_dp_mod has no argument clip; .* clip_norm\?$"):
        local_dp_mod(clip=1.0)  # type: ignore[call-arg]


def test_without_a_ledger_nothing_leaves(tmp_path: Path) -> None:
    mod, app = local_dp_mod(**GIVEN, rounds=2), changed_by(0.1)
    assert "has no ledger" in answer(mod, message(arrays()), app).error.reason
    missing = answer(mod, message(arrays()), app, ledger=str(tmp_path / "none.db"))
    assert missing.error.reason == "the ledger of this client can't be used"
    DurableLedger.create(tmp_path / "own.db")
    assert not answer(mod, message(arrays()), app, ledger=str(tmp_path / "own.db")).has_error()


@pytest.mark.parametrize("content", [b"", b"no ledger at all", None], ids=["cut", "other", "half"])
def test_with_a_damaged_ledger_nothing_leaves_and_the_app_is_not_called(
    content: bytes | None, ledger: Path
) -> None:
    mod, called = local_dp_mod(**GIVEN, rounds=2, ledger=ledger), []
    ledger.write_bytes(ledger.read_bytes()[:2000] if content is None else content)
    reply = answer(mod, message(arrays()), called.append)
    assert reply.error.reason == "the ledger of this client can't be used"
    assert called == []


def test_a_message_with_two_records_of_arrays_is_refused_at_no_cost(ledger: Path) -> None:
    mod = local_dp_mod(**GIVEN, rounds=2, ledger=ledger)
    two = message(arrays())
    two.content["more"] = arrays()
    assert answer(mod, two, changed_by(0.1)).has_error()
    assert DurableLedger(ledger).spent("local").num_releases == 0


@pytest.mark.parametrize("number", [2**70, -1, "abc", 1.5, True], ids=str)
def test_a_round_that_is_no_number_of_a_round_is_refused_at_no_cost(
    number: object, ledger: Path, caplog: pytest.LogCaptureFixture
) -> None:
    called = []
    sent = message(arrays())
    sent.content["config"] = ConfigRecord({"server-round": number})
    reply = answer(local_dp_mod(**GIVEN, rounds=2, ledger=ledger), sent, called.append)
    assert reply.error.reason.startswith("server-round must be a whole number from 0 to 2^63 - 1")
    assert str(number) in reply.error.reason
    assert called == []
    assert DurableLedger(ledger).spent("local").num_releases == 0
    assert not any(record.exc_info for record in caplog.records)


def test_a_metric_leaves_with_a_public_range_alone_noised_and_paid_for(ledger: Path) -> None:
    # Noise on the grid is 0 once in some 40 values: not for all seven but once in 10^11 runs.
    losses = [f"loss-{number}" for number in range(7)]
    mod = local_dp_mod(
        **GIVEN | {"target_epsilon": 1e4},
        rounds=1,
        ledger=ledger,
        metrics=dict.fromkeys(losses, (0.0, 4.0)),
    )
    sent = returning(START, **dict.fromkeys(losses, 1.0), accuracy=0.9)
    said = answer(mod, message(arrays()), sent).content["metrics"]
    assert {*said} == {"num-examples", *losses}
    values = [float(said[name]) for name in losses]
    assert values == pytest.approx([1.0] * 7, abs=2.0)
    assert values != [1.0] * 7
    assert DurableLedger(ledger).spent("local").num_releases == 2
    ends = answer(
        local_dp_mod(**GIVEN, rounds=1, ledger=ledger, metrics={"loss": (0.0, 4.0)}),
        message(arrays()),
        returning(START, loss=math.nan),
    )
    assert ends.has_error()  # the ledger remembers what another mod has spent


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"clip_norm": 0.0}, "clip_norm must be"),
        ({"target_epsilon": -1.0}, "target_epsilon must be"),
        ({"delta": 1.0}, "delta must be"),
        ({"rounds": 0}, "rounds must be"),
        ({"metrics": {"loss": (1.0, 1.0)}}, "metrics must have finite ranges"),
        ({"metrics": {"loss": 1.0}}, "metrics must have finite ranges"),
        ({"metrics": "loss"}, r"metrics must have finite ranges .* \(got 'loss'\)"),
    ],
)
def test_wrong_arguments_are_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises((ConfigError, ValueError), match=said):
        local_dp_mod(**{**GIVEN, "rounds": 2, **wrong})


def test_the_python_of_the_page_runs(ledger: Path) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "guide" / "flower_privacy.md"
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        exec(block, names)
    assert isinstance(names["app"], ClientApp)
    assert isinstance(names["strategy"], DPFedAvg)
