"""guard.toml, and what a run may ask of a guard."""

from __future__ import annotations

from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent

from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.guard.guard_policy import check_app, check_budget, read_guard, terms_of_run
from discreet.node.account import Refused
from discreet.settings.rules import ConfigError
from tests.guard.made import DELTA, C, Z, guard_toml

DIGEST = "ab" * 32


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"any": False}, "apps must be a list of digests"),
        ({"apps": [DIGEST]}, "apps must be a list of digests, or any = true"),
        ({"apps": ["ab"], "any": False}, "apps must be a list of SHA-256 digests"),
        ({"max_delta": 1.0}, "max-delta must be"),
        ({"max_epsilon": 0.0}, "max-epsilon must be"),
        ({"min_noise_multiplier": 0.0}, "min-noise-multiplier must be"),
        ({"q": 0.0}, "q must be"),
        ({"unit": "site"}, 'blocks.count must be 1 with unit = "site"'),
        ({"evaluate": "metric"}, "metric must be a table"),
        ({"enclosure": "none"}, "enclosure must be one of kernel, bubblewrap, landlock"),
        ({"enclosure": "bubblewrap"}, 'any must be false, or charge = "all-blocks", unless'),
        ({"enclosure": "landlock"}, 'any must be false, or charge = "all-blocks", unless'),
        (
            {"enclosure": "bubblewrap", "charge": "all-blocks", "at_once": 2},
            'at-once must be 1 with enclosure = "bubblewrap"',
        ),
        ({"block_secondz": 3}, "unknown setting block-secondz; did you mean block-seconds"),
        ({"max_epsilom": 3}, "unknown setting max-epsilom; did you mean max-epsilon"),
        ({"limits": {"memory-gb": 3}}, "unknown setting limits.memory-gb; did you mean limits."),
        ({"limit": {"memory-mb": 3}}, "unknown setting limit"),
        (
            {"metric": {"name": "a", "low": 1, "high": 0, "noise-multiplier": 1}},
            "metric.high must be above",
        ),
    ],
)
def test_a_mistake_in_a_guard_toml_is_one_line_about_its_key(
    settings: dict[str, object], said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=said.replace(".", r"\.").replace("[", r"\[")):
        read_guard(guard_toml(tmp_path, **settings))


@pytest.mark.parametrize("key", ["max_epsilon", "min_noise_multiplier"])
@pytest.mark.parametrize("is_second", [False, True])
def test_a_limit_in_another_spelling_does_not_replace_it(
    key: str, is_second: bool, tmp_path: Path
) -> None:
    path = guard_toml(tmp_path)
    written = path.read_text()
    hyphened = key.replace("_", "-")
    assert f"\n{hyphened} = " in written
    if is_second:
        changed = f"{key} = 1000.0\n{written}"
    else:
        changed = written.replace(hyphened, key)
    path.write_text(changed)
    with pytest.raises(ConfigError, match=f"guard.toml: {key} .*{hyphened}"):
        read_guard(path)


def test_an_underscore_in_a_table_is_refused_too(tmp_path: Path) -> None:
    path = guard_toml(tmp_path, limits={"memory_mb": 100})
    with pytest.raises(ConfigError, match=r"memory_mb .*memory-mb"):
        read_guard(path)


def test_paths_are_beside_the_file(tmp_path: Path) -> None:
    policy = read_guard(guard_toml(tmp_path))
    assert [policy.ledger, policy.blocks.folder] == [
        str(tmp_path / "ledger.db"),
        str(tmp_path / "site"),
    ]


def test_an_unapproved_bundle_is_refused_and_an_approved_one_is_not(tmp_path: Path) -> None:
    policy = read_guard(guard_toml(tmp_path, any=False, apps=[DIGEST]))
    check_app(policy, DIGEST)
    with pytest.raises(Refused, match="has not approved"):
        check_app(policy, "cd" * 32)


def test_a_run_may_ask_for_more_noise_and_not_for_less(tmp_path: Path) -> None:
    policy = read_guard(guard_toml(tmp_path))
    assert terms_of_run(policy, {}).noise_multiplier == Z
    assert terms_of_run(policy, {"guard-noise-multiplier": Z + 1}).noise_multiplier == Z + 1
    with pytest.raises(Refused, match="requires a guard-noise-multiplier of at least 4;"):
        terms_of_run(policy, {"guard-noise-multiplier": Z - 0.01})


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, -1.0, True, "1", None])
@pytest.mark.parametrize("key", ["guard-clip-norm", "guard-noise-multiplier"])
def test_what_is_no_number_in_range_is_refused(key: str, value: object, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=key):
        terms_of_run(read_guard(guard_toml(tmp_path)), {key: value})


def test_a_round_costs_a_sampled_gaussian(tmp_path: Path) -> None:
    policy = read_guard(guard_toml(tmp_path, q=0.5))
    terms = terms_of_run(policy, {})
    assert terms.clip_norm == C
    assert policy.event(terms.noise_multiplier) == PoissonSampledDpEvent(0.5, GaussianDpEvent(Z))


def test_spending_up_to_the_budget_passes_and_more_is_refused(tmp_path: Path) -> None:
    spent = PrivacyLedger(((GaussianDpEvent(Z), 3),))
    reached = spent.epsilon(DELTA)
    check_budget(read_guard(guard_toml(tmp_path, max_epsilon=reached)), spent)
    with pytest.raises(Refused, match="site's guard is spent"):
        check_budget(read_guard(guard_toml(tmp_path, max_epsilon=reached * 0.99)), spent)


def test_blocks_that_may_talk_cost_what_all_of_them_move_whatever_is_drawn(tmp_path: Path) -> None:
    settings = {"enclosure": "bubblewrap", "charge": "all-blocks", "q": 0.5}
    policy = read_guard(guard_toml(tmp_path, blocks=10, **settings))
    assert policy.event(Z) == GaussianDpEvent(Z / 10)
