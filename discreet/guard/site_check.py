"""The checks before a guard connects: policy, split, account, sandbox, memory."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from discreet.guard.block_task import KERNEL_PROGRAM, MACHINE
from discreet.guard.enclosure import WRITABLE, EnclosureError, check_landlock
from discreet.guard.guard_policy import KERNEL, LANDLOCK, PATIENT, GuardPolicy, read_guard
from discreet.guard.sandbox import NO_ROOT, readable_places
from discreet.guard.site_blocks import check_split, read_blocks, read_split
from discreet.guard.site_guard import guard_ledger, open_site
from discreet.settings.rules import ConfigError

MEMORY = 1 << 20
NEEDED = f'enclosure = "kernel" needs {KERNEL_PROGRAM}: apt-get install user-mode-linux'
IN_A_BLOCKS_OWN = "{} lies in /tmp, of which each block's kernel has its own: install it elsewhere"
FIRST_PYTHON = (3, 11, 4)  # whose tarfile knows `filter`


def check_site(path: Path) -> GuardPolicy:
    """The policy of a guard.toml, checked against this machine and user. ConfigError, LedgerError:
    they can't comply with it; the message says why."""
    policy = read_guard(path)
    for fault in faults_of(policy):
        raise ConfigError(f"{path}: {fault}")
    site = open_site(policy)
    read_blocks(site, id_column=policy.blocks.id, count=policy.blocks.count)
    try:
        check_delta(policy, read_split(site).patients)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    guard_ledger(policy)
    return policy


def check_delta(policy: GuardPolicy, patients: int) -> None:
    """Raises ConfigError unless max-delta is below 1 / the number of patients: a larger one lets
    one of them be published outright."""
    if policy.unit == PATIENT and policy.max_delta * patients >= 1:
        raise ConfigError(
            f"max-delta must be below 1 / {patients}, the number of patients that were split "
            f"(got {policy.max_delta:g})"
        )


def split_fault(policy: GuardPolicy) -> str:
    """What in a policy contradicts the split of its site; empty if nothing does, or if the split is
    closed because blocks run."""
    folder = Path(policy.blocks.folder)
    try:
        split = read_split(folder)
        check_split(split, folder, id_column=policy.blocks.id, count=policy.blocks.count)
        check_delta(policy, split.patients)
    except PermissionError:
        return ""
    except ConfigError as error:
        return str(error)
    return ""


def faults_of(policy: GuardPolicy) -> Iterator[str]:
    """The reasons why this user can't start the sandbox on this machine, one sentence each."""
    if (sys.platform, platform.machine()) != ("linux", MACHINE):
        yield (
            f"a guard needs Linux on {MACHINE}, the only machine that its system call "
            "filter supports"
        )
        return
    if sys.version_info < FIRST_PYTHON:
        yield f"a guard needs Python {'.'.join(map(str, FIRST_PYTHON))}, which unpacks by a filter"
    if os.geteuid() == 0:
        yield NO_ROOT
    if policy.enclosure != LANDLOCK and shutil.which("bwrap") is None:
        yield f'enclosure = "{policy.enclosure}" needs bwrap: apt-get install bubblewrap'
    if policy.enclosure == KERNEL and not kernel_is_there():
        yield NEEDED
    if policy.enclosure == KERNEL:
        yield from (IN_A_BLOCKS_OWN.format(path) for path in readable_places() if _hidden(path))
    if policy.alert and not os.access(policy.alert[0], os.X_OK):
        yield f"alert must begin with a program that this user can start (got {policy.alert[0]})"
    if policy.enclosure == LANDLOCK:
        yield from _faults_of_landlock()
    limits = policy.limits
    wanted = policy.at_once * (limits.memory_mb + limits.disk_mb)
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // MEMORY
    if wanted > there:
        yield (
            f"at-once * (limits.memory-mb + limits.disk-mb) is {wanted} MB, but the "
            f"machine has {there}"
        )


def _hidden(path: str) -> bool:
    """True for a place in a folder of which each kernel of a block has its own."""
    return Path(path).resolve().is_relative_to(WRITABLE)


def kernel_is_there() -> bool:
    """True if user-mode Linux is installed."""
    return shutil.which(KERNEL_PROGRAM) is not None


def _faults_of_landlock() -> Iterator[str]:
    try:
        check_landlock(readable_places())
    except EnclosureError as error:
        yield str(error)
