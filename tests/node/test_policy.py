"""What a client's owner asks for, and what is refused for it."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
from dp_accounting import (
    ComposedDpEvent,
    DpEvent,
    GaussianDpEvent,
    LaplaceDpEvent,
    NonPrivateDpEvent,
    NoOpDpEvent,
    PoissonSampledDpEvent,
    SelfComposedDpEvent,
    UnsupportedDpEvent,
)

from discreet.accounting.events import noise_in
from discreet.ledger.durable_ledger import Charge
from discreet.models.models import flatten_parameters
from discreet.node.account import Budget, Refused
from discreet.node.nodes import node_client
from discreet.node.policy import (
    ClientPolicy,
    budgets_of,
    check_policy,
    policy_from,
    words_of,
)
from discreet.node.work import work_of
from discreet.settings.adjacency import EXAMPLE, LOCAL, USER
from discreet.settings.settings import Settings, client_settings
from tests.node.clients import OFF, config, request, work_in

# q = 0.01, z = 1.1, T = 1000, delta = 1e-5: 1.5154 by PLD (shared reference numbers).
USER_ON = (
    "privacy.user.noise_multiplier=1.1",
    "privacy.user.target_epsilon=null",
    "privacy.user.clip.kind=fixed",
    "rounds=1000",
    "sampling.probability=0.01",
    "privacy.delta=1e-5",
)


def refusal(policy: ClientPolicy, run: Settings, **noises: float) -> str:
    try:
        check_policy(policy, work_in(client_settings(run)), noise_multipliers=noises)
    except Refused as refused:
        return str(refused)
    return ""


def test_a_policy_is_written_in_toml_as_a_guards_or_in_json(tmp_path: Path) -> None:
    written = {
        "a.toml": 'max-epsilon = 2.0\nmax-delta = 1e-5\nrequire = ["example"]\n',
        "b.json": '{"max-epsilon": 2.0, "max-delta": 1e-5, "require": ["example"]}',
    }
    found = []
    for name, text in written.items():
        for encoding in ("utf-8", "utf-8-sig"):  # the second is Windows' own
            (tmp_path / name).write_text(text, encoding=encoding)
            found.append(policy_from({"policy": str(tmp_path / name)}))
    assert found == [ClientPolicy(max_epsilon=2.0, max_delta=1e-5, require=("example",))] * 4
    (tmp_path / "a.toml").write_text("max-epsilon = ")
    with pytest.raises(Refused, match="policy file is not TOML"):
        policy_from({"policy": str(tmp_path / "a.toml")})
    for cut_short in ("", "# max-epsilon = 2.0\n"):
        (tmp_path / "a.toml").write_text(cut_short)
        with pytest.raises(Refused, match="policy file names no setting"):
            policy_from({"policy": str(tmp_path / "a.toml")})


def test_every_key_is_read_from_the_node_and_wins_over_the_policy_file(tmp_path: Path) -> None:
    assert policy_from({"partition-id": 3}) == ClientPolicy()
    node: dict[str, object] = {"min-noise-multiplier": 1.0, "max-epsilon": "4.0", "max-delta": 1e-5}
    node |= {
        "require": "user, example",
        "public-num-examples": 300,
        "min-colluding": 2,
        "min-summands": "5",
    }
    assert policy_from(node) == ClientPolicy(1.0, 4.0, 1e-5, ("user", "example"), 300, 2, 5)
    path = tmp_path / "policy.json"
    path.write_text(json.dumps({"max-epsilon": 8, "max-delta": 1e-4, "require": ["local"]}))
    assert policy_from({"policy": str(path), "max-epsilon": 2.0}) == ClientPolicy(
        0.0, 2.0, 1e-4, ("local",)
    )


BAD: dict[str, dict[str, object]] = {
    r"min-noise-multiplier must be .*at least 0 \(got much\)": {"min-noise-multiplier": "much"},
    r"min-noise-multiplier must be .*at least 0 \(got inf\)": {"min-noise-multiplier": "inf"},
    r"public-num-examples must be .*whole.*\[1, 1e\+09\] \(got 2\.5\)": {
        "public-num-examples": 2.5
    },
    r"public-num-examples must be .*\[1, 1e\+09\] \(got 0\)": {"public-num-examples": 0},
    r"min-colluding must be .*0\b": {"min-colluding": -1},
    r"max-epsilon .*above 0 \(got nan\)": {"max-epsilon": "nan"},
    r"max-epsilon .*above 0 \(got True\)": {"max-epsilon": True},
    r"max-delta .*with max-epsilon, below 1 /": {
        "max-epsilon": 4.0,
        "min-noise-multiplier": 1.0,
    },
    r"max-delta must be .*\(0, 1\]": {"max-delta": 2},
    r"require must be of user, .*\(got \('everything',\)\)": {"require": "everything"},
}
FILES = {
    "{": "is not JSON",
    "[1]": "one JSON object",
    "[" * 5000: "is not JSON",
    "{}": "names no setting",
    '{"max-epsilon": 4, "max-delta": 1e-5, "max-epsilon": 1e9}': "stands twice",
    '{"max-epsilon": 1e999}': "1e999 is no finite number",
    '{"max-epsilon": Infinity}': "Infinity is no finite number",
    '{"max-epsilom": 4}': r"max-epsilom; did you mean max-epsilon\?",
}


def test_a_policy_that_is_not_understood_is_never_taken_for_none(tmp_path: Path) -> None:
    path = tmp_path / "policy.json"
    with pytest.raises(Refused, match=r"policy file .*No such file") as missing:
        policy_from({"policy": str(path)})
    assert str(tmp_path) not in str(missing.value)
    for message, node in (
        BAD | {message: {"policy": text} for text, message in FILES.items()}
    ).items():
        path.write_text(str(node.get("policy")))
        with pytest.raises(Refused, match=message):
            policy_from(node | ({"policy": str(path)} if "policy" in node else {}))


MISSPELT = {
    "max-epsilom": "max-epsilon",
    "min_noise_multiplier": "min-noise-multiplier",
    "Max-Delta": "max-delta",
    "required": "require",
    "polciy": "policy",
    "min_noise": None,
    "minnoise": None,
    "epsilon-budget": None,
}


@pytest.mark.parametrize(("key", "meant"), MISSPELT.items())
def test_a_misspelt_key_of_a_policy_is_refused_with_every_message(
    key: str, meant: str | None
) -> None:
    node = {"partition-id": 1, "num-partitions": 12, key: 5}
    asked = request(config(*USER_ON, "data.name=digits", "data.num_clients=12"), clip_norm=1.0)
    with pytest.raises(Refused) as refused:
        node_client(work_of(asked), node)
    said = f"did you mean {meant}?" if meant else "there are min-noise-multiplier, "
    assert f"unknown setting {key}; {said}" in str(refused.value)


def test_the_keys_of_an_owners_own_app_are_no_policy() -> None:
    others = {
        "data": "",
        "ledger": "",
        "name": "",
        "peers": "",
        "masking-state": "",
        "identity-key": "",
    }
    foreign = {
        "partition-id": 1,
        "num-partitions": 3,
        "dataset": "x",
        "region": "x",
        "learning-rate": 0.1,
        "gpu": 1,
    }
    assert policy_from({**others, **foreign}) == ClientPolicy()


def test_a_policy_is_said_in_one_line_and_so_is_that_there_is_none() -> None:
    policy = ClientPolicy(1.5, 4.0, 1e-5, ("user", "secure"))
    said = (
        "this node's policy: min-noise-multiplier=1.5, max-epsilon=4, max-delta=1e-05, "
        "require=user,secure"
    )
    assert words_of(policy) == said
    assert (
        words_of(ClientPolicy())
        == "this node has no policy: it accepts any work that a server requests"
    )


@pytest.mark.parametrize(
    "policy",
    [ClientPolicy(min_noise_multiplier=0.1), ClientPolicy(max_epsilon=100.0, max_delta=1e-5)],
)
def test_a_run_without_any_guarantee_is_refused_where_the_policy_asks_for_one(
    policy: ClientPolicy,
) -> None:
    assert "no guarantee is on" in refusal(policy, config(*OFF))


@pytest.mark.parametrize("guarantee", [USER, EXAMPLE, LOCAL])
def test_a_delta_beyond_the_owners_is_refused_for_every_guarantee(guarantee: str) -> None:
    run = config(*USER_ON, "privacy.delta=0.98", "data.num_clients=1", "sampling.population_size=1")
    said = refusal(ClientPolicy(max_epsilon=100, max_delta=1e-5), run, **{guarantee: 50.0})
    assert "allows delta up to 1e-05; the run has 0.98" in said


def test_the_planned_user_level_epsilon_is_at_the_owners_delta() -> None:
    for delta in ("1e-5", "1e-9"):  # a smaller one would make its own noise look weaker than it is
        run, (less, enough) = config(*USER_ON, f"privacy.delta={delta}"), (1.51, 1.52)
        assert refusal(ClientPolicy(max_epsilon=enough, max_delta=1e-5), run, user=1.1) == ""
        said = refusal(ClientPolicy(max_epsilon=less, max_delta=1e-5), run, user=1.1)
        assert re.search(r"epsilon up to 1\.51; .*user-level 1\.515 at delta 1e-05", said)


def test_a_declared_budget_counts_only_as_far_as_a_round_fits_into_it() -> None:
    budget = config(*USER_ON, "privacy.user.max_epsilon=1")
    assert refusal(ClientPolicy(max_epsilon=1, max_delta=1e-5), budget, user=1.1) == ""
    none = config(*USER_ON, "privacy.user.max_epsilon=1", "privacy.user.noise_multiplier=0")
    assert "plans a user-level inf" in refusal(
        ClientPolicy(max_epsilon=1, max_delta=1e-5), none, user=0.0
    )


NOISE_OF = "privacy.example.noise_multiplier=1", "privacy.local.noise_multiplier=1"
BUDGETS = {
    NOISE_OF: (None, None),
    (*NOISE_OF, "privacy.example.max_epsilon=3", "privacy.local.max_epsilon=2"): (3, 2),
    ("privacy.example.target_epsilon=6", "privacy.local.epsilon=5"): (6, 5),
    ("privacy.example.target_epsilon=6", "privacy.example.max_epsilon=7", NOISE_OF[1]): (7, None),
}


@pytest.mark.parametrize(("words", "budgets"), BUDGETS.items())
@pytest.mark.parametrize("allowed", [math.inf, 4.0])
def test_the_runs_budget_and_the_owners_hold_each_at_its_own_delta(
    words: tuple[str, ...], budgets: tuple[float | None, float | None], allowed: float
) -> None:
    run = config(*OFF, "privacy.example.enabled=true", "privacy.local.kind=gaussian", *words)
    work, policy = work_in(client_settings(run)), ClientPolicy(max_epsilon=allowed, max_delta=1e-6)
    owners = () if allowed == math.inf else (Budget(allowed, 1e-6),)
    for guarantee, of_run in zip((EXAMPLE, LOCAL), budgets, strict=True):
        runs = () if of_run is None else (Budget(of_run, 1e-3, guarantee),)
        assert budgets_of(policy, work, [Charge(1, guarantee, "", NoOpDpEvent())]) == runs + owners


NOISE = ("privacy.user.noise_multiplier=1.5", "privacy.user.target_epsilon=null")


@pytest.mark.parametrize("cohort", ["own", "same"])
def test_a_policy_counts_the_ratings_of_a_run(cohort: str) -> None:
    words = ("evaluation.kind=private", "evaluation.noise_multiplier=2", "evaluation.every=1")
    words = (*words, f"evaluation.cohort={cohort}")
    plain, rated = (
        client_settings(config("rounds=20", "privacy.delta=1e-5", *NOISE, *more))
        for more in ((), words)
    )
    most = work_in(plain).planned_user_epsilon(1e-5) + 0.01
    owner = ClientPolicy(max_epsilon=most, max_delta=1e-5)
    check_policy(owner, work_in(plain), noise_multipliers={USER: 1.5})
    with pytest.raises(Refused, match="run plans a user-level"):
        check_policy(owner, work_in(rated), noise_multipliers={USER: 1.5})
    assert work_in(rated).least_user_noise() == pytest.approx({"own": 1.5, "same": 1.2}[cohort])


TURNS = ("rounds=100", "data.num_clients=12", "sampling.kind=everyone", "privacy.delta=1e-3")
TURNS += (
    "privacy.user.noise_multiplier=4",
    "privacy.user.target_epsilon=null",
    "privacy.user.clip.kind=fixed",
)


def test_the_least_noise_is_that_of_the_most_expensive_round_not_its_new_noise(
    tmp_path: Path,
) -> None:
    # The last round of the square root moves by the sum of its coefficients, C(2k, k) / 4^k: 0.355
    # clip norms' noise.
    last = 4 / math.fsum(math.comb(2 * k, k) / 4**k for k in range(100))
    node = {"partition-id": 1, "num-partitions": 12, "require": "user"}
    for kind, least in (("none", 4.0), ("sqrt", last)):
        words = (
            "data.name=digits",
            "model.name=logistic_regression",
            f"privacy.user.correlation.kind={kind}",
        )
        asked = work_of(request(config(*TURNS, *words), clip_norm=1.0))
        weak, strict = ({**node, "min-noise-multiplier": share * least} for share in (0.999, 1.001))
        client = node_client(asked, weak)
        assert client.answer(asked, flatten_parameters(client.model)).update.norm() <= 1.0 + 1e-6
        with pytest.raises(Refused, match=rf"the user-level one is {least:g}"):
            node_client(asked, strict).answer(asked, flatten_parameters(client.model))


def test_the_least_noise_of_a_fixed_size_cohort_is_over_the_replacement_sensitivity() -> None:
    run = client_settings(config(*USER_ON, "sampling.kind=fixed", "privacy.accountant=rdp"))
    assert work_in(run).least_user_noise() == pytest.approx(0.55)


@pytest.mark.parametrize(
    ("event", "noise"),
    [
        (ComposedDpEvent([GaussianDpEvent(3.0), GaussianDpEvent(4.0)]), 2.4),
        (PoissonSampledDpEvent(0.1, SelfComposedDpEvent(LaplaceDpEvent(3.0), 3)), 1.0),
        (ComposedDpEvent([GaussianDpEvent(3.0), LaplaceDpEvent(6.0)]), 2.0),
        (ComposedDpEvent([GaussianDpEvent(3.0), NonPrivateDpEvent()]), 0.0),
        (ComposedDpEvent([GaussianDpEvent(3.0), NoOpDpEvent()]), 3.0),
    ],
)
def test_what_one_release_composes_counts_together(event: DpEvent, noise: float) -> None:
    assert noise_in(event) == pytest.approx(noise)


def test_an_event_without_a_noise_multiplier_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"UnsupportedDpEvent .*noise multiplier"):
        noise_in(UnsupportedDpEvent())


def test_an_owner_says_how_many_may_collude_and_of_how_many_a_masked_sum_must_be() -> None:
    masked = ("privacy.user.aggregation=secure", "privacy.accountant=rdp", "sampling.kind=everyone")
    counts = (
        "privacy.secure.dropouts=2",
        "privacy.secure.colluding=1",
        "privacy.user.target_epsilon=8",
    )
    run = config(*masked, *counts, "data.num_clients=10")
    assert refusal(ClientPolicy(min_colluding=1, min_summands=7), run, user=2.0) == ""
    for policy in (ClientPolicy(min_colluding=2), ClientPolicy(min_summands=8)):
        assert "privacy.secure.colluding=1, and 7 summands" in refusal(policy, run, user=2.0)
