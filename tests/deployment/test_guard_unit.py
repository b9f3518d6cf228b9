"""discreet-guard.service: what systemd understands, and a guard whose walls hold under its limits."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from discreet.deployment.supernode import _parsed
from discreet.ledger.rollback_guard import STATE_VARIABLE
from tests.guard.guarded_sites import open_folder, owned
from tests.guard.made import site
from tests.guard.test_attacks import can_not
from tests.guard.test_block_release import PATIENTS
from tests.guard.unprivileged import ROOT, as_nobody

UNIT = ROOT / "discreet-guard.service"
# What systemd makes of ProtectSystem=strict, ReadWritePaths=, PrivateTmp= and PrivateDevices=.
AS_IN_THE_UNIT = """
set -e
mount --make-rprivate /
mount --bind "$1" /srv
shift
mount -o remount,bind,ro /
mount -t tmpfs -o mode=1777 none /tmp
dev=$(mktemp -d)
mount -t tmpfs -o mode=755 none "$dev"
for each in null zero full random urandom tty; do
  touch "$dev/$each"
  mount --bind "/dev/$each" "$dev/$each"
done
mkdir -m 1777 "$dev/shm" "$dev/pts"
mount --bind /dev/shm "$dev/shm"
mount --rbind /dev/pts "$dev/pts"
mount -n --move "$dev" /dev
exec "$@"
"""
PROGRAM = """
from pathlib import Path
from discreet.guard.operating import broken_walls, started
from discreet.guard.site_check import check_site
with started(check_site(Path("/srv/guard.toml"))) as sandbox:
    print("reached:", broken_walls(sandbox))
"""


def settings() -> dict[str, str]:
    """The settings of the unit."""
    lines = UNIT.read_text().splitlines()
    pairs = [line.partition("=") for line in lines if line and line[0] not in "#["]
    assert len({key for key, _, _ in pairs}) == len(pairs)
    return {key: value for key, _, value in pairs}


def test_the_unit_starts_a_guard_with_limits_and_denies_nothing_that_blocks_need() -> None:
    given = settings()
    words = given["ExecStart"].split()
    assert words[1:3] == ["-m", "discreet.deployment.supernode"]
    arguments = _parsed(words[3:])
    assert arguments.guard == Path(given["WorkingDirectory"]) / "guard.toml"
    assert given["ReadWritePaths"] == given["WorkingDirectory"]
    assert {"MemoryMax", "MemorySwapMax", "TasksMax", "CPUQuota", "StartLimitBurst"} <= {*given}
    denied = {"RestrictNamespaces", "PrivateUsers", "ProtectKernelTunables", "ProtectKernelLogs"}
    assert not {*denied, "ProtectProc", "MemoryDenyWriteExecute"} & {*given}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_understands_each_line_of_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / UNIT.name
    unit.write_text(UNIT.read_text().replace("/opt/discreet/bin/python", "/usr/bin/true"))
    asked = ["systemd-analyze", "verify", "--man=no", str(unit)]
    done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    unit.write_text(unit.read_text() + "NoSuchSetting=yes\n")
    done = subprocess.run(asked, capture_output=True, text=True, check=False, timeout=60)
    assert "NoSuchSetting" in done.stderr


@pytest.fixture
def folder() -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("mounts as systemd does need root")
    if reason := can_not("bubblewrap"):
        pytest.skip(reason)
    if any(Path(each).resolve().is_relative_to("/tmp") for each in (ROOT, sys.prefix)):
        pytest.skip("PrivateTmp hides a checkout, or Python, below /tmp")
    with open_folder() as made:
        yield made


@pytest.mark.processes
def test_the_walls_hold_where_the_unit_lets_a_guard_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(folder / "state"))
    site(folder, PATIENTS, enclosure="bubblewrap", any=False, apps=["ab" * 32])
    owned(folder)
    guard = as_nobody(["setpriv", "--no-new-privs", "--", sys.executable, "-c", PROGRAM])
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", AS_IN_THE_UNIT, "sh", str(folder), *guard],
        env={**os.environ, STATE_VARIABLE: "/srv/state", "HOME": "/srv", "PYTHONPATH": str(ROOT)},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.strip() == "reached: []", done.stdout + done.stderr


@pytest.mark.parametrize("name", ["", ".node", ".guard"])
def test_services_have_no_swap_and_a_healthcheck_and_nodes_a_share_of_the_processors(
    name: str,
) -> None:
    services = yaml.safe_load((ROOT / f"docker-compose{name}.yml").read_text())["services"]
    for service, settings in services.items():
        assert settings["memswap_limit"] == settings["mem_limit"], service
        assert "test" in settings["healthcheck"], service
        if service.partition("-")[0] in ("node", "guard"):
            assert settings["cpus"], service
