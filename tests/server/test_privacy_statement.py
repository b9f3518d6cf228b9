"""privacy.json: what a run says of its guarantees."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from discreet.privacy.grid import LARGEST_SCALE, laplace_grid_slack
from discreet.server.plan import planned
from discreet.settings.compose import load_config
from discreet.simulation.in_process import simulate

SMALL = ["rounds=2", "data.num_clients=5", "model.name=logistic_regression", "training.epochs=1", "seed=24781"]
FACTS = ("unit", "adjacency", "trusted", "observer", "mechanism", "accounting", "not_covered", "epsilon", "epsilon_is")
NO_USER = ["privacy.user.enabled=false", "privacy.user.target_epsilon=null"]


def statement(folder: Path, *words: str) -> dict[str, Any]:
    simulate(load_config([*SMALL, *words, f"output_dir={folder}"]))
    facts = json.loads((folder / "privacy.json").read_text())
    return {guarantee["name"]: guarantee for guarantee in facts["guarantees"]}


def test_privacy_json_says_of_every_guarantee_what_the_page_says(tmp_path: Path) -> None:
    words = ["privacy.example.enabled=true", "privacy.example.noise_multiplier=2"]
    said = statement(tmp_path / "run", *words)
    assert list(said) == ["user", "example", "local"]
    for name in ("user", "example"):
        assert all(said[name][fact] for fact in FACTS)
    assert said["user"]["adjacency"] == "add or remove one client"
    assert said["example"]["adjacency"] == "zero-out: one example contributes nothing, n stays"
    assert said["user"]["floating_point"]["delta_slack"] < 1e-12
    assert said["example"]["floating_point"] == {"noise": "float", "delta_slack": "not bounded"}


def test_example_level_is_zero_out_unless_the_number_of_examples_is_declared() -> None:
    words = ("privacy.example.enabled=true", "privacy.example.noise_multiplier=2")
    sampled = planned(load_config(["data.partition=sampled", "data.examples_per_client=10"])).guarantees
    assert all(any("views overlap" in words for words in each.not_covered) for each in sampled)
    zero_out, declared = (
        planned(load_config([*words, *more])).guarantees[1] for more in ([], ["data.public_num_examples=40"])
    )
    assert zero_out.adjacency == "zero-out: one example contributes nothing, n stays"
    assert "q = batch_size / n," in zero_out.mechanism
    assert any("adding or removing an example: it changes q" in words for words in zero_out.not_covered)
    assert declared.adjacency == "add or remove one example"
    assert "q = batch_size / public_num_examples = 8 / 40," in declared.mechanism
    assert not any("number n" in words or "views overlap" in words for words in declared.not_covered)


@pytest.mark.parametrize("kind", ["gaussian", "laplace"])
def test_a_guarantee_that_is_off_has_no_mechanism_and_an_infinite_epsilon(kind: str, tmp_path: Path) -> None:
    words = [f"privacy.local.kind={kind}", "privacy.local.epsilon=1", "rounds=1", "sampling.kind=everyone"]
    said = statement(tmp_path / "run", *NO_USER, *words)
    assert (said["user"]["mechanism"], said["user"]["accounting"]) == ("none", "none")
    assert set(said["user"]["epsilon"].values()) == {"inf"}
    assert (said["local"]["adjacency"], said["local"]["trusted"]) == ("replace", "nobody but the client itself")
    assert (said["local"]["epsilon"]["pure"] == "inf") == (kind == "gaussian")


def test_the_slack_of_laplace_noise_is_enough_for_its_pure_epsilon(tmp_path: Path) -> None:
    words = ["privacy.local.kind=laplace", "privacy.local.noise_multiplier=0.1", "privacy.delta=0.1"]
    few = ["data.partition=sampled", "data.examples_per_client=9"]  # such a delta is refused by a client with ten
    local = statement(tmp_path / "run", *NO_USER, *words, *few, "sampling.kind=everyone")["local"]
    pure, at_delta = local["epsilon"]["pure"], local["epsilon"]["pld"]
    slack = 2 * laplace_grid_slack(28 * 28 * 10 + 10 + 1, LARGEST_SCALE)  # two rounds
    assert pure == 20
    assert at_delta < 19.9
    assert local["floating_point"]["delta_slack"] == pytest.approx((1 + math.exp(20)) * slack, rel=1e-9)


@pytest.mark.parametrize(("kind", "amplified"), [("poisson", True), ("everyone", False)])
def test_amplification_is_said_to_need_a_secret_cohort_where_there_is_any(
    kind: str, amplified: bool, tmp_path: Path
) -> None:
    said = statement(tmp_path / "run", f"sampling.kind={kind}", "rounds=1")
    assert any("amplification" in words for words in said["user"]["not_covered"]) == amplified
