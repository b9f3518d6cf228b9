"""The memory of a block, counted by the kernel where its service was handed a control group."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from discreet.guard.block_task import KERNEL_PROGRAM
from discreet.guard.memory_groups import MemoryGroups
from tests.guard.test_attacks import can_not
from tests.guard.unprivileged import ROOT

SECONDS = 240


def booted(*attacks: str) -> list[dict[str, Any]]:
    """What comes of attacks on blocks of a guard, on a machine with control groups. Its memory is a
    file, which may not lie where nothing is executed, as /dev/shm in many containers."""
    command = [
        KERNEL_PROGRAM, "mem=3G", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro",
        "quiet", "loglevel=0", "con=null", "con0=fd:0,fd:1", f"PYTHONPATH={ROOT}",
        f"init={sys.executable}", "--", "-B", "-m", "tests.guard.counted_blocks", "boot",
        ",".join(attacks),
    ]  # fmt: skip
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=SECONDS, check=False,
        env={**os.environ, "TMPDIR": tempfile.gettempdir()},
    )  # fmt: skip
    said = done.stdout.decode(errors="replace")
    found = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    assert [each["attack"] for each in found] == [*attacks], said
    return found


@pytest.mark.processes
def test_buffers_of_sockets_count_where_the_guard_has_a_group_of_its_own() -> None:
    if reason := can_not("kernel"):
        pytest.skip(reason)
    if ROOT.is_relative_to("/tmp"):
        pytest.skip("the checkout lies in /tmp, of which the machine that boots has its own")
    (honest, full, after) = booted("honest", "socket_buffers", "honest")
    assert [each["groups"] for each in (honest, full, after)] == [True] * 3
    assert [each["left"] for each in (honest, full, after)] == [[]] * 3
    assert honest["blocks"][0]["vector"] is not None
    assert after["blocks"][0]["vector"] is not None
    (block,) = full["blocks"]
    assert (block["vector"], block["reached"]) == (None, None)
    assert "more than limits.memory-mb and disk-mb" in block["log"]


def test_the_group_of_an_earlier_block_that_is_still_there_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "open", lambda path, flags: 0)
    groups = MemoryGroups(tmp_path)
    earlier, _ = groups.new(0, 64)
    later, _ = groups.new(0, 64)
    assert earlier.folder != later.folder
    assert (later.folder / "memory.max").read_text() == str(64 << 20)


def test_a_group_that_others_are_in_is_left_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("discreet.guard.memory_groups.ROOT", tmp_path)
    monkeypatch.setattr(
        Path, "read_text", lambda self: {"cgroup": "0::/\n"}.get(self.name, "memory 1 2\n")
    )
    assert MemoryGroups.delegated() is None
    assert list(tmp_path.iterdir()) == []
