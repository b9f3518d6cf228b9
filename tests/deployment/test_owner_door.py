"""A node with a policy answers no app that does not ask it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp
from flwr.supernode.runtime import run_clientapp

import discreet
from discreet.deployment.flower_fixes import owner_door
from discreet.deployment.flower_fixes.owner_door import FUNCTION, NotAsked, asks_its_owner
from discreet.deployment.flower_home import CONNECTION, wait_until
from discreet.deployment.local_federation import demonstration, federation_of
from discreet.node.app import app as own_app

ROOT = Path(__file__).resolve().parents[2]
QUICKSTART = ROOT / "examples" / "quickstart"
RUN_SECONDS = 300


def of_somebody(message: Message, context: Context, call_next: object) -> Message:
    raise AssertionError


LOCAL = discreet.local_dp_mod(clip_norm=1.0, target_epsilon=8.0, delta=1e-5, rounds=2)
ASKING = {
    "Discreet's own": own_app,
    "secure_sum_mod": ClientApp(mods=[discreet.secure_sum_mod]),
    "local_dp_mod": ClientApp(mods=[LOCAL]),
    "among others": ClientApp(mods=[of_somebody, LOCAL]),
}
OTHERS = {"no mod": ClientApp(), "another mod": ClientApp(mods=[of_somebody]), "no app": None}


@pytest.mark.parametrize("app", ASKING.values(), ids=ASKING.keys())
def test_discreets_app_and_apps_with_its_mods_ask_the_owner(app: ClientApp) -> None:
    assert asks_its_owner(app)


def test_a_mod_of_train_messages_alone_leaves_the_others_in_the_clear() -> None:
    app = ClientApp()
    app.train(mods=[LOCAL])(of_somebody)
    assert not asks_its_owner(app)


@pytest.mark.parametrize("app", OTHERS.values(), ids=OTHERS.keys())
def test_any_other_app_is_refused_where_flower_loads_it(
    app: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_clientapp, FUNCTION, lambda **_: lambda *_: app)
    owner_door.install()
    load = getattr(run_clientapp, FUNCTION)(default_app_ref="")
    with pytest.raises(NotAsked, match="the app does not ask"):
        load("id", "1.0", "hash")


@pytest.mark.processes
@pytest.mark.parametrize("fixes", ["", "-warm_clients"], ids=["preforked", "Flower's own command"])
def test_a_foreign_app_gets_nothing_from_supernodes_with_a_policy(
    fixes: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DISCREET_FLOWER_FIXES", fixes)
    policy = tmp_path / "policy.json"
    policy.write_text(json.dumps({"require": "local"}))
    nodes = [[*words, "--policy", str(policy)] for words in demonstration(2)]
    with federation_of(nodes, tmp_path / "federation") as federation:
        given = "num-server-rounds=1 fraction-train=1.0 local-epochs=1"
        words = ["flwr", "run", str(QUICKSTART), CONNECTION, "--stream", "--run-config", given]
        process = federation.start("app", words)
        wait_until(lambda: process.poll() is not None, RUN_SECONDS, "flwr run is over")
        said = federation.says("app")
        assert "the app does not ask" in said + federation.says("node-0")
        assert "Received 0 results" in said or "0 results and 2 failures" in said, said
