"""A server's message names code, files and patterns: what a node makes of them is what its owner
allowed."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict

from discreet.flower.secure_sum_mod import secure_sum_mod
from discreet.masking.wire import Part, Stage, Terms, write_request
from discreet.node import nodes as nodes_room
from discreet.node.app import train
from discreet.protocol.masked_messages import ASKED, masking_record
from discreet.protocol.messages import MASKING, PARAMETERS, REQUEST, TrainRequest, request_items
from discreet.settings.client_settings import ClientSettings, UserTerms
from discreet.settings.data import EvaluationConfig
from discreet.settings.rules import ConfigError
from discreet.settings.training import LoraConfig, ModelConfig
from tests.flower.masked_grid import nodes
from tests.node.clients import config, request
from tests.test_own import OWN

STRICT = {"require": "secure", "min-noise-multiplier": "5", "max-epsilon": "1", "max-delta": "1e-6"}
MARK = "imported"
Door = Callable[[Mapping[str, object], Mapping[str, str | int]], str]


def reason(
    app: Callable[[Message, Context], Message], content: RecordDict, node: Mapping[str, str | int]
) -> str:
    reply = app(Message(content, 1, "train"), Context(1, 1, dict(node), RecordDict(), {}))
    return str(reply.error.reason) if reply.has_error() else "answered"


def parameters(name: str) -> ArrayRecord:
    return ArrayRecord({name: Array(np.zeros(3, np.float32))})


def masking() -> ConfigRecord:
    """A request for a masked vector, with no keys before it."""
    terms = Terms("ab" * 16, 4, 1, 1, 3, 24, 100, 1)
    return masking_record(write_request(terms, [Part(Stage.MASKED, 1, b"0" * 16, b"")]), None)


def in_the_clear(items: Mapping[str, object], node: Mapping[str, str | int]) -> str:
    content = {REQUEST: ConfigRecord(dict(items)), PARAMETERS: parameters(PARAMETERS)}  # type: ignore[arg-type]
    return reason(train, RecordDict(content), node)


def under_masks(items: Mapping[str, object], node: Mapping[str, str | int]) -> str:
    content = {
        REQUEST: ConfigRecord(dict(items)),
        PARAMETERS: parameters(PARAMETERS),
        MASKING: masking(),
    }  # type: ignore[arg-type]
    return reason(train, RecordDict(content), node)


def behind_the_mod(items: Mapping[str, object], node: Mapping[str, str | int]) -> str:
    def app(message: Message, context: Context) -> Message:
        return secure_sum_mod(message, context, lambda asked, _: asked)

    asked = ConfigRecord(dict(items))  # type: ignore[arg-type]
    return reason(
        app, RecordDict({ASKED: asked, "arrays": parameters("w"), MASKING: masking()}), node
    )


DOORS = {"in the clear": in_the_clear, "under masks": under_masks, "behind the mod": behind_the_mod}
every_door = pytest.mark.parametrize("door", DOORS.values(), ids=DOORS.keys())


def told(
    *, model: str = "mlp", mechanism: str | None = None, metrics: str = "accuracy"
) -> Mapping[str, object]:
    """A request as it travels."""
    user = UserTerms(noise_multiplier=8.0, population_size=4, mechanism=mechanism)
    run = ClientSettings(2, 1e-4, "pld", "grid", model=ModelConfig(model), user=user)
    if mechanism is None:  # whose kind accounts for no answers
        run = replace(run, evaluation=EvaluationConfig(kind="private", metrics=[metrics]))
    return request_items(TrainRequest(1, 1.0, run))


def set_up(folder: Path, data: Path | None = None) -> Mapping[str, str | int]:
    """A node with everything that an owner can set up."""
    node = nodes(folder, **STRICT).configs[1]
    return node if data is None else {**node, "data": str(data)}


def planted(folder: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Path:
    """A module `somebody` that says when it is imported, on the path of the node's process."""
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "somebody", raising=False)
    (folder / "somebody.py").write_text(f"open({str(folder / MARK)!r}, 'w').close()\n{text}")
    return folder / MARK


@every_door
@pytest.mark.parametrize("setting", ["mechanism", "model", "metrics"])
@pytest.mark.parametrize("name", ["somebody:boom", "builtins:exit", "hf:/etc", "hf:"])
@pytest.mark.parametrize("own", [False, True], ids=["a share", "own data"])
def test_no_door_imports_what_a_server_names_and_the_owner_does_not(
    door: Door, setting: str, name: str, own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = planted(tmp_path, monkeypatch, "def boom(*given): raise SystemExit")
    said = "ended"
    with suppress(SystemExit):
        said = door(told(**{setting: name}), set_up(tmp_path, OWN if own else None))
    assert not mark.exists()
    which = f": {name} is not one of the" if setting == "metrics" else f"={name} is not the"
    assert said.endswith(f"{which} {setting} that this node's data.toml allows")


@every_door
def test_no_word_of_an_import_error_leaves(
    door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    planted(tmp_path, monkeypatch, "raise ImportError('patient 4711')")
    own = tmp_path / "own"
    shutil.copytree(OWN, own)
    description = own / "data.toml"
    description.write_text('mechanism = "somebody:boom"\n' + description.read_text())
    said = door(told(mechanism="somebody:boom"), set_up(tmp_path, own))
    assert said == "this node's own mechanism can't be imported; its log says why"
    assert "patient 4711" in caplog.text


def test_a_name_that_no_model_has_is_refused_and_its_text_is_cut(tmp_path: Path) -> None:
    for name in ("no_such", "x" * 100_000):
        said = in_the_clear(told(model=name), set_up(tmp_path / name[:7]))
        assert "this node's data.toml allows" in said
        assert len(said) < 400


@pytest.mark.parametrize(
    "pattern", ["(.*.*)*!", ".*.*.*.*.*!", "(a|aa)+", r"(a)\1", "(", "(?=a)", "(a|b)" * 9]
)
def test_a_pattern_that_could_take_a_node_for_ever_is_none(pattern: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.lora\.targets must be"):
        LoraConfig(targets=pattern)


def test_the_patterns_that_people_write_are_quick() -> None:
    start = time.monotonic()
    for pattern in (".*layer.[45].attention.self.(query|value)", ".*(q|k|v|o)_proj", "query"):
        assert LoraConfig(targets=pattern).targets == pattern
    assert time.monotonic() - start < 60


def odd(*words: str, **node: str | int) -> str:
    """What a node says to a request whose settings do not fit what it has."""
    base = ("data.name=digits", "data.num_clients=12", "model.name=mlp", "privacy.delta=1e-3")
    items = request_items(request(config(*base, *words), clip_norm=1.0))
    return in_the_clear(items, {"partition-id": 1, "num-partitions": 12, **node})


MEANS = (
    "data.normalise=public",
    f"normaliser.means={[0.0] * 5000}",
    f"normaliser.deviations={[1.0] * 5000}",
)
UNFIT = [
    (
        ("model.freeze=[none.of.these]",),
        "this node can't build the model mlp of the run; its log says why",
    ),
    (("model.name=lstm",), "this node can't build the model lstm of the run; its log says why"),
    (
        ("model.name=flower_app",),
        "this node can't build the model flower_app of the run; its log says why",
    ),
    (MEANS, "the run's normaliser does not fit the data of this node; its log says why"),
    (("data.name=no_such",), "this node can't load its share of no_such; its log says why"),
    (("data.partition=natural",), "this node can't load its share of digits; its log says why"),
    (
        ("data.name=mnist",),
        "this node does not download data sets that a server names: start it with --task mnist",
    ),
    (
        ("task.loss=squared",),
        "task.loss must be cross_entropy or least_squares for digits, whose targets are classes "
        "(got squared)",
    ),
    (
        ("task.class_weights=[1,2]",),
        "task.class_weights must be one number a class: digits has 10 classes (got 2)",
    ),
]


@pytest.mark.parametrize(("words", "said"), UNFIT, ids=[words[0][:30] for words, _ in UNFIT])
def test_settings_that_do_not_fit_a_node_are_refused_and_no_failure(
    words: tuple[str, ...], said: str
) -> None:
    assert odd(*words) == said


def test_a_node_has_its_share_of_the_data_set_that_its_owner_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unreachable(*_: object) -> None:
        raise ConnectionError("the hub")

    monkeypatch.setattr(nodes_room, "share_of", unreachable)
    assert "its share of mnist" in odd("data.name=mnist", task="mnist")
