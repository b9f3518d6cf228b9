"""Nothing that DPFedAvg is given is ignored: what it can't honour is an error that names it and
says what to do."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict
from flwr.serverapp import Grid, ServerApp

from discreet import AdaptiveClipping, FixedClipping, PrivateEvaluation
from discreet.flower.array_layout import layout_of
from discreet.flower.strategy import DPFedAvg
from discreet.ledger.durable_ledger import DurableLedger, LedgerError
from discreet.protocol.messages import MalformedMessage
from discreet.server.population_account import ADJACENCIES, Population, create_account
from discreet.settings.rules import ConfigError
from tests.flower.flower_apps import (
    NODES,
    SETTINGS,
    Nodes,
    arrays,
    changed_by,
    noised,
    run,
    status_of,
    strategy,
    values_of,
)

SHORT: dict[str, Any] = {"mechanism": None, "target_epsilon": 8.0}
ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    (
        {"fraction_evaluate": 1.0},
        r"fraction_evaluate must be omitted, None or 0: .* start\(evaluate_fn=.*private_evaluation=",
    ),
    ({"weighted_by_key": "num-examples"}, "weighted_by_key must be omitted, None or 0: weights"),
    ({"min_train_nodes": 2, "fraction_train": 0.5}, r"min_train_nodes must be 0: .* \(got 2\)"),
    ({"min_train_nodes": 9, "min_available_nodes": 8}, "min_train_nodes must be 0"),
    ({"population_size": None}, "population_size must be a whole number"),
    ({"population_size": 0}, r"^population_size must be within \[1, 1e\+09\] \(got 0\)$"),
    ({"min_available_nodes": 11}, r"min_available_nodes must be within \[1, popul"),
    ({"fraction_train": 0.0}, r"fraction_train must be within \(0, 1\]"),
    ({"fraction_train": 0.5, "sampling": "everyone"}, "fraction_train must be 1 with sampling=ev"),
    (noised(target_epsilon=8.0), "^noise_multiplier and target_epsilon are both given"),
    ({"mechanism": None}, "^target_epsilon must be given, or mechanism"),
    ({"clip_norm": 1.0}, "^clip_norm must be omitted with a mechanism"),
    ({"mechanism": "gaussian"}, r"^mechanism must be a CentralGaussian, .* \(got str\)"),
    (noised(clipping="fixed"), r"^clipping must be an AdaptiveClipping or a Fixed.* \(got str\)"),
    ({**SHORT, "delta": 0.0}, r"^delta must be within \(0, 1\)"),
    (noised(delta=0.2), r"delta must be below 1 / population_size = 0\.1, for instance 0\.01"),
    ({**SHORT, "clip_norm": 0.0}, r"^clip_norm must be within \[1e-09, 1e\+09\]"),
    (noised(clipping=FixedClipping(0.0)), r"^clip_norm must be within \[1e-09, 1e\+09\]"),
    (
        noised(clipping=AdaptiveClipping(1.0, maximum=0.5)),
        r"^clipping\.maximum must be within \[1, ",
    ),
    (noised(clipping=AdaptiveClipping(count_stddev=-1.0)), r"^clipping\.count_stddev must be 0"),
    ({"sampling": "fixed"}, "accountant must be rdp with sampling=fixed"),
    (
        {**SHORT, "target_epsilon": "8"},
        r"^target_epsilon must be a number, .* \(got the text '8'\)",
    ),
    ({"on_round": "print"}, r"^on_round must be a function \(got print\)"),
    (
        {"private_evaluation": "accuracy"},
        r"^private_evaluation must be a PrivateEvalua.* \(got str",
    ),
    (
        {"private_evaluation": PrivateEvaluation(metric=3)},  # type: ignore[arg-type]
        r"^private_evaluation\.metric must be the name of a metric \(got 3\)",
    ),
    ({"resume": True, "output_dir": None}, "output_dir must be given with resume=True"),
]


def test_a_templates_share_of_evaluation_ends_its_app_before_a_client_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    nodes = Nodes()
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        share = context.run_config["fraction-evaluate"]
        private = DPFedAvg(fraction_evaluate=share, population_size=NODES, target_epsilon=8.0)
        private.start(grid, arrays(), num_rounds=2)

    said = r"fraction_evaluate must be .* start\(evaluate_fn=.*private_evaluation=.* \(got 0\.5\)"
    with pytest.raises(ConfigError, match=said):
        server(nodes, Context(1, 0, {}, RecordDict(), {"fraction-evaluate": 0.5}))
    assert nodes.sent == {}
    assert [*tmp_path.iterdir()] == []


def test_an_argument_that_can_not_be_honoured_is_an_error_that_names_it(tmp_path: Path) -> None:
    for given, said in ARGUMENTS:
        with pytest.raises(ConfigError, match=said) as error:
            strategy(tmp_path / "run", **given)
        assert "\n" not in str(error.value)
        assert "privacy." not in str(error.value)


def test_an_argument_that_is_not_known_is_an_error() -> None:
    for name, said in {
        "seeds": "; did you mean seed",
        "max_epsilon": ": give it to mechanism",
    }.items():
        with pytest.raises(TypeError, match=f"^DPFedAvg has no argument {name}{said}"):
            DPFedAvg(**{"population_size": 10, name: 1.0})  # type: ignore[arg-type]


def test_the_short_forms_are_a_mechanism(tmp_path: Path) -> None:
    short = strategy(tmp_path / "run", **{**SHORT, "delta": 1e-3, "clip_norm": 2.0}).config
    long = noised(noise_multiplier=None, target_epsilon=8.0, clipping=AdaptiveClipping(2.0))
    assert short == strategy(tmp_path / "run", **long).config


def small(**given: np.ndarray) -> ArrayRecord:
    return ArrayRecord({name: Array(values) for name, values in given.items()})


BATCH_NORM = {"bn1.weight": np.ones(2, np.float32), "bn1.running_mean": np.zeros(2, np.float32)}
STARTS: dict[str, tuple[dict[str, Any], str]] = {
    "no arrays": ({"initial_arrays": {}}, "initial_arrays must be an ArrayRecord"),
    "nothing learned": (
        {"initial_arrays": small(steps=np.zeros(2, np.int64))},
        "nothing would be learned",
    ),
    "NaN": ({"initial_arrays": small(w=np.array([np.nan]))}, "w holds NaN"),
    "BatchNorm": (
        {"initial_arrays": ArrayRecord({n: Array(v) for n, v in BATCH_NORM.items()})},
        "to_group_norm",
    ),
    "evaluation": (
        {"evaluate_config": ConfigRecord({"split": "test"})},
        "evaluate_config must be omitted",
    ),
    "no time": ({"timeout": 0.0}, "timeout must be within"),
}


@pytest.mark.parametrize(("given", "said"), STARTS.values(), ids=STARTS.keys())
def test_what_start_can_not_honour_is_an_error_and_no_client_is_asked(
    given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    grid = Nodes()
    with pytest.raises(ConfigError, match=said):
        strategy(tmp_path / "run").start(**{"grid": grid, "initial_arrays": arrays(), **given})
    assert grid.sent == {}
    assert not (tmp_path / "run").exists()


def test_frozen_statistics_stay_and_the_rest_learns(tmp_path: Path) -> None:
    start = ArrayRecord({name: Array(values) for name, values in BATCH_NORM.items()})
    grid = Nodes(dict.fromkeys(range(1, NODES + 1), changed_by(0.5)))
    exact = noised(noise_multiplier=0.0, clipping=AdaptiveClipping(5.0))
    made = strategy(tmp_path / "run", frozen="*.running_mean", **exact)
    found = values_of(made.start(grid, start, num_rounds=1, timeout=2.0))
    assert (found["bn1.running_mean"] == 0).all()
    assert (found["bn1.weight"] > 1).all()


def test_a_pattern_that_fits_no_array_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"frozen=backbone\.\* .*weight, bias, steps"):
        layout_of(arrays(), frozen=("backbone.*",))


def test_settings_that_will_not_learn_are_refused_before_anything_is_spent(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"will not learn: .*num_rounds=\d+, .*CentralGaussian\(\.\.\., too_noisy=\"warn\"\)",
    ):
        run(tmp_path / "run", num_rounds=400, **noised(noise_multiplier=None, target_epsilon=1.5))
    assert not (tmp_path / "run").exists()


def test_what_start_is_given_is_checked_before_a_folder_exists(tmp_path: Path) -> None:
    wrong: dict[str, dict[str, Any]] = {
        r"train_config must be a ConfigRecord, or a function .* \(got dict\)": {
            "train_config": {"lr": 0.1}
        },
        r"evaluate_fn must be a function of the round and its arrays \(got accuracy\)": {
            "evaluate_fn": "accuracy"
        },
        r"evaluate_fn must be a function that gives a MetricRecord \(got tuple\)": {
            "evaluate_fn": lambda *_: (0.3, {})
        },
    }
    for said, given in wrong.items():
        with pytest.raises(ConfigError, match=said):
            strategy(tmp_path / "run").start(Nodes(), arrays(), num_rounds=2, timeout=2.0, **given)
    assert not (tmp_path / "run").exists()


def test_numbers_of_numpy_are_taken_as_numbers(tmp_path: Path) -> None:
    given = {
        "population_size": np.int64(10),
        "target_epsilon": np.float32(8),
        "clip_norm": np.float32(1),
    }
    made = strategy(tmp_path / "run", **SHORT | given | {"fraction_train": np.float64(1)})
    result = made.start(Nodes(), arrays(), num_rounds=np.int64(2), timeout=np.float32(2))
    assert set(result.arrays) == set(arrays())


def test_three_hospitals_are_told_to_protect_examples_with_and_without_a_clip_norm(
    tmp_path: Path,
) -> None:
    wide = ArrayRecord({"weight": Array(np.zeros((100, 100), np.float32))})
    for clip_norm in (1.0, None):
        mine = strategy(tmp_path / "run", population_size=3, **SHORT, clip_norm=clip_norm)
        with pytest.raises(
            ConfigError, match=r"rather than clients: DPSGD in .*, or privacy\.example"
        ) as error:
            mine.start(Nodes(), wide, num_rounds=30, timeout=2.0)
        assert "num_rounds=" not in str(error.value)


def test_a_round_waits_for_the_nodes_that_must_be_there_and_what_is_done_is_kept(
    tmp_path: Path,
) -> None:
    class Left(Nodes):
        def get_node_ids(self) -> Iterable[int]:
            return [1] if self.sent else [1, 2, 3]

    made = strategy(tmp_path / "run", min_available_nodes=3, sampling="everyone")
    with pytest.raises(TimeoutError, match=r"1 of 3 nodes are connected \(min_available_nodes\)"):
        made.start(Left(), arrays(), num_rounds=5, timeout=0.3)
    assert status_of(tmp_path / "run").state == "interrupted"


def test_a_part_of_a_round_is_not_done_alone(tmp_path: Path) -> None:
    made = strategy(tmp_path / "run")
    for part in (
        made.configure_train,
        made.aggregate_train,
        made.aggregate_evaluate,
        made.initialize_parameters,
    ):
        with pytest.raises(NotImplementedError, match=r"DPFedAvg .*: call start"):
            part(1, [])


def test_a_replaced_part_of_a_round_is_refused_by_its_name(
    tmp_path: Path,
) -> None:
    mine = type("Mine", (DPFedAvg,), {"configure_train": lambda *_: []})
    with pytest.raises(
        ConfigError, match=r"configure_train must be DPFedAvg's own.* \(got that of Mine\)"
    ):
        mine(**SETTINGS, output_dir=str(tmp_path / "run"))
    grid, made = Nodes(), strategy(tmp_path / "run", min_train_nodes=2, min_available_nodes=4)
    made.aggregate_train = lambda *_: (None, None)  # type: ignore[method-assign]
    with pytest.raises(ConfigError, match="aggregate_train must be DPFedAvg's own"):
        made.start(grid, arrays(), num_rounds=1, timeout=2.0)
    assert grid.sent == {}


def test_a_train_config_that_gives_none_is_refused_before_anybody_is_asked(tmp_path: Path) -> None:
    grid = Nodes()
    with pytest.raises(
        ConfigError,
        match=r"train_config .*ConfigRecord .*\(got None for 1\)",
    ):
        strategy(tmp_path / "run").start(grid, arrays(), 1, 2.0, lambda _: None)  # type: ignore[arg-type, return-value]
    assert grid.sent == {}


def test_a_clip_norm_that_too_few_nodes_would_have_to_find_must_be_given(tmp_path: Path) -> None:
    grid = Nodes()
    with pytest.raises(
        ConfigError,
        match=r"^clip_norm is required: .*\b0\.25\b.*, limit 0\.2\)",
    ):
        run(tmp_path / "run", grid, num_rounds=5, **noised(clipping=AdaptiveClipping()))
    assert grid.sent == {}
    assert not (tmp_path / "run").exists()


def two(names: Sequence[str]) -> ArrayRecord:
    return small(**{name: np.full(1, number, np.float32) for number, name in enumerate(names)})


@pytest.mark.parametrize("names", [("0",), ("0", "2"), ("0", "1", "2"), ("1", "bias")])
def test_arrays_of_a_numpy_client_are_taken_in_their_order_and_otherwise_malformed(
    names: tuple[str, ...],
) -> None:
    layout = layout_of(two(["weight", "bias"]))
    assert layout.vector(two(["0", "1"])).tolist() == [0, 1]
    assert layout_of(two(["1", "0"])).vector(two(["0", "1"])).tolist() == [1, 0]  # by name
    with pytest.raises(MalformedMessage, match="arrays in place of 2; missing"):
        layout.vector(two(names))


@pytest.fixture
def account(tmp_path: Path) -> str:
    create_account(tmp_path / "nodes.db", Population("nodes", 10, ADJACENCIES[0], 1e-3))
    return str(tmp_path / "nodes.db")


def test_a_run_is_charged_to_the_account_of_its_population(account: str, tmp_path: Path) -> None:
    run(
        tmp_path / "run",
        num_rounds=2,
        seed=None,
        account=account,
        population_name="nodes",
        fraction_train=0.5,
    )
    assert DurableLedger(Path(account)).total().num_releases == 2


def test_what_does_not_fit_an_account_is_refused_by_the_argument(
    account: str, tmp_path: Path
) -> None:
    wrong: dict[str, dict[str, object]] = {
        "population_size does not fit account=": {"population_size": 11},
        "delta does not fit account=": noised(delta=1e-4),
        "population_name must be given with account": {"population_name": None},
        "seed must be omitted with account": {"seed": 70123},
    }
    for said, changed in wrong.items():
        given: dict[str, Any] = {
            "seed": None,
            "account": account,
            "population_name": "nodes",
            **changed,
        }
        with pytest.raises((ConfigError, LedgerError), match=said):
            run(tmp_path / "first", num_rounds=1, **given)
