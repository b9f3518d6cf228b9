"""The walls around one block. Its process puts them up before it loads any code of the app.

With bubblewrap a block has its own user, mount, process, IPC, network and host namespaces, inside
those of the sandbox; the files that it may write are in memory and end with it. In a container that
forbids namespaces, Landlock takes their place for files, TCP, signals and abstract sockets. In both
cases a seccomp filter denies system calls that training does not need, and the process gives up for
good the rights to undo any of this.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import struct
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

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
    filter_calls(DENIED, sockets=(AF_UNIX,))


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


def enclose_in_kernel(limits: BlockLimits) -> None:
    """Encloses the app's process in a kernel of its own: without rights, as elsewhere, so that it
    stays in that kernel."""
    _give_up_capabilities()
    _limit(limits, limits.processes)
    filter_calls(DENIED, sockets=(AF_UNIX,))


def enclose_by_landlock(limits: BlockLimits, readable: Sequence[str], scratch: str) -> None:
    """Encloses a block without namespaces: it can read `readable`, write `scratch`, and open
    nothing else."""
    _limit(limits, limits.processes + _tasks_of_this_user())
    _restrict(readable, scratch)
    call("prctl", DUMPABLE, 0, 0, 0, 0)
    filter_calls((*DENIED, *DENIED_WITHOUT_SPACES), sockets=(), feigned=FEIGNED_WITHOUT_SPACES)


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


# seccomp: x86-64 system call numbers, and instructions of the classic packet filter (BPF).
MACHINE = "x86_64"
_ARCHITECTURE = 0xC000003E
_OTHER_ABI = 0x40000000
_SOCKET = 41
_SOCKETPAIR = 53
_CLONE = 56
_CLONE3 = 435
_PRLIMIT = 302
AF_UNIX = 1
_STREAM = 1
_NO_PERMISSION = 0x50001
_NO_SUCH_CALL = 0x50026
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_FEIGN = 0x50000
_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_MASK = 0x54
_RETURN = 0x06
_NUMBER_AT = 0
_ARCHITECTURE_AT = 4
_FIRST_AT = 16
_SECOND_AT = 24


def _numbers(words: str) -> tuple[int, ...]:
    return tuple(int(word) for word in words.split())


# Namespaces and mounts, tracing, other processes' memory, keys, BPF, performance counters,
# io_uring, file handles, modules, clocks and userfaultfd; unnamed files, and System V memory and
# queues, which no limit of a process counts; the contents of the page cache.
DENIED = _numbers(
    "101 103 105 106 113 114 116 117 119 122 123 155 161 163 164 165 166 167 168 169 170 171 172 "
    "173 175 176 179 227 246 248 249 250 256 272 279 298 300 303 304 305 308 310 311 312 313 320 "
    "321 323 425 426 427 428 429 430 431 432 433 438 440 442 448 29 30 31 64 65 66 67 68 69 70 "
    "71 220 319 447 451 467 "
)
# Calls that a namespace would isolate: connections, and POSIX queues.
DENIED_WITHOUT_SPACES = _numbers("42 49 50 240 241 242 243 ")
# A lock on a file that all blocks can read would signal to others. The call succeeds and locks
# nothing.
FLOCK = 73
FCNTL = 72
LOCK_COMMANDS = (6, 7, 37, 38, 1024)  # F_SETLK, F_SETLKW, those of open files, F_SETLEASE
# Calls that change the mode, owner, times or attributes of a file, or the priority or processors of
# another process. Landlock covers none of them, and one block could signal to the next through
# them. They do nothing and report success.
FEIGNED_WITHOUT_SPACES = _numbers(
    "90 91 92 93 94 132 188 189 190 197 198 199 235 260 261 268 280 452 463 466 141 142 144 203 "
    "251 314 "
)
_Instruction = tuple[int, int, int, int]


def filter_calls(
    denied: Sequence[int], *, sockets: Sequence[int], feigned: Sequence[int] = ()
) -> None:
    """Makes the kernel deny system calls of this process and its children for good; calls in
    `feigned` do nothing and report success. Only the address families in `sockets` are allowed.
    EnclosureError: the machine is not x86-64, or the kernel accepts no filter."""
    if platform.machine() != MACHINE:
        raise EnclosureError(
            f"the system call filter supports only {MACHINE}, not {platform.machine()}"
        )
    program = _program(denied, sockets=sockets, feigned=feigned)
    code = b"".join(struct.pack("HBBI", *each) for each in program)
    buffer = ctypes.create_string_buffer(code)
    header = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer))
    call("prctl", SECCOMP, 2, ctypes.c_char_p(header), 0, 0)


def _program(
    denied: Sequence[int], *, sockets: Sequence[int], feigned: Sequence[int]
) -> list[_Instruction]:
    start: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, _ARCHITECTURE),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, _OTHER_ABI),
        (_RETURN, 0, 0, _KILL),
    ]
    each = [_answer(number, _NO_PERMISSION) for number in denied]
    each += [_answer(number, _FEIGN) for number in feigned]
    # its flags can't be inspected, so callers fall back to clone
    each += [_answer(_CLONE3, _NO_SUCH_CALL)]
    new_spaces = [
        (_EQUAL, 0, 4, _CLONE),
        (_LOAD, 0, 0, _FIRST_AT),
        (_ANY_BIT, 0, 1, ALL_SPACES),
        (_RETURN, 0, 0, _NO_PERMISSION),
        (_RETURN, 0, 0, _ALLOW),
    ]
    own_limits = _only(_PRLIMIT, _FIRST_AT, (0,))  # of no other process, which would hand them on
    sockets_alone = _only(_SOCKET, _FIRST_AT, sockets)
    parts = [*each, sockets_alone, own_limits, *_locks(), _pairs(), new_spaces]
    parts.append([(_RETURN, 0, 0, _ALLOW)])
    return start + [instruction for part in parts for instruction in part]


def _answer(number: int, answer: int) -> list[_Instruction]:
    return [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, answer)]


def _only(number: int, argument_at: int, values: Sequence[int]) -> list[_Instruction]:
    """Allows a call only if its argument is one of the values."""
    allowed = [instruction for value in values for instruction in _answer(value, _ALLOW)]
    inside = [(_LOAD, 0, 0, argument_at), *allowed, (_RETURN, 0, 0, _NO_PERMISSION)]
    return [(_EQUAL, 0, len(inside), number), *inside]


def _locks() -> list[list[_Instruction]]:
    """File locks, which do nothing."""
    inside = [(_LOAD, 0, 0, _SECOND_AT)]
    for command in LOCK_COMMANDS:
        inside += _answer(command, _FEIGN)
    inside.append((_RETURN, 0, 0, _ALLOW))
    return [_answer(FLOCK, _FEIGN), [(_EQUAL, 0, len(inside), FCNTL), *inside]]


def _pairs() -> list[_Instruction]:
    """A pair of connected stream sockets, which can't send to another address."""
    inside = [
        (_LOAD, 0, 0, _SECOND_AT),
        (_MASK, 0, 0, 0xF),
        *_answer(_STREAM, _ALLOW),
        (_RETURN, 0, 0, _NO_PERMISSION),
    ]
    return [(_EQUAL, 0, len(inside), _SOCKETPAIR), *inside]
