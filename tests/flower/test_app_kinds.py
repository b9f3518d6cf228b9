"""Each kind of Flower app is made private by the guide's difference: it learns at epsilon 8, and
says how well."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import Result, Strategy

from discreet import DPFedAvg
from discreet.ledger.durable_ledger import DurableLedger
from tests.flower import app_kinds
from tests.flower.app_kinds import NODES, App
from tests.flower.flower_apps import Answer, Nodes

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "guide" / "flower_app.md").read_text()
ROUNDS, EPSILON, DELTA = 5, 8.0, 1e-3
KINDS = [
    app_kinds.quickstart,
    app_kinds.transformers,
    app_kinds.scikit_learn,
    app_kinds.tabular,
    app_kinds.vit_head,
    app_kinds.vit_whole,
    app_kinds.with_state,
    app_kinds.subclass,
]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
Told = list[list[object]]


def nodes_of(app: App, *, count: int | None = None, told: Told | None = None) -> Nodes:
    """Nodes that run the app's client as Flower does, each with a context that stays. `told`: gets
    what each message to train holds: its records, the names of its arrays, and the config."""

    def node(number: int) -> Answer:
        place = {"partition-id": number, "num-partitions": NODES}
        context = Context(
            run_id=1, node_id=number, node_config=place, state=RecordDict(), run_config={}
        )

        def answer(message: Message) -> RecordDict:
            if told is not None and message.metadata.message_type == "train":
                arrays, config = message.content["arrays"], message.content.get("config", {})
                told.append([*message.content, *arrays, *config.items()])
            return app.client(message, context).content

        return answer

    return Nodes({number + 1: node(number) for number in range(count or NODES)})


def served(strategy: Strategy, grid: Nodes, starts: Mapping[str, Any], *, rounds: int) -> Result:
    """What a ServerApp makes of a strategy."""
    server, results = ServerApp(), list[Result]()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        results.append(strategy.start(grid=grid, num_rounds=rounds, timeout=60.0, **starts))

    server(grid, Context(run_id=1, node_id=0, node_config={}, state=RecordDict(), run_config={}))
    return results[0]


def private(app: App, folder: Path, **settings: Any) -> DPFedAvg:
    """The strategy after the difference; a seed, for tests alone, and a folder."""
    given = {
        **app.given,
        "population_size": NODES,
        "target_epsilon": EPSILON,
        "delta": DELTA,
        **app.diff,
    }
    return DPFedAvg(**given, seed=70061, output_dir=str(folder), **settings)


# A federation of the first kind: the others run in the tier `processes`, and in the tests below.
@pytest.mark.parametrize(
    "kind",
    [
        KINDS[0],
        *(
            pytest.param(kind, marks=pytest.mark.processes)
            for kind in [*KINDS[1:], app_kinds.numpy_client]
        ),
    ],
    ids=lambda kind: kind.__name__,
)
def test_it_learns_at_epsilon_8_and_says_how_well_in_each_round(
    kind: Callable[[], App], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    app, rows = kind(), list[Mapping[str, Any]]()
    served(
        private(app, tmp_path / "run", on_round=rows.append),
        nodes_of(app),
        app.starts | app.instead,
        rounds=ROUNDS,
    )
    rated = {row["round"]: row["accuracy"] for row in rows if row.get("accuracy") is not None}
    assert [*rated] == [*range(1, ROUNDS + 1)]
    assert rated[ROUNDS] > app.above
    assert all(row["replies"] == row["cohort"] for row in rows if "cohort" in row)
    said = re.findall(
        r"(?:^round|the model after round) (\d)\b.*accuracy 0\.\d+",
        "\n".join(caplog.messages),
        re.M,
    )
    assert [*map(int, said)] == [*rated]
    assert DurableLedger(tmp_path / "run" / "ledger.db").spent("user").epsilon(
        DELTA
    ) == pytest.approx(EPSILON, abs=0.1)


@each_kind
def test_flowers_own_strategy_and_the_private_one_ask_the_same_client_the_same(
    kind: Callable[[], App], tmp_path: Path
) -> None:
    app, theirs, ours = kind(), Told(), Told()
    served(app.strategy(**app.given), nodes_of(app, count=4, told=theirs), app.starts, rounds=3)
    served(
        private(app, tmp_path / "run"),
        nodes_of(app, count=4, told=ours),
        app.starts | app.instead,
        rounds=3,
    )
    assert all(each in theirs for each in ours)
    assert all(each in ours for each in theirs)


@each_kind
def test_the_difference_is_at_most_four_arguments_that_the_guide_shows(
    kind: Callable[[], App],
) -> None:
    app = kind()
    named = ["population_size", "target_epsilon", *app.diff, *app.instead]
    assert len(named) <= 4
    assert [name for name in named if f"{name}=" not in GUIDE] == []
