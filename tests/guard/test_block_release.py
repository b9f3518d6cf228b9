"""What leaves a site: moved by 2C at most by one patient, paid for before a block starts, and
nothing else."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict

from discreet.audit.canaries import Scores
from discreet.audit.estimates import fit_gaussians
from discreet.guard import block_release
from discreet.guard.guard_policy import GuardTerms
from discreet.guard.site_guard import App, SiteGuard
from discreet.guard.site_records import JOURNAL
from discreet.ledger.durable_ledger import DurableLedger, LedgerError
from discreet.node.account import Refused
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.randomness import RandomSource, seeded_source
from tests.guard.made import (
    DELTA,
    RUN,
    SHAPES,
    SIZE,
    C,
    PlayedSandbox,
    Z,
    arrays,
    context,
    message,
    site,
)
from tests.replay import Replay, replay

Play = Callable[[Sequence[float]], np.ndarray | None]
APP = App(RUN, "stranger/app", "1.0.0", "00" * 32, b"")
PATIENTS = {f"p{number}": 1.0 for number in range(6)}
UNIT = np.zeros(SIZE, np.float32)
UNIT[0] = 1.0


def opposed(values: Sequence[float]) -> np.ndarray:
    """A block with the patient -1 in it gives -C u, and any other +C u."""
    return np.float32(C) * (-UNIT if -1.0 in values else UNIT)


def guard_at(
    folder: Path, play: Play = opposed, patients: dict[str, float] = PATIENTS, **settings: object
) -> SiteGuard:
    """A guard whose blocks are played in this process."""
    policy = site(folder, patients, **settings)  # type: ignore[arg-type]
    return SiteGuard(policy, sandbox=PlayedSandbox(play))  # type: ignore[arg-type]


def answered(guard: SiteGuard, given: Message | None = None, **config: object) -> RecordDict:
    return guard.answer(given or message(), context(**config), APP).content


def neighbours(tmp_path: Path, play: Play = opposed, **settings: object) -> Replay:
    """A guard's round with one patient, and without."""
    without = dict(PATIENTS)
    with_one = without | {"another": -1.0}
    count = iter(range(9))

    def run(patients: dict[str, float], source: RandomSource) -> object:
        guard = guard_at(tmp_path / str(next(count)), play, patients, **settings)
        with patch("discreet.guard.site_guard.secure_source", lambda: source.child("noise")):
            content = answered(guard)
        spent = guard.ledger.spent("patient").entries
        return (
            [torch.from_numpy(array.numpy()) for array in content["arrays"].values()],
            spent,
            dict(content["metrics"]),
        )

    with patch("secrets.token_bytes", lambda length: bytes(range(length))):
        return replay(run, with_one, without)


def test_one_patient_moves_the_sum_by_2c_and_that_is_what_the_noise_is_for(tmp_path: Path) -> None:
    found = neighbours(tmp_path)
    assert found.faults == ()
    assert found.shares == (pytest.approx(1, abs=0.01),)
    assert found.gaussian_distance == pytest.approx(1 / Z, rel=0.01)


def test_a_guard_that_noises_for_c_is_found(tmp_path: Path) -> None:
    with patch.object(block_release, "MOVES", 1):
        found = neighbours(tmp_path)
    assert any("the totals differ by" in fault for fault in found.faults)


@pytest.mark.parametrize(
    "play",
    [
        lambda values: None if -1.0 in values else np.float32(C) * UNIT,
        lambda values: np.float32(1e30) * (-UNIT if -1.0 in values else UNIT),
        lambda values: np.full(SIZE, math.nan if -1.0 in values else 9.0, np.float32),
        lambda values: np.full(SIZE, len(values), np.float32),
    ],
    ids=["fails", "huge", "NaN", "counts"],
)
def test_no_app_moves_the_sum_by_more(tmp_path: Path, play: Play) -> None:
    found = neighbours(tmp_path, play)
    assert found.faults == ()
    assert max(found.shares) <= 1 + 1e-6


def test_a_block_that_ends_late_moves_the_sum_by_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Five blocks. Where one that ends late makes noise alone leave, its patient moves 5C.
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)

    def play(values: Sequence[float]) -> np.ndarray | None:
        if -1.0 not in values:
            return np.float32(C) * UNIT
        clock.now += 1e4
        return None

    found = neighbours(tmp_path, play, blocks=5)
    assert found.faults == ()
    assert found.shares == (pytest.approx(0.5, abs=0.01),)


class Clock:
    """A clock that a test sets."""

    now = 1000.0


def test_the_round_is_on_the_ledger_before_a_block_starts(tmp_path: Path) -> None:
    seen = []

    def play(values: Sequence[float]) -> np.ndarray:
        seen.append(DurableLedger(tmp_path / "site" / "ledger.db").spent("patient").num_releases)
        return UNIT

    answered(guard_at(tmp_path / "site", play))
    assert seen == [1, 1]


def test_the_same_message_after_a_crash_is_paid_for_again_with_new_noise(tmp_path: Path) -> None:
    def crash(values: Sequence[float]) -> np.ndarray:
        raise MemoryError

    guard = guard_at(tmp_path / "site", crash)
    with pytest.raises(MemoryError):
        answered(guard)
    guard.sandbox.play = opposed  # type: ignore[attr-defined]
    first, second = answered(guard), answered(guard)
    assert guard.ledger.spent("patient").num_releases == 3
    assert not np.array_equal(first["arrays"]["weight"].numpy(), second["arrays"]["weight"].numpy())


def test_the_budget_ends_a_run_in_the_middle(tmp_path: Path) -> None:
    two = PLDAccountant().compose(GaussianDpEvent(Z), 2).get_epsilon(DELTA)
    guard = guard_at(tmp_path / "site", max_epsilon=two * 1.01)
    answered(guard)
    answered(guard)
    with pytest.raises(Refused, match="site's guard is spent"):
        answered(guard)
    assert guard.ledger.spent("patient").num_releases == 2


def test_if_all_blocks_fail_noise_alone_leaves(tmp_path: Path) -> None:
    content = answered(guard_at(tmp_path / "site", lambda values: None))
    assert all(np.abs(array.numpy()).max() > 0 for array in content["arrays"].values())
    assert dict(content["metrics"]) == {"num-examples": 2}


@pytest.mark.parametrize("free", [0.0, 1e9])
def test_whether_a_disk_has_room_is_asked_before_anything_and_goes_by_no_block(
    tmp_path: Path, free: float
) -> None:
    guard = guard_at(tmp_path / "site")
    with patch("discreet.guard.site_guard.free_mb", lambda folder: free):
        if free:
            answered(guard)
            return
        with pytest.raises(Refused, match="MB of free disk"):
            answered(guard)
    assert guard.ledger.spent("patient").num_releases == 0


def test_the_states_of_the_last_runs_alone_are_kept(tmp_path: Path) -> None:
    guard = guard_at(tmp_path / "site")
    for number in range(4):
        guard.answer(message(), context(), replace(APP, run_id=number))
    kept = {0: b"of 0", 1: b"of 1"}
    assert guard.states == {2: kept, 3: kept}


def test_an_account_that_was_put_back_is_not_charged(tmp_path: Path) -> None:
    guard = guard_at(tmp_path / "site")
    before = Path(guard.policy.ledger).read_bytes()
    answered(guard)
    Path(guard.policy.ledger).write_bytes(before)
    with pytest.raises(LedgerError):
        answered(guard)
    assert len(guard.sandbox.tasks) == 1  # type: ignore[attr-defined]


ODD = {
    "float64": np.full(3, 1e300),
    "bytes": np.array([b"row", b"row"]),
    "complex": np.zeros(3, np.complex64),
    "dates": np.zeros(3, "datetime64[s]"),
    "booleans": np.zeros(3, bool),
    "infinite": np.full(3, np.inf, np.float32),
}


@pytest.mark.parametrize("name", sorted(ODD))
def test_arrays_of_an_odd_type_or_size_are_refused_or_keep_their_values(
    name: str, tmp_path: Path
) -> None:
    guard = guard_at(tmp_path / "site")
    given = arrays(odd=ODD[name])
    try:
        content = answered(guard, message(RecordDict({"arrays": given})))
    except Refused:
        assert guard.ledger.spent("patient").num_releases == 0
        return
    assert np.array_equal(content["arrays"]["odd"].numpy(), ODD[name])


@pytest.mark.parametrize("kind", [np.float16, np.float64])
def test_arrays_of_other_floats_are_noised_as_float32_are(kind: type, tmp_path: Path) -> None:
    changed = {name: np.zeros(shape, kind) for name, shape in SHAPES.items()}
    # Of noise without a seed, one of the eight values is zero once in 10,000 runs.
    with patch("discreet.guard.site_guard.secure_source", lambda: seeded_source(31181)):
        content = answered(
            guard_at(tmp_path / "site"), message(RecordDict({"arrays": arrays(**changed)}))
        )
    found = np.concatenate([each.numpy().ravel() for each in content["arrays"].values()])
    assert found.dtype == kind
    assert (np.abs(found) > 0).all()


@pytest.mark.parametrize(("clip", "noise"), [(1e-6, 1e6), (1e6, 1e6), (1e-6, Z), (1e6, Z)])
def test_the_ends_of_the_ranges_of_clip_norm_and_noise_work(
    clip: float, noise: float, tmp_path: Path
) -> None:
    guard = guard_at(tmp_path / "site", lambda values: np.float32(clip) * UNIT)
    content = answered(guard, guard_clip_norm=clip, guard_noise_multiplier=noise)
    found = np.concatenate([each.numpy().ravel() for each in content["arrays"].values()])
    # Eight draws: their root of the mean square is within these bounds but for a chance of 1e-9.
    spread = float(np.sqrt((found**2).mean())) / (noise * 2 * clip / 2)
    assert 0.02 < spread < 4


def claimed(shape: tuple[int, ...]) -> Array:
    """An array of a few bytes whose description claims another shape."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()
    return Array(dtype="float32", shape=shape, stype="numpy.ndarray", data=data + bytes(32))


def sent(**changed: np.ndarray) -> Message:
    """A message whose arrays are those that a server sends, but for some."""
    return message(RecordDict({"arrays": arrays(**changed)}))


def longer() -> Message:
    """A message with bytes behind the values of an array."""
    given = arrays()
    given["bias"] = Array("float32", (2,), "numpy.ndarray", given["bias"].data + b"more")
    return message(RecordDict({"arrays": given}))


# Each is made for its own test: 10,001 arrays take half a second.
BAD_MESSAGES: dict[str, Callable[[], Message]] = {
    "nan": lambda: sent(bias=np.array([np.nan, 0], np.float32)),
    "batch norm": lambda: sent(**{"norm.running_mean": np.zeros(2, np.float32)}),
    "large": lambda: sent(weight=np.zeros((4000, 6000), np.float16)),
    "two records": lambda: message(RecordDict({"a": arrays(), "b": arrays()})),
    "a thousand million": lambda: message(
        RecordDict({"arrays": ArrayRecord({"weight": claimed((10**9,))})})
    ),
    "bytes behind an array": longer,
    "a round of 2^63": lambda: message(number=1 << 63),
    "a round of 4000 digits": lambda: message(number=int("9" * 4000)),
    "many arrays": lambda: sent(**{f"a{each}": np.zeros(0, np.float32) for each in range(10_001)}),
    "none": lambda: message(RecordDict({"config": ConfigRecord({"lr": 0.1})})),
    "integers alone": lambda: message(RecordDict({"arrays": ArrayRecord([np.zeros(3, np.int64)])})),
    "evaluate": lambda: message(kind="evaluate"),
    "query": lambda: message(kind="query"),
    "NumPyClient": lambda: message(RecordDict({"fitins.parameters": arrays()})),
}


@pytest.mark.parametrize("name", sorted(BAD_MESSAGES))
def test_a_message_that_a_guard_does_not_answer_costs_nothing(name: str, tmp_path: Path) -> None:
    guard = guard_at(tmp_path / "site")
    with pytest.raises(Refused):
        answered(guard, BAD_MESSAGES[name]())
    assert guard.ledger.spent("patient").num_releases == 0
    assert "refused" in (guard.records / JOURNAL).read_text()
    assert guard.sandbox.tasks == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("frozen", ["x" * 5_000_000, "x " * 2_500_000])
def test_five_megabytes_of_patterns_are_refused_before_a_charge(
    frozen: str, tmp_path: Path
) -> None:
    guard = guard_at(tmp_path / "site")
    with pytest.raises(Refused, match=r"guard-frozen must be at most 100\b"):
        answered(guard, guard_frozen=frozen)
    assert guard.ledger.spent("patient").num_releases == 0
    assert "guard-frozen" in (guard.records / JOURNAL).read_text()


def test_whole_numbers_and_frozen_arrays_keep_the_values_that_were_sent(tmp_path: Path) -> None:
    given = arrays(**{"steps": np.array(3, np.int64), "norm.running_mean": np.ones(2, np.float32)})
    guard = guard_at(tmp_path / "site")
    content = answered(guard, message(RecordDict({"arrays": given})), guard_frozen="*running_mean")
    assert content["arrays"]["steps"].numpy() == 3
    assert content["arrays"]["norm.running_mean"].numpy().tolist() == [1, 1]
    (task,) = guard.sandbox.tasks  # type: ignore[attr-defined]
    assert task.names == ("weight", "bias")


def test_the_mean_is_over_all_blocks_times_q_with_noise_for_2c() -> None:
    release = block_release.BlockRelease(SIZE, GuardTerms(C, Z), 0.5, 10)
    with patch.object(Gaussian, "add_grid_noise", lambda self, total, sensitivity, **_: total):
        mean = release.mean(release.add_up([np.float32(C / 2) * UNIT] * 6), seeded_source(5113))
    assert mean[0].item() == pytest.approx(6 * C / 2 / (0.5 * 10), rel=1e-3)


def test_the_noise_has_the_deviation_that_is_charged() -> None:
    release = block_release.BlockRelease(200_000, GuardTerms(C, Z), 1.0, 1)
    mean = release.mean(release.add_up([None]), seeded_source(90217))
    # Of 200,000 draws the deviation is right to 0.16 % in one standard error; 6 of them are a
    # chance of 2e-9.
    assert float(mean.std()) == pytest.approx(Z * 2 * C, rel=0.01)


def test_blocks_are_drawn_with_probability_q(tmp_path: Path) -> None:
    policy = site(tmp_path, PATIENTS, q=0.3, blocks=2)
    drawn = [len(block_release.drawn_blocks(policy, seeded_source(seed))) for seed in range(3000)]
    # 6000 coins: the mean is right to 0.0059 in one standard error.
    assert np.mean(drawn) / 2 == pytest.approx(0.3, abs=6 * 0.006)


def test_the_blocks_that_were_drawn_run_and_no_other(tmp_path: Path) -> None:
    guard = guard_at(tmp_path / "site", q=0.5)
    with patch("discreet.guard.site_guard.drawn_blocks", lambda policy, source: [1]):
        answered(guard)
    assert [number for number, _ in guard.sandbox.given] == [1]  # type: ignore[attr-defined]


def test_a_block_is_given_the_state_that_it_kept_in_this_run_and_no_other(tmp_path: Path) -> None:
    guard = guard_at(tmp_path / "site")
    answered(guard)
    answered(guard)
    guard.answer(message(), context(), replace(APP, run_id=RUN + 1))
    first, second = [(0, b""), (1, b"")], [(0, b"of 0"), (1, b"of 1")]
    assert guard.sandbox.given == [*first, *second, *first]  # type: ignore[attr-defined]


METRIC = {"name": "accuracy", "low": 0.0, "high": 1.0, "noise-multiplier": 5.0}


def test_a_metric_leaves_noised_within_its_range_and_paid_for(tmp_path: Path) -> None:
    guard = guard_at(
        tmp_path / "site",
        lambda values: np.array([0.75], np.float32),
        evaluate="metric",
        metric=METRIC,
    )
    content = answered(guard, message(kind="evaluate"))
    assert content.keys() == {"metrics"}
    assert content["metrics"].keys() == {"num-examples", "accuracy"}
    assert 0 <= content["metrics"]["accuracy"] <= 1
    assert guard.ledger.spent("patient").entries == ((GaussianDpEvent(5.0), 1),)


@pytest.mark.parametrize("values", [(1e30, -1e30), (math.nan, 1.0), (math.inf, 0.0), (1.0, 0.0)])
def test_no_metric_of_a_block_moves_its_sum_by_more_than_the_noise_is_for(
    values: tuple[float, float],
) -> None:
    metric = block_release.MetricSettings("accuracy", 0.0, 1.0, 5.0)
    release = block_release.BlockRelease(1, GuardTerms(1.0, 5.0), 1.0, 2)
    one, other = (
        release.add_up([block_release.of_metric(metric, value)]).total for value in values
    )
    grid = release.grid
    assert abs(float(grid.to_float(one - other, torch.float64)[0])) <= 2 * (1 + 1e-9)


def test_the_account_of_a_guard_is_its_own(tmp_path: Path) -> None:
    from discreet.ledger.durable_ledger import Charge
    from discreet.settings.rules import ConfigError

    policy = site(tmp_path, PATIENTS)
    DurableLedger(Path(policy.ledger)).charge([Charge(1, "example", "", GaussianDpEvent(1.0))])
    with pytest.raises(ConfigError, match="an account of its own"):
        SiteGuard(policy, sandbox=PlayedSandbox(opposed))  # type: ignore[arg-type]


def test_what_a_block_is_told_names_no_site_and_no_other_block(tmp_path: Path) -> None:
    guard = guard_at(tmp_path / "site")
    answered(guard)
    (task,) = guard.sandbox.tasks  # type: ignore[attr-defined]
    assert task.run_id == RUN
    assert str(tmp_path).encode() not in task.packed()


RELEASES = 4000


def test_an_audit_of_the_release_shows_what_is_claimed_and_no_more() -> None:
    """Releases with a patient whose block turns round, and without; bounds with a false-alarm rate
    of 1e-9."""
    release, delta = block_release.BlockRelease(SIZE, GuardTerms(C, 1.0), 1.0, 2), 1e-3
    source = seeded_source(77081)
    values = []
    for number in range(RELEASES):
        turned = -UNIT if number % 2 else UNIT
        summed = release.add_up([np.float32(C) * turned, np.float32(C) * UNIT])
        values.append(-float(release.mean(summed, source.child(number))[0]))
    fitted = fit_gaussians(Scores(np.array(values), np.arange(RELEASES) % 2 == 1))
    assert fitted is not None
    claim = PLDAccountant().compose(GaussianDpEvent(1.0)).get_epsilon(delta)
    assert fitted.epsilon(delta=delta) == pytest.approx(claim, rel=0.15)
    assert fitted.lower_bound(delta=delta, significance=1e-9) < claim
    # What would be claimed if the patient moved C alone is refuted.
    half = PLDAccountant().compose(GaussianDpEvent(2.0)).get_epsilon(delta)
    assert fitted.lower_bound(delta=delta, significance=1e-9) > half


MANY = {f"p{number}": 1.0 for number in range(400)}
COUNTED = {"blocks": 48, "min_noise_multiplier": 1.0, "max_epsilon": 90.0}


def fails(values: Sequence[float]) -> None:
    """A block of an app that fails on any data."""


def test_an_app_that_fails_in_every_block_has_one_round_and_pays_for_no_count(
    tmp_path: Path,
) -> None:
    # The count is 7 standard deviations from its limit: red by chance once in 10^12.
    guard = guard_at(tmp_path, fails, MANY, **COUNTED)
    answered(guard)
    with pytest.raises(Refused, match=r"noised count no block .*gave a result"):
        answered(guard)
    assert guard.ledger.spent("patient").entries == ((GaussianDpEvent(1.0), 1),)
    answered_run = replace(APP, run_id=RUN + 1)
    with patch.object(guard, "failed", {RUN: True}):  # another run is not refused for it
        guard.answer(message(), context(), answered_run)


@pytest.mark.parametrize("every", [1, 2])
def test_an_app_that_fails_in_half_of_the_blocks_goes_on(tmp_path: Path, every: int) -> None:
    turns = itertools.count()
    guard = guard_at(tmp_path, lambda _: None if next(turns) % every else UNIT, MANY, **COUNTED)
    for _ in range(3):
        answered(guard)
    assert guard.failed == {RUN: False}


@pytest.mark.parametrize(("noise", "blocks", "q"), [(1.0, 48, 1.0), (2.5, 400, 0.2), (4.0, 72, 1)])
def test_noise_of_a_counted_round_costs_what_one_without_a_count_costs(
    noise: float, blocks: int, q: float
) -> None:
    release = block_release.BlockRelease(8, GuardTerms(C, noise), q, blocks, counts=True)
    assert release.can_count
    # A block moves the sum by 2C and the count by 1 at most: together by 1 / z of the noise.
    together = math.hypot(1 / release.noise_multiplier, 1 / release.count_noise)
    assert together == pytest.approx(1 / noise, rel=1e-12)
    assert release.noise_multiplier < 1.35 * noise


def test_too_few_blocks_for_the_noise_are_not_counted() -> None:
    release = block_release.BlockRelease(8, GuardTerms(C, 4.0), 1.0, 71)
    assert not release.can_count


def test_one_patient_moves_the_count_by_no_more_than_its_noise_is_for(tmp_path: Path) -> None:
    seen = []

    def draw(self: object, total: torch.Tensor, sensitivity: float, **how: object) -> torch.Tensor:
        if len(total) == 1:
            seen.append((int(total[0]), sensitivity, self.noise_multiplier))  # type: ignore[attr-defined]
        return total

    for number, play in enumerate((opposed, lambda values: None if -1.0 in values else UNIT)):
        with patch.object(Gaussian, "add_grid_noise", draw):
            guard = guard_at(tmp_path / str(number), play, {**MANY, "another": -1.0}, **COUNTED)
            answered(guard)
    (all_well, one, noise), (one_failed, *_) = seen
    assert (one_failed - all_well) * block_release.HALVES.step == 1.0 == one
    assert noise == pytest.approx(48 / 28)


def test_blocks_that_ended_late_count_as_any_others(tmp_path: Path) -> None:
    for play, failed in ((fails, True), (opposed, False)):
        guard = guard_at(tmp_path / str(failed), play, MANY, **COUNTED)
        with patch("discreet.guard.reply_slots.ReplySlots.over", lambda slots: True):
            answered(guard)
        assert guard.failed == {RUN: failed}
