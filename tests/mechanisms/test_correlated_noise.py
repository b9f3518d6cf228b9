"""Clients that take turns, with noise that is correlated over rounds: a run, its account, its keys,
and its end."""

from __future__ import annotations

import json
import shutil
import signal
import stat
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from discreet.accounting.correlation import Turns
from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.audit.experiments import experiment_of
from discreet.audit.user_audit import AuditRequest
from discreet.audit.verdict import judge
from discreet.ledger.charges import LedgerError
from discreet.ledger.durable_ledger import DurableLedger
from discreet.mechanisms import correlated_noise
from discreet.mechanisms.correlated_noise import CorrelatedNoise
from discreet.mechanisms.round_state import CarriedState, StateInMemory
from discreet.node.account import Refused
from discreet.node.nodes import node_client
from discreet.node.work import work_of
from discreet.planning.plan import Plan
from discreet.planning.state import State, initial_state
from discreet.privacy.correlated_gaussian import CorrelatedGaussian
from discreet.privacy.grid import grid_slack
from discreet.privacy.mechanisms import analytic_gaussian_noise_multiplier
from discreet.privacy.randomness import seeded_source
from discreet.privacy.sampling import CohortSampling
from discreet.protocol.messages import TrainReply, TrainRequest
from discreet.run_files.compose import load_asked, load_config
from discreet.run_files.resuming import asked_settings
from discreet.run_files.run_folder import SECRETS, RunFolder, RunSecrets
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings, client_settings
from discreet.simulation.in_process import simulate
from tests.command import report
from tests.mechanisms.made import turns
from tests.rounds import Charge, free, round_of
from tests.simulation.crash import BEFORE_SECRETS, POINTS, crash

TURNS = (
    "sampling.kind=cyclic",
    "sampling.groups=3",
    "privacy.user.clip.kind=fixed",
    "privacy.user.correlation.kind=bsr",
    "rounds=7",
    "model.name=linear",
    "data.num_clients=20",
    "training.epochs=1",
    "privacy.user.too_noisy=warn",
)
GROUPS, ROUNDS, DELTA = 3, 7, 1e-3
SCALE = 2.0  # of noise, in steps of the grid


def config(*words: str) -> Settings:
    return load_config([*TURNS, *words])


def run(folder: Path, *words: str, **given: Any) -> State:
    asked = load_asked([*TURNS, f"output_dir={folder}", *words])
    return simulate(*asked, **given).checkpoint


def release(
    noise_multiplier: float = 2.0, *, kind: str = "bsr", bandwidth: int = 3, rounds: int = ROUNDS
) -> CorrelatedNoise:
    return turns(noise_multiplier, kind, bandwidth, groups=GROUPS, rounds=rounds)


def one(
    how: CorrelatedNoise,
    number: int,
    replies: Iterable[TrainReply],
    kept: CarriedState,
    charge: Charge = free,
) -> Tensor:
    """The noised sum of the round after `number` rounds."""
    state = replace(initial_state(torch.zeros(4), clip_norm=0.5), round=number, carried=kept)
    return round_of(how, state, replies, seeded_source(7919).child(number), charge=charge)[1].total


def reply(value: float, client: int = -1, size: int = 4) -> TrainReply:
    return TrainReply(1, torch.full((size,), value), below=True, client=client)


def released(
    how: CorrelatedNoise, rounds: list[list[TrainReply]], kept: CarriedState | None = None
) -> list[Tensor]:
    kept = kept or StateInMemory()
    return [one(how, number, replies, kept) for number, replies in enumerate(rounds)]


def test_each_prefix_of_a_run_costs_the_gaussian_of_its_sensitivity(tmp_path: Path) -> None:
    run(tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    noise = folder.read_config().privacy.user.noise_multiplier
    rows = folder.read_metrics()
    for number, row in enumerate(rows, 1):
        moved = Turns("bsr", 3, GROUPS, number).sensitivity
        assert analytic_gaussian_noise_multiplier(
            row["epsilon_user"] or 0.0, delta=DELTA
        ) == pytest.approx(noise / moved, rel=1e-6)
    # the target, which has chosen the noise
    assert 7.9 < (rows[-1]["epsilon_user"] or 0) <= 8 * (1 + 1e-9)


@pytest.mark.parametrize("kind", ["bsr", "bisr", "sqrt"])
def test_the_slack_of_the_grid_is_for_each_term_that_a_rounds_noise_has(kind: str) -> None:
    mechanism = release(kind=kind)
    terms = sum(abs(weight) > 1e-12 for weight in mechanism.turns.weights.tolist())
    assert terms > 1
    slack = mechanism.expected_noise(0.5).slack
    assert slack is not None
    assert 1 > slack(100, SCALE) >= terms * grid_slack(100, SCALE) > 0


def test_whose_turn_it_is_does_not_depend_on_who_else_is_there() -> None:
    sampling, source = CohortSampling("cyclic", 1 / 3, 10, 3), seeded_source(7919)
    members = [3, 4, 6, 7, 900719925474099267]
    for number in range(1, 7):
        whole = sampling.draw(members, source, number=number)
        for gone in members:
            left = [each for each in members if each != gone]
            assert sampling.draw(left, source, number=number) == [
                each for each in whole if each != gone
            ]


def test_the_server_counts_nobody_out_of_turn_and_who_misses_it_changes_no_noise() -> None:
    alone = released(release(), [[], []])
    with_two = released(release(), [[reply(0.1, 0), reply(0.1, 1)], [reply(0.1, 1), reply(0.1, 2)]])
    for first, second in zip(alone, with_two, strict=True):
        assert torch.allclose(second - first, torch.full((4,), 0.1).double(), atol=1e-3)


@pytest.mark.parametrize("kind", ["bsr", "bisr", "sqrt", "none"])
def test_a_pass_over_earlier_blocks_changes_no_bit(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    wholes = []
    for block in (100, 8, 3, 1):
        monkeypatch.setattr(correlated_noise, "BLOCK", block)
        wholes.append(torch.stack(released(release(kind=kind, rounds=20), [[]] * 20)))
    assert all(each.equal(wholes[0]) for each in wholes[1:])


def test_the_charge_comes_before_the_noise_and_the_disk_before_the_release() -> None:
    happened = list[str]()

    class Disk(StateInMemory):
        def save(self, tensors: Mapping[str, Tensor]) -> None:
            happened.append("saved")
            super().save(tensors)

    real = CorrelatedGaussian.add_grid_noise
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            CorrelatedGaussian,
            "add_grid_noise",
            lambda *a, **b: (happened.append("noised"), real(*a, **b))[1],
        )
        one(release(), 0, [], Disk(), lambda _: happened.append("charged"))
    assert happened == ["charged", "noised", "saved"]


@pytest.mark.parametrize(("number", "rounds"), [(2, 1), (3, 0), (1, 3)])
def test_noise_without_the_keys_of_all_rounds_before_is_refused(number: int, rounds: int) -> None:
    kept = StateInMemory()
    released(release(), [[]] * rounds, kept)
    with pytest.raises(LedgerError, match=r"noise keys .*after round"):
        one(release(), number, iter([reply(1.0)]), kept)


KILLED = 4
# the round's release is on disk, and the state is not
OUT = (
    "before_metrics",
    "before_checkpoint",
    "in_checkpoint",
)
WASTED = ("after_ledger", BEFORE_SECRETS)  # it is charged, and not out


def killed(folder: Path, point: str, *words: str) -> Mapping[str, Tensor]:
    """The secrets of a run that kill -9 has ended in round `KILLED`."""
    assert crash(point, KILLED, [*TURNS, f"output_dir={folder}", *words]) == -signal.SIGKILL
    return RunSecrets(folder).load()


def releases(folder: Path) -> int:
    """The number of rounds that the ledger was charged for."""
    return DurableLedger(folder / "ledger.db").spent("user").num_releases


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Tensor:
    return run(tmp_path_factory.mktemp("whole") / "run", "seed=7919").params


@pytest.mark.parametrize("point", [*POINTS, BEFORE_SECRETS])
def test_a_killed_run_goes_on_to_the_model_of_one_that_was_not_to_the_last_bit(
    point: str, tmp_path: Path, undisturbed: Tensor
) -> None:
    killed(tmp_path, point, "seed=7919", "privacy.user.max_epsilon=20")
    assert run(tmp_path, "seed=7919", "privacy.user.max_epsilon=20", "resume=true").params.equal(
        undisturbed
    )


@pytest.mark.parametrize("point", [*POINTS, BEFORE_SECRETS])
def test_a_released_round_keeps_its_noise_and_one_that_was_not_is_charged_again(
    point: str, tmp_path: Path
) -> None:
    before, seen = (
        killed(tmp_path, point, "privacy.user.max_epsilon=20"),
        list[Mapping[str, Tensor]](),
    )
    words = ("privacy.user.max_epsilon=20", "resume=true")
    run(tmp_path, *words, on_round=lambda _: seen.append(RunSecrets(tmp_path).load()))
    out = int(before["round"])
    assert out == (KILLED if point in (*OUT, "after_checkpoint") else KILLED - 1)
    assert seen[-1]["keys"][:out].equal(before["keys"])
    assert seen[0]["total"].equal(before["total"]) == (point in OUT)
    assert releases(tmp_path) == ROUNDS + (point in WASTED)


def test_rounds_that_old_files_have_the_server_make_again_are_charged_again(tmp_path: Path) -> None:
    def copy(row: Mapping[str, object]) -> None:
        if row["round"] == 3:
            shutil.copytree(tmp_path / "run", tmp_path / "old")

    words = ("privacy.user.max_epsilon=20", "rounds=5", f"output_dir={tmp_path / 'run'}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunSecrets, "erase", lambda _: None)
        simulate(*load_asked([*TURNS, *words]), on_round=copy)
    for name in ("checkpoint/state.safetensors", SECRETS):
        shutil.copy(tmp_path / "old" / name, tmp_path / "run" / name)
    simulate(*load_asked([*TURNS, *words, "resume=true"]))
    how, charged = Plan(RunFolder(tmp_path / "run").read_config()).mechanism, PrivacyLedger()
    for number in (1, 2, 3, 4, 5):
        charged = charged.record(how.event(number))
    for number in (4, 5):
        charged = charged.record(how.event(number, again=True))
    assert DurableLedger(tmp_path / "run" / "ledger.db").spent("user") == charged


def test_keys_are_for_the_servers_user_alone_and_go_when_the_run_is_over(tmp_path: Path) -> None:
    path, modes = RunSecrets(tmp_path / "run").path, list[int]()
    run(tmp_path / "run", on_round=lambda _: modes.append(stat.S_IMODE(path.stat().st_mode)))
    assert modes == [0o600] * 7
    assert not path.exists()


def test_a_run_that_is_over_does_not_go_on(tmp_path: Path) -> None:
    run(tmp_path / "run", "privacy.user.correlation.bandwidth=3")
    more, call = asked_settings(["resume=true", f"output_dir={tmp_path / 'run'}", "rounds=9"])
    user = replace(more.privacy.user, max_epsilon=99.0)
    with pytest.raises(LedgerError, match=r"^a finished run with correlated noise"):
        simulate(replace(more, privacy=replace(more.privacy, user=user)), call)


def test_privacy_json_states_the_guarantee_and_the_report_reads_it(tmp_path: Path) -> None:
    run(tmp_path / "run")
    user = json.loads((tmp_path / "run" / "privacy.json").read_text())["guarantees"][0]
    assert "3 public groups in turn" in user["mechanism"]
    assert "correlated over rounds (BSR, bandwidth 3)" in user["mechanism"]
    assert user["trusted"].startswith("the server")
    assert user["observer"] == (
        "an observer of every released model who also sees which clients take part in which round"
    )
    assert not [
        each for each in user["not_covered"] if "amplification" in each or "took part" in each
    ]
    assert user["floating_point"]["noise"] == "grid"
    assert 0 < user["floating_point"]["delta_slack"] < 1e-12
    assert report([str(tmp_path / "run")]) == 0
    assert "correlated over rounds" in (tmp_path / "run" / "report.html").read_text()


WRONG = {
    "privacy.user.clip.kind must be fixed: later noise cancels": (
        "privacy.user.clip.kind=adaptive",
    ),
    "privacy.noise must be grid": ("privacy.noise=float",),
    "evaluation.kind must be public or none": ("evaluation.kind=private",),
    "sampling.groups must be given": ("sampling.groups=null",),
    "sampling.groups must be omitted": ("sampling.kind=everyone",),
    "privacy.user.correlation.kind must be none with poisson": (
        "sampling.kind=poisson",
        "sampling.groups=null",
    ),
    "privacy.user.correlation.bandwidth must be omitted": (
        "privacy.user.correlation.kind=sqrt",
        "privacy.user.correlation.bandwidth=3",
    ),
    "sampling.kind must be poisson, fixed or everyone": (
        "privacy.user.mechanism=tests.mechanisms.signs:Signs",
    ),
}


@pytest.mark.parametrize(("said", "words"), WRONG.items(), ids=WRONG)
def test_what_does_not_go_with_turns_is_refused(said: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as refused:
        config(*words)
    assert str(refused.value).startswith(said)


NODE = {"partition-id": 0, "num-partitions": 20}


@pytest.mark.parametrize(
    ("least", "number", "node_id", "said"),
    [
        ("4", 1, 6, "requires sampling.kind=cyclic with 4 groups or more"),
        ("3", 2, 6, "round 2 is not this client's turn"),
        ("3", 1, None, "round 1 is not this client's turn"),
        ("3", 1, 6, None),
        ("0", 2, 6, None),
    ],
)
def test_with_a_policy_a_client_keeps_to_its_turn_by_itself(
    least: str, number: int, node_id: int | None, said: str | None
) -> None:
    run = replace(
        client_settings(
            config("privacy.user.noise_multiplier=1", "privacy.user.target_epsilon=null")
        )
    )
    asked, node = TrainRequest(number, 0.3, run), NODE | {"min-groups": least}
    if said is None:
        assert node_client(work_of(asked), node, node_id).answer(
            work_of(asked), torch.zeros(650)
        ).update.shape == (650,)
        return
    with pytest.raises(Refused, match=said):
        node_client(work_of(asked), node, node_id).answer(work_of(asked), torch.zeros(650))


def test_audit_refutes_half_its_noise_and_not_its_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    words = (
        "data.num_clients=600",
        "rounds=9",
        "seed=7919",
        "evaluation.kind=none",
        "privacy.user.target_epsilon=null",
    )
    asked = config(*words, "privacy.user.noise_multiplier=2")
    found = experiment_of(asked, AuditRequest(canaries=400, honest=0, runs=2))
    scores = found.observations[-1].scores
    shift = (scores.seen.mean() - scores.unseen.mean()) / scores.unseen.std()
    assert shift == pytest.approx(Turns("bsr", 3, 3, 9).sensitivity / 2, abs=0.2)
    assert not judge(found).refuted
    real = CorrelatedGaussian.stddev
    monkeypatch.setattr(CorrelatedGaussian, "stddev", lambda self, norm: real(self, norm) / 2)
    assert judge(experiment_of(asked, AuditRequest(canaries=400, honest=0, runs=2))).refuted
