"""The walls around one block. Its process puts them up before it loads any code of the app.

With bubblewrap a block has its own user, mount, process, IPC, network and host namespaces, inside
those of the sandbox; the files that it may write are in memory and end with it. In a container that
forbids namespaces, Landlock takes their place for files, TCP, signals and abstract sockets. In both
cases a seccomp filter (`system_calls`) allows only the system calls that training needs, and the
process gives up for good the rights to undo any of this.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from discreet.guard.system_calls import OF_SHARED_FILES, allow_calls

NEWNS = 0x20000
NEWUTS = 0x4000000
NEWIPC = 0x8000000
NEWUSER = 0x10000000
NEWPID = 0x20000000
NEWNET = 0x40000000
ALL_SPACES = NEWUSER | NEWNS | NEWPID | NEWIPC | NEWNET | NEWUTS
NOSUID = 2
NODEV = 4
NOEXEC = 8
READ_ONLY = 1
REMOUNT = 32
RECURSIVE = 0x4000
PRIVATE = 0x40000
NO_NEW_PRIVILEGES = 38
SECCOMP = 22
DUMPABLE = 4
DROP_BOUNDING = 24
SUBREAPER = 36
CAPABILITIES = 64
MEMORY = 1 << 20
FILES_OF_A_MEGABYTE = 64  # as `scratch.LEAST_BYTES` has it
BIND = 0x1000
FIXED_ADDRESSES = 0x40000
OTHER_MB = 512  # beside the memory of a kernel: its own code, in the same file
OTHER_PROCESSES = 512  # beside those of a block: a kernel has many for a moment as it starts
FILES_OF_A_KERNEL = 1 << 14  # it keeps what a block has opened
WRITABLE = "/tmp"
SHARED_MEMORY = "/dev/shm"
LANDLOCK_NEEDS = 6  # the version of Landlock that keeps signals and abstract sockets in

libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class BlockLimits:
    """The limits of a block, in megabytes, processes and seconds."""

    memory_mb: int
    disk_mb: int
    processes: int
    seconds: float


class EnclosureError(OSError):
    """A wall can't be put up. No app runs then."""


def call(name: str, *arguments: object) -> int:
    """Calls a function of the C library. EnclosureError: it failed."""
    result = int(getattr(libc, name)(*arguments))
    if result < 0:
        error = ctypes.get_errno()
        raise EnclosureError(error, f"{name}: {os.strerror(error)}")
    return result


def mount(source: str, target: str, kind: str, flags: int, data: str = "") -> None:
    """Mounts a file system, or with the kind "none" changes its mount options."""
    flagged = ctypes.c_ulong(flags)
    call("mount", source.encode(), target.encode(), kind.encode(), flagged, data.encode())


def new_spaces() -> None:
    """Moves this process into new namespaces. Its next child is the first process of the new
    process namespace."""
    user = os.getuid()
    group = os.getgid()
    call("unshare", ALL_SPACES)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    Path("/proc/self/gid_map").write_text(f"{group} {group} 1")


def enclose_in_spaces(limits: BlockLimits) -> None:
    """Runs in the first process of new namespaces: leaves it writable files in memory only, its own
    processes only, and no capabilities."""
    mount("none", "/", "none", RECURSIVE | PRIVATE)
    mount_writable(limits, os.getuid())
    mount("tmpfs", "/dev/pts", "tmpfs", NOSUID | NODEV | READ_ONLY)
    mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC, "subset=pid")  # and no counters
    call("sethostname", b"block", 5)
    _give_up_capabilities()
    _limit(limits, limits.processes)
    allow_calls()


def mount_writable(limits: BlockLimits, user: int) -> None:
    """Mounts the folders in memory that a block of that user may write."""
    files = limits.disk_mb * FILES_OF_A_MEGABYTE
    options = f"size={limits.disk_mb}m,nr_inodes={files},mode=0700,uid={user},gid={user}"
    mount("tmpfs", WRITABLE, "tmpfs", NOSUID | NODEV, options)
    memory = Path(WRITABLE, "shm")
    memory.mkdir()
    memory.chmod(0o1777)
    mount(str(memory), SHARED_MEMORY, "none", BIND)


def enclose_a_kernel(limits: BlockLimits, image: str) -> None:
    """Runs in the first process of new namespaces, before it starts a kernel for one block: leaves
    it its memory, a file in memory, and the folder `image` read-only."""
    mount("none", "/", "none", RECURSIVE | PRIVATE)
    megabytes = limits.memory_mb + limits.disk_mb + OTHER_MB
    mount("tmpfs", WRITABLE, "tmpfs", NOSUID | NODEV, f"size={megabytes}m,mode=0700")
    mount("none", image, "none", BIND | REMOUNT | READ_ONLY | NOSUID | NODEV)
    mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC, "subset=pid")
    call("sethostname", b"block", 5)
    _give_up_capabilities()
    whole = replace(limits, disk_mb=megabytes)
    _limit(whole, limits.processes + OTHER_PROCESSES, files=FILES_OF_A_KERNEL)
    call("personality", ctypes.c_ulong(FIXED_ADDRESSES))  # the memory's size depends on them
    allow_calls(a_kernel=True)  # for an app that has broken out of its kernel


def enclose_in_kernel(limits: BlockLimits) -> None:
    """Encloses the app's process in a kernel of its own: without rights, as elsewhere, so that it
    stays in that kernel."""
    _give_up_capabilities()
    _limit(limits, limits.processes)
    allow_calls()


def enclose_by_landlock(limits: BlockLimits, readable: Sequence[str], scratch: str) -> None:
    """Encloses a block without namespaces: it can read `readable`, write `scratch`, and open
    nothing else."""
    _limit(limits, limits.processes + _tasks_of_this_user())
    _restrict(readable, scratch)
    call("prctl", DUMPABLE, 0, 0, 0, 0)
    allow_calls(feigned=OF_SHARED_FILES)


def _give_up_capabilities() -> None:
    call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    for capability in range(CAPABILITIES):
        libc.prctl(DROP_BOUNDING, capability, 0, 0, 0)  # EINVAL above the last one
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    call("capset", header, (ctypes.c_uint32 * 6)())
    call("prctl", DUMPABLE, 0, 0, 0, 0)


def _limit(limits: BlockLimits, processes: int, *, files: int = 256) -> None:
    seconds = int(limits.seconds * limits.processes) + 1
    bounds = {
        resource.RLIMIT_NPROC: processes,
        resource.RLIMIT_FSIZE: limits.disk_mb * MEMORY,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: seconds,
        resource.RLIMIT_NOFILE: files,
        resource.RLIMIT_MEMLOCK: MEMORY,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    for what, most in bounds.items():
        _, hard = resource.getrlimit(what)
        if hard == resource.RLIM_INFINITY:
            least = most
        else:
            least = min(most, hard)
        resource.setrlimit(what, (least, least))


def _tasks_of_this_user() -> int:
    user = os.getuid()
    count = 0
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):  # it has ended in the meantime
                count += len(os.listdir(f"/proc/{entry.name}/task")) * (entry.stat().st_uid == user)
    return count


# Landlock: include/uapi/linux/landlock.h. Only some of these rights apply to a file that is not a
# folder.
_CREATE = 444
_ADD_RULE = 445
_RESTRICT = 446
_EXECUTE = 1 << 0
_READ_FILE = 1 << 2
_READ_FOLDER = 1 << 3
_READ = _EXECUTE | _READ_FILE | _READ_FOLDER
_ALL_RIGHTS = (1 << 16) - 1
_OF_FILES = _EXECUTE | (1 << 1) | _READ_FILE | (1 << 14) | (1 << 15)
_TCP = 3
_SCOPED = 3


def landlock_version() -> int:
    """The version of Landlock that the kernel has; 0 if it has none."""
    return max(0, int(libc.syscall(ctypes.c_long(_CREATE), None, ctypes.c_size_t(0), 1)))


def check_landlock(readable: Sequence[str]) -> None:
    """Raises EnclosureError unless Landlock can enclose a block here: the kernel must support it,
    and the file systems that blocks read from must not record access times, through which one block
    could signal to another."""
    version = landlock_version()
    if version < LANDLOCK_NEEDS:
        raise EnclosureError(
            f"the kernel has Landlock ABI {version}; version {LANDLOCK_NEEDS} is "
            "needed (Linux 6.12)"
        )
    for path in readable:
        flags = os.statvfs(path).f_flag
        if not flags & (os.ST_RDONLY | os.ST_NOATIME):
            raise EnclosureError(
                f'{path} must be mounted read-only or with noatime for enclosure = "landlock"'
            )


def _restrict(readable: Sequence[str], scratch: str) -> None:
    call("prctl", NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    attributes = struct.pack("QQQ", _ALL_RIGHTS, _TCP, _SCOPED)
    ruleset = call("syscall", ctypes.c_long(_CREATE), attributes, ctypes.c_size_t(24), 0)
    rules = [(path, _READ) for path in (*readable, "/dev/urandom")]
    rules += [(path, _ALL_RIGHTS) for path in (scratch, "/dev/null")]
    for path, rights in rules:
        folder = os.open(path, os.O_PATH)
        if os.path.isdir(path):
            allowed = rights
        else:
            allowed = rights & _OF_FILES
        rule = struct.pack("=Qi", allowed, folder)
        call("syscall", ctypes.c_long(_ADD_RULE), ctypes.c_int(ruleset), 1, rule, 0)
        os.close(folder)
    call("syscall", ctypes.c_long(_RESTRICT), ctypes.c_int(ruleset), 0)
    os.close(ruleset)
