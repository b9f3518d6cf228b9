"""Four guarded sites on this machine, each a SuperNode of its own, and apps that nobody there has
read."""

from __future__ import annotations

import json
import math
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from dp_accounting import GaussianDpEvent
from dp_accounting.pld import PLDAccountant

from discreet.deployment.local_federation import Federation
from discreet.guard.patient_blocks import split_site
from discreet.ledger.durable_ledger import DurableLedger
from discreet.ledger.rollback_guard import STATE_VARIABLE
from tests.guard.guarded_sites import PATIENTS_APP, guarded_federation, open_folder, run
from tests.guard.made import HOSTILE, guard_toml
from tests.guard.test_attacks import can_not

SITES, BLOCKS, ROUNDS, NOISE, DELTA = 4, 4, 2, 4.0, 1e-5


def make_site(
    folder: Path, number: int, monkeypatch: pytest.MonkeyPatch, **settings: object
) -> Path:
    """A site with forty patients, whose first feature tells the disease."""
    folder.mkdir(mode=0o700)
    draw = random.Random(4021 + number)
    rows = [(draw.random() * 2 - 1, draw.random() * 2 - 1) for _ in range(40)]
    lines = [f"p{place},{one},{two},{int(one > 0)}" for place, (one, two) in enumerate(rows)]
    table = folder / "train.csv"
    table.write_text("\n".join(["patient,one,two,disease", *lines]) + "\n")
    split_site(table, folder / "site", id_column="patient", count=BLOCKS)
    table.unlink()
    monkeypatch.setenv(STATE_VARIABLE, str(folder / "state"))
    DurableLedger.create(folder / "ledger.db")
    given = {"at_once": BLOCKS, "clip_norm": 1.0, "block_seconds": 12.0, **settings}
    guard_toml(folder, blocks=BLOCKS, **given)
    return folder


@pytest.fixture(scope="module")
def sites() -> Iterator[tuple[Federation, list[Path]]]:
    if reason := can_not("kernel"):
        pytest.skip(reason)
    with open_folder() as folder, pytest.MonkeyPatch.context() as patch:
        made = [make_site(folder / f"site-{number}", number, patch) for number in range(SITES)]
        with guarded_federation(folder / "federation", made) as federation:
            yield federation, made


# The tests of containers run a guarded site with Flower each time, and a federation of four costs a
# minute.
@pytest.mark.slow
def test_an_ordinary_app_trains_and_each_site_has_paid(
    sites: tuple[Federation, list[Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, folders = sites
    trains_and_pays(federation, folders, monkeypatch)


@pytest.mark.slow
def test_the_same_under_landlock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := can_not("landlock"):
        pytest.skip(reason)
    with open_folder() as folder:
        settings = {"enclosure": "landlock", "charge": "all-blocks", "block_seconds": 6.0}
        settings |= {"at_once": 1}
        made = [make_site(folder / f"s{each}", each, monkeypatch, **settings) for each in range(2)]
        with guarded_federation(folder / "federation", made, read_only=True) as federation:
            trains_and_pays(federation, made, monkeypatch, charged=NOISE / BLOCKS)


def trains_and_pays(
    federation: Federation,
    folders: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    *,
    charged: float = NOISE,
) -> None:
    """Runs an ordinary app on all sites; fails unless each answers, and has paid for each round by
    the noise multiplier `charged`."""
    test = federation.folder / "test.csv"
    test.write_text("patient,one,two,disease\n1,0.5,0.2,1\n2,-0.5,0.2,0\n")
    config = {"features": 2, "test": str(test), "guard_noise_multiplier": NOISE}
    said = run(
        federation,
        "patients",
        PATIENTS_APP,
        nodes=len(folders),
        num_server_rounds=ROUNDS,
        server_momentum=0.0,
        **config,
    )
    answered = f"Received {len(folders)} results and 0 failures"
    assert len(re.findall(answered, said)) == ROUNDS, said
    expected = PLDAccountant().compose(GaussianDpEvent(charged), ROUNDS).get_epsilon(DELTA)
    for folder in folders:
        monkeypatch.setenv(STATE_VARIABLE, str(folder / "state"))
        assert DurableLedger(folder / "ledger.db").spent("patient").epsilon(DELTA) == pytest.approx(
            expected, rel=1e-3
        )


SECURE = """
def strategy_of(context: Context) -> Strategy:
    from discreet import DPFedAvg, FixedClipping, MaskedGaussian

    noise = float(context.run_config["guard-noise-multiplier"])
    clipping = FixedClipping(norm=1.0)
    mechanism = MaskedGaussian(
        noise_multiplier=noise, delta=1e-5, clipping=clipping, too_noisy="warn"
    )
    nodes = int(context.run_config["nodes"])
    return DPFedAvg(
        population_size=nodes,
        min_available_nodes=nodes,
        sampling="everyone",
        mechanism=mechanism,
    )


@app.main()
"""


def secure_copy(folder: Path) -> Path:
    """The app of patients with a server that reads a masked sum; its client is unchanged."""
    copied = folder / "secure"
    shutil.copytree(PATIENTS_APP, copied, ignore=shutil.ignore_patterns("__pycache__"))
    server = copied / "patients" / "server_app.py"
    assert server.read_text().count("@app.main()\n") == 1
    server.write_text(server.read_text().replace("@app.main()\n", SECURE.lstrip()))
    return copied


@pytest.mark.slow
def test_under_secure_aggregation_each_site_pays_for_its_patients_by_its_own_count(
    sites: tuple[Federation, list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation, folders = sites
    test, noise = federation.folder / "test.csv", 2.5
    test.write_text("patient,one,two,disease\n1,0.5,0.2,1\n2,-0.5,0.2,0\n")
    config = {"features": 2, "test": str(test), "guard_noise_multiplier": noise}
    said = run(federation, "secure", secure_copy(tmp_path), num_server_rounds=ROUNDS, **config)
    assert f"round {ROUNDS}/{ROUNDS}" in said, said
    for folder in folders:
        monkeypatch.setenv(STATE_VARIABLE, str(folder / "state"))
        spent = DurableLedger(folder / "ledger.db").spent("patient")
        masked = [
            (event, count)
            for event, count in spent.entries
            if hasattr(event, "renyi_noise_multiplier")
        ]
        ((event, count),) = masked
        assert count == ROUNDS
        # Two of four are sure to be honest and there: the noise of the whole sum is for one site,
        # that of a patient k / 2 times as much; whole steps take a little of it.
        assert 0.95 * noise * BLOCKS / 2 < event.renyi_noise_multiplier <= noise * BLOCKS / 2


@pytest.mark.slow
@pytest.mark.parametrize("attack", ["records", "raise"])
def test_the_server_of_a_hostile_app_sees_noised_arrays_and_a_constant(
    sites: tuple[Federation, list[Path]], attack: str
) -> None:
    federation, _ = sites
    said = run(federation, f"hostile-{attack}", HOSTILE, attack=attack)
    seen = [json.loads(line.partition("SEEN ")[2]) for line in said.splitlines() if "SEEN " in line]
    assert len(seen) == SITES, said
    for each in seen:
        assert each.keys() == {"arrays", "metrics"}
        assert each["metrics"] == {"num-examples": BLOCKS}
        assert all(0 < value < math.inf for value in each["arrays"].values())
