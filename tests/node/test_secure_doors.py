"""The ways into a node under secure aggregation, Discreet's own app and the mod: what they refuse,
before what,
and what is left of a run."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from discreet.flower.secure_sum_mod import secure_sum_mod
from discreet.ledger.durable_ledger import DurableLedger
from discreet.masking.store import FolderStore, read_state
from discreet.masking.wire import MaskingRefused, Stage
from discreet.node.account import Refused
from discreet.node.secure_aggregation import FORGOTTEN_SECONDS, forget
from discreet.node.work import work_of
from discreet.run_files.run_folder import RunFolder
from discreet.server.transport import NobodyAnswers
from tests.flower.masked_grid import Nodes, federated, nodes, words_of
from tests.masking.federation import RUN, Federation, federation, terms_of
from tests.node.clients import client, examples, linear, params_of
from tests.node.dishonest import ARRAYS, NAMES, Dishonest, NotGiven, Told, answer_of, server_of

SHARED_STEP = (
    "privacy.user.enabled=false",
    "privacy.user.aggregation=plain",
    "privacy.user.noise_multiplier=null",
    "privacy.example.enabled=true",
    "privacy.example.aggregation=secure",
    "privacy.example.noise_multiplier=2",
    "training.batch_size=100",
)
PLAIN = ("privacy.user.aggregation=plain",)
ME = NAMES[0]


class App:
    """Another app behind the mod, which says how much it knows, and counts how often it is
    asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, message: Message, context: Context) -> Message:
        return secure_sum_mod(message, context, self.inner)

    def inner(self, message: Message, context: Context) -> Message:
        self.calls += 1
        arrays = ArrayRecord({"weight": Array(np.full((2, 3), 0.1, np.float32))})
        return Message(
            RecordDict({"arrays": arrays, "metrics": MetricRecord({"examples": 10})}),
            reply_to=message,
        )


def behind_app(folder: Path, *words: str, policy: Mapping[str, str] | None = None) -> Dishonest:
    return server_of(folder, Told.of(*words), policy)


def behind_mod(folder: Path, *words: str, policy: Mapping[str, str] | None = None) -> Dishonest:
    return server_of(folder, replace(Told.of(*words), arrays=ARRAYS), policy, door=App())


both_doors = pytest.mark.parametrize("behind", [behind_app, behind_mod], ids=["the app", "the mod"])
Behind = Callable[..., Dishonest]


@pytest.mark.parametrize(
    "kind", ["train", "train.default", "evaluate", "evaluate.default", "query"]
)
def test_an_app_with_the_mod_answers_no_message_in_the_clear_whatever_its_type(kind: str) -> None:
    app = App()
    with pytest.raises(NotGiven, match="answer in the clear"):
        answer_of(app, RecordDict({"arrays": ARRAYS, "config": ConfigRecord()}), {}, kind)
    assert app.calls == 0


POLICIES = [
    {"min-colluding": "4"},
    {"min-summands": "5"},
    {"max-delta": "1e-7"},
    {"require": "example,local"},
    {"min-noise-multiplier": "1.1"},
    {"max-epsilon": "5", "max-delta": "0.01"},
    {"max-delta": "a tenth"},
]


@both_doors
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_each_door_asks_the_owners_policy(
    behind: Behind, policy: dict[str, str], tmp_path: Path
) -> None:
    server = behind(tmp_path, "privacy.delta=0.01", policy=policy)
    with pytest.raises(NotGiven, match="policy of this client"):
        server.until(Stage.CONFIRM)
    assert not isinstance(server.door, App) or server.door.calls == 0


@both_doors
def test_a_masked_vector_is_not_given_in_a_run_in_the_clear(behind: Behind, tmp_path: Path) -> None:
    server = behind(tmp_path, *PLAIN)
    with pytest.raises(NotGiven, match=r"masked vector .*aggregation=plain"):
        server.until(Stage.CONFIRM)
    assert {part.stage for _, part, _ in server.given} == {Stage.KEYS, Stage.SHARES}


@both_doors
def test_no_masked_vector_is_given_or_charged_for_updates_that_nothing_clips(
    behind: Behind, tmp_path: Path
) -> None:
    server = behind(tmp_path)
    (name, request), *_ = server.until(Stage.MASKED).requests.items()
    with pytest.raises(NotGiven, match="finite clip norm"):
        server.ask(name, request, replace(server.told, clip_norm=math.inf))
    assert DurableLedger(Path(str(server.configs[name]["ledger"]))).releases() == []


def test_the_mod_gives_no_update_of_a_whole_client_as_a_sum_over_examples(tmp_path: Path) -> None:
    server = behind_mod(tmp_path, *SHARED_STEP)
    with pytest.raises(NotGiven, match="updates of whole clients"):
        server.until(Stage.CONFIRM)
    assert isinstance(server.door, App)
    assert server.door.calls == 0


def test_a_policy_of_the_noise_that_is_declared_is_held_to_the_noise_that_there_is(
    tmp_path: Path,
) -> None:
    # One example moves a step by what truncation adds, too: the noise is just below 2.
    server = behind_app(tmp_path, *SHARED_STEP, policy={"min-noise-multiplier": "2"})
    with pytest.raises(NotGiven, match="this client's own count"):
        server.until(Stage.CONFIRM)
    met = behind_app(tmp_path / "met", policy={"min-noise-multiplier": "1"})
    assert met.until(Stage.CONFIRM).stage is Stage.CONFIRM


@pytest.mark.parametrize("words", [(), SHARED_STEP], ids=["of clients", "of examples"])
def test_a_client_gives_no_exact_values_of_a_masked_run(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    who, asked = client(examples(9), tmp_path / "ledger.db"), Told.of(*words).request
    with pytest.raises(Refused, match="an unmasked update"):
        who.answer(work_of(asked), params_of(linear()))


def replies(folder: Path) -> list[object]:
    return [row["replies"] for row in RunFolder(folder).read_metrics()]


def only(grid: Nodes, node: int, **more: str) -> Nodes:
    """The same nodes, of which one has something else set up."""
    grid.configs[node] |= more
    return grid


def test_a_node_whose_owner_requires_secure_aggregation_refuses_a_run_in_the_clear(
    tmp_path: Path,
) -> None:
    grid = only(nodes(tmp_path), 1, require="secure")
    federated(words_of(tmp_path / "run", "privacy.user.aggregation=plain", rounds=1), grid)
    (reason,) = grid.refusals()
    assert "requires secure aggregation" in reason
    assert replies(tmp_path / "run") == [3]


def test_a_node_that_is_not_set_up_for_it_is_missing_and_names_what_it_needs(
    tmp_path: Path,
) -> None:
    grid = nodes(tmp_path)
    del grid.configs[4]["peers"]
    federated(words_of(tmp_path / "run", rounds=1), grid)
    said = "this node can't take part in secure aggregation without peers in its --node-config"
    assert {*grid.refusals()} == {said}
    assert replies(tmp_path / "run") == [3]


def test_a_node_with_a_spent_budget_sends_no_vector_and_is_charged_nothing(tmp_path: Path) -> None:
    grid = only(nodes(tmp_path), 2, **{"max-epsilon": "4", "max-delta": "1e-3"})
    federated(words_of(tmp_path / "run", "privacy.user.max_epsilon=4", rounds=1), grid)
    first = DurableLedger(tmp_path / "node-1.db").spent("user")
    assert first.num_releases == 1
    more = words_of(tmp_path / "more", "privacy.user.max_epsilon=4", rounds=1)
    with pytest.raises(NobodyAnswers):
        federated(more, grid)
    # Over both runs it would be more: its own ledger says so, whatever the server counts.
    assert any("the user-level budget is spent" in reason for reason in grid.refusals())
    assert DurableLedger(tmp_path / "node-1.db").spent("user") == first


def test_a_node_with_another_key_in_its_list_is_missing_and_the_server_sees_no_path(
    tmp_path: Path,
) -> None:
    grid = nodes(tmp_path)
    keys = json.loads((tmp_path / "public" / "peers.json").read_text())
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**keys, "node-3": keys["node-2"], "node-2": keys["node-3"]}))
    federated(words_of(tmp_path / "run", rounds=1), only(grid, 4, peers=str(other)))
    (reason,) = set(grid.refusals())
    assert "its list of peers" in reason
    assert "its log says why" in reason
    assert str(tmp_path) not in reason
    assert replies(tmp_path / "run") == [3]


LATER, ANOTHER = FORGOTTEN_SECONDS + 60, "f" * 32


def federation_in(folder: Path) -> Federation:
    return federation(terms_of(5, dropouts=2), store=lambda name: FolderStore(folder / name))


def later(seconds: float = LATER) -> float:
    return time.time() + seconds


def test_an_opened_round_cannot_be_opened_again_after_the_nodes_forgot_the_run(
    tmp_path: Path,
) -> None:
    ours = federation_in(tmp_path)
    first, *others = ours.nodes
    ours.sum(1, {Stage.UNMASK: frozenset({first})})
    for name in others:
        forget(tmp_path / name, but=ANOTHER, now=later())
    with pytest.raises(MaskingRefused, match="is over"):
        ours.sum(1)
    assert ours.charges.count(first) == 1


def test_secrets_of_a_killed_run_are_erased(tmp_path: Path) -> None:
    ours = federation_in(tmp_path)
    ours.until(Stage.CONFIRM)
    name = next(iter(ours.nodes))
    assert read_state(FolderStore(tmp_path / name).load(RUN) or b"").attempts
    forget(tmp_path / name, but=ANOTHER, now=later())
    assert not read_state(FolderStore(tmp_path / name).load(RUN) or b"").attempts


def test_a_state_that_can_not_be_read_is_refused_and_stops_no_other_run(tmp_path: Path) -> None:
    (tmp_path / f"{RUN}.state").symlink_to(f"{RUN}.state")
    (tmp_path / f"{ANOTHER}.state").mkdir()
    forget(tmp_path, but="a third one", now=later())
    for name in (RUN, ANOTHER):
        with pytest.raises(MaskingRefused, match="state can't be read"):
            FolderStore(tmp_path).load(name)


@pytest.mark.parametrize(("but", "seconds"), [(RUN, LATER), (ANOTHER, FORGOTTEN_SECONDS - 60)])
def test_a_run_that_goes_on_is_not_forgotten(tmp_path: Path, but: str, seconds: float) -> None:
    ours = federation_in(tmp_path)
    exchange = ours.until(Stage.CONFIRM)
    for name in ours.nodes:
        forget(tmp_path / name, but=but, now=later(seconds))
    assert ours.send(exchange)


def test_a_node_that_is_making_its_vector_is_left_alone(tmp_path: Path) -> None:
    ours = federation_in(tmp_path)
    exchange = ours.until(Stage.MASKED)
    name = next(iter(ours.nodes))
    with FolderStore(tmp_path / name).locked(RUN):
        forget(tmp_path / name, but=ANOTHER, now=later())
    assert ours.answer(name, exchange.requests[name])
