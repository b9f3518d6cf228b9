"""Versions of Flower: what rests on its code asks whether the code is the one that was tested."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import flwr.client.mod.utils
import pytest
from flwr.supernode import start_client_internal
from flwr.supernode.runtime import run_clientapp

from discreet.deployment.flower_fixes import owner_door, supernode_guard
from discreet.flower import grid_transport, tested_flower
from discreet.flower.tested_flower import (
    GUARD_PLACES,
    LOADING_PLACES,
    MOD_PLACES,
    PULL_PLACES,
    VERSIONS,
    flower_version,
    refusal,
)
from discreet.masking.wire import Stage
from discreet.settings.rules import ConfigError
from tests.node.dishonest import NotGiven
from tests.node.test_secure_doors import behind_mod

PLACES = GUARD_PLACES | LOADING_PLACES | MOD_PLACES | PULL_PLACES


@pytest.fixture
def a_later_flower(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(tested_flower, "flower_version", lambda: "1.99.0")
    forget()
    yield
    forget()


def forget() -> None:
    tested_flower._digest.cache_clear()
    grid_transport._unlimited.cache_clear()


def changed(*given: Any, **more: Any) -> None:
    """A place of Flower with other code."""


@pytest.mark.skipif(flower_version() not in VERSIONS, reason="of the versions that were tested")
@pytest.mark.parametrize("place", PLACES)
def test_the_places_are_those_of_the_tested_versions(place: str) -> None:
    assert tested_flower._digest(place) in PLACES[place].split()


@pytest.mark.skipif(flower_version() not in VERSIONS, reason="of the versions that were tested")
@pytest.mark.usefixtures("a_later_flower")
def test_a_later_flower_with_the_same_places_keeps_the_promises() -> None:
    assert refusal(PLACES, "everything") == ""


@pytest.mark.usefixtures("a_later_flower")
def test_a_guard_does_not_start_with_a_flower_that_sends_replies_in_another_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(start_client_internal, "_push_messages", changed)
    with pytest.raises(ConfigError, match=r"Flower 1\.99\.0 differs .*_push_messages"):
        supernode_guard.install(tmp_path / "guard.toml")


@pytest.mark.usefixtures("a_later_flower")
def test_secure_aggregation_is_refused_with_a_flower_that_calls_mods_in_another_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(flwr.client.mod.utils, "make_ffn", changed)
    with pytest.raises(NotGiven, match=r"Flower 1\.99\.0 differs from .* in make_ffn"):
        behind_mod(tmp_path).until(Stage.CONFIRM)


@pytest.mark.usefixtures("a_later_flower")
@pytest.mark.parametrize("replaced", [changed, None])
def test_a_policy_is_refused_with_a_flower_that_loads_apps_in_another_way(
    replaced: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_clientapp, owner_door.FUNCTION, replaced)
    with pytest.raises(RuntimeError, match=r"get_load_client_app_fn: a node's policy"):
        owner_door.install()


@pytest.mark.usefixtures("a_later_flower")
def test_replies_are_read_by_a_flower_that_pulls_in_another_way_and_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert not grid_transport._unlimited()
    forget()
    monkeypatch.setattr(grid_transport.HttpGrid, "pull_messages", changed)
    assert grid_transport._unlimited() == grid_transport._unlimited()
    (said,) = caplog.messages
    assert "limit of a reply's size can't be kept" in said
