"""The ways into a node under secure aggregation, Discreet's own app and the mod: what they refuse, and before what."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict

from discreet.flower.secure_sum_mod import secure_sum_mod
from discreet.masking.wire import Stage
from discreet.node.account import Refused
from tests.node.clients import client, examples, linear, params_of
from tests.node.dishonest import ARRAYS, NAMES, Dishonest, NotGiven, Told, answer_of, server_of

SHARED_STEP = (
    *("privacy.user.enabled=false", "privacy.user.aggregation=plain", "privacy.user.noise_multiplier=null"),
    *("privacy.example.enabled=true", "privacy.example.aggregation=secure", "privacy.example.noise_multiplier=2"),
    "training.batch_size=100",
)
PLAIN = ("privacy.user.aggregation=plain",)
ME = NAMES[0]


class App:
    """Another app behind the mod, which says how much it knows, and counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, message: Message, context: Context) -> Message:
        return secure_sum_mod(message, context, self.inner)

    def inner(self, message: Message, context: Context) -> Message:
        self.calls += 1
        arrays = ArrayRecord({"weight": Array(np.full((2, 3), 0.1, np.float32))})
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"examples": 10})}), reply_to=message)


def behind_app(folder: Path, *words: str, policy: Mapping[str, str] | None = None) -> Dishonest:
    return server_of(folder, Told.of(*words), policy)


def behind_mod(folder: Path, *words: str, policy: Mapping[str, str] | None = None) -> Dishonest:
    return server_of(folder, replace(Told.of(*words), arrays=ARRAYS), policy, door=App())


both_doors = pytest.mark.parametrize("behind", [behind_app, behind_mod], ids=["the app", "the mod"])
Behind = Callable[..., Dishonest]


@pytest.mark.parametrize("kind", ["train", "train.default", "evaluate", "evaluate.default", "query"])
def test_an_app_with_the_mod_answers_no_message_in_the_clear_whatever_its_type(kind: str) -> None:
    app = App()
    with pytest.raises(NotGiven, match="asks for an answer in the clear"):
        answer_of(app, RecordDict({"arrays": ARRAYS, "config": ConfigRecord()}), {}, kind)
    assert app.calls == 0


POLICIES = [
    *({"min-colluding": "4"}, {"min-summands": "5"}, {"max-delta": "1e-7"}, {"require": "example,local"}),
    *({"min-noise-multiplier": "1.1"}, {"max-epsilon": "5", "max-delta": "0.01"}, {"max-delta": "a tenth"}),
]


@both_doors
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_each_door_asks_the_owners_policy(behind: Behind, policy: dict[str, str], tmp_path: Path) -> None:
    server = behind(tmp_path, "privacy.delta=0.01", policy=policy)
    with pytest.raises(NotGiven, match="policy of this client"):
        server.until(Stage.CONFIRM)
    assert not isinstance(server.door, App) or server.door.calls == 0


@both_doors
def test_a_masked_vector_is_not_given_in_a_run_in_the_clear(behind: Behind, tmp_path: Path) -> None:
    server = behind(tmp_path, *PLAIN)
    with pytest.raises(NotGiven, match="a masked vector is asked for, and the train request has aggregation=plain"):
        server.until(Stage.CONFIRM)
    assert {part.stage for _, part, _ in server.given} == {Stage.KEYS, Stage.SHARES}


def test_the_mod_gives_no_update_of_a_whole_client_as_a_sum_over_examples(tmp_path: Path) -> None:
    server = behind_mod(tmp_path, *SHARED_STEP)
    with pytest.raises(NotGiven, match="this app adds up updates of whole clients"):
        server.until(Stage.CONFIRM)
    assert isinstance(server.door, App)
    assert server.door.calls == 0


def test_a_policy_of_the_noise_that_is_declared_is_held_to_the_noise_that_there_is(tmp_path: Path) -> None:
    # One example moves a step by what truncation adds, too: the noise is just below 2.
    server = behind_app(tmp_path, *SHARED_STEP, policy={"min-noise-multiplier": "2"})
    with pytest.raises(NotGiven, match="by this client's own count"):
        server.until(Stage.CONFIRM)
    met = behind_app(tmp_path / "met", policy={"min-noise-multiplier": "1"})
    assert met.until(Stage.CONFIRM).stage is Stage.CONFIRM


@pytest.mark.parametrize("words", [(), SHARED_STEP], ids=["of clients", "of examples"])
def test_a_client_gives_no_exact_values_of_a_masked_run(words: tuple[str, ...], tmp_path: Path) -> None:
    who, asked = client(examples(9), tmp_path / "ledger.db"), Told.of(*words).request
    with pytest.raises(Refused, match="asks for an update in the clear"):
        who.answer(asked, params_of(linear()))
