"""The channels that `channels` tries: counters that a kernel keeps for all its processes, and
numbers of the whole machine. `kernel_stores` has the others.

System calls are named by their numbers on x86-64, as Python has no names for them.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

from discreet.guard.channels import Channel

MANY = 20  # times AT_ONCE pipes: more than others make in a turn, whom a processor serves too
AT_ONCE = 64
FEW = 1  # where a step is a process
SOME = 20  # where a step is dear, or a counter is of the whole kernel and not of a processor

libc = ctypes.CDLL(None, use_errno=True)


def called(number: int, *arguments: object) -> int:
    """The result of a system call. OSError: it failed."""
    plain = [ctypes.c_long(each) if isinstance(each, int) else each for each in arguments]
    result = int(libc.syscall(ctypes.c_long(number), *plain))
    if result < 0:
        raise OSError(ctypes.get_errno(), f"system call {number}")
    return result


def counter(
    name: str, read: Callable[[], float], step: Callable[[], object], steps: int
) -> Channel:
    """A counter that a level moves on by so many steps, times the level."""

    def write(level: int) -> None:
        for _ in range(steps * level):
            step()

    return Channel(name, read, write)


def inode_of(descriptors: Sequence[int]) -> int:
    """The inode number of the first of some descriptors, which are closed."""
    number = os.fstat(descriptors[0]).st_ino
    for each in descriptors:
        os.close(each)
    return number


def pipe_inode() -> int:
    """The number of a new pipe."""
    return inode_of(os.pipe())


def make_pipes() -> None:
    """Makes some pipes and closes them."""
    ends = [end for _ in range(AT_ONCE) for end in os.pipe()]
    if max(ends) - min(ends) + 1 == len(ends):
        os.closerange(min(ends), max(ends) + 1)
    else:
        for end in ends:
            os.close(end)


def socket_option(option: int) -> int:
    """A number of a new socket: its cookie, or that of its network."""
    one, other = socket.socketpair()
    with closing(one), closing(other):
        return int(struct.unpack("Q", one.getsockopt(socket.SOL_SOCKET, option, 8))[0])


def socket_inode() -> int:
    """The number of a new socket."""
    return inode_of([each.detach() for each in socket.socketpair()])


def new_process() -> float:
    """The number of a process that ends at once."""
    pid = os.posix_spawn("/usr/bin/true", ["true"], {})
    os.waitpid(pid, 0)
    return float(pid)


def new_session() -> None:
    """Starts a program in a session of its own, and waits for its end."""
    os.waitpid(os.posix_spawn("/usr/bin/true", ["true"], {}, setsid=True), 0)


def numbers_in(path: str, name: str = "", place: int = 0) -> float:
    """A number in a file of the kernel: in the line that begins with `name`, or its first."""
    for line in Path(path).read_text().splitlines():
        if line.startswith(name):
            words = line.removeprefix(name).replace("-", " ").replace(":", " ").split()
            return float(words[place].partition("=")[2] or words[place])
    raise ValueError(path)


def sysinfo(place: int, kind: str = "Q") -> float:
    """A number of the machine: load, free memory, processes."""
    found = ctypes.create_string_buffer(112)
    if libc.sysinfo(found) < 0:
        raise OSError(ctypes.get_errno(), "sysinfo")
    return float(struct.unpack_from(kind, found, place)[0])


def temporary() -> str:
    """The folder in which a block may write."""
    return os.environ.get("HOME", "/tmp")


def file_inode(folder: str) -> int:
    """The number of a new file."""
    path = os.path.join(folder, f"made-by-{os.getpid()}")
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    os.unlink(path)
    return inode_of([descriptor])


def mount_number() -> float:
    """The number of the mount of the temporary folder, by statx."""
    found = ctypes.create_string_buffer(256)
    called(332, -100, ctypes.c_char_p(temporary().encode()), 0, 0x1000, found)
    return float(struct.unpack_from("Q", found, 0x90)[0])


def terminal() -> float:
    """The number of a new terminal."""
    main, other = os.openpty()
    number = float(os.ttyname(other).rpartition("/")[2])
    os.close(main)
    os.close(other)
    return number


def spin(level: int) -> None:
    """Uses the processor for a moment."""
    for _ in range(50_000 * level):
        pass


def take(level: int) -> None:
    """Takes memory and gives it back: the cache of a file that is left in the temporary folder."""
    with open(os.path.join(temporary(), "left-by-a-block-large"), "wb") as file:
        file.write(bytes((1 << 18) * level))


def none(level: int) -> None:
    """Writes nothing: others' writing shows."""


def counters() -> list[Channel]:
    """Numbers that a kernel counts on for all its processes."""
    group = counter(
        "an automatic group",
        lambda: numbers_in("/proc/self/autogroup", "/autogroup-"),
        new_session,
        FEW,
    )
    scratch = temporary()
    shared = partial(file_inode, "/dev/shm")
    made = [
        counter("a pipe's inode", pipe_inode, make_pipes, MANY),
        Channel("a socket's inode", socket_inode, none),
        counter("a pidfd's inode", pidfd, pidfd, SOME),
        counter("a socket's cookie", lambda: socket_option(57), lambda: socket_option(57), SOME),
        Channel("a network's cookie", lambda: socket_option(71), none),
        counter("a file in memory", memory, memory, SOME),
        counter("a file's inode", lambda: file_inode(scratch), lambda: file_inode(scratch), SOME),
        counter("a shared file's inode", shared, shared, SOME),
        counter("a terminal's number", terminal, terminal, 1),
        Channel("a mount's number", mount_number, none),
        Channel("a process number", new_process, none),
        group,
    ]
    for space in ("pid", "mnt", "user", "ipc", "net"):
        made.append(Channel(f"the {space} name space", partial_inode(space), none))
    return made


def pidfd() -> int:
    """The number of a new descriptor of a process."""
    return inode_of([os.pidfd_open(os.getpid())])


def memory() -> int:
    """The number of a new file in memory."""
    return inode_of([os.memfd_create("made")])


def partial_inode(space: str) -> Callable[[], float]:
    """A reader of the number of a name space."""
    return lambda: float(os.stat(f"/proc/self/ns/{space}").st_ino)


def of_the_machine() -> list[Channel]:
    """Numbers of the whole machine: load, memory, disks, processes."""
    files = {
        "/proc/loadavg": ("", 0, spin),
        "/proc/stat": ("processes", 0, none),
        "/proc/vmstat": ("pgfault", 0, take),
        "/proc/meminfo": ("MemFree", 0, take),
        "/proc/sys/fs/file-nr": ("", 0, none),
        "/proc/sys/fs/inode-nr": ("", 0, none),
        "/proc/sys/fs/dentry-state": ("", 0, none),
        "/proc/sys/kernel/random/entropy_avail": ("", 0, none),
        "/proc/sys/kernel/ns_last_pid": ("", 0, none),
        "/proc/softirqs": (" TIMER", 0, spin),
        "/proc/pressure/cpu": ("some", 3, spin),
        "/proc/uptime": ("", 1, spin),
        "/proc/self/net/sockstat": ("sockets: used", 0, none),
        "/proc/self/cgroup": ("", 0, none),
        "/proc/locks": ("", 0, none),
    }
    made = [
        Channel(path, partial(numbers_in, path, at[0], at[1]), at[2]) for path, at in files.items()
    ]
    return [
        *made,
        Channel("load, by sysinfo", lambda: sysinfo(8), spin),
        Channel("free memory, by sysinfo", lambda: sysinfo(40), take),
        Channel("processes, by sysinfo", lambda: sysinfo(80, "H"), none),
        Channel("free room of the scratch", lambda: float(os.statvfs(temporary()).f_bfree), take),
        Channel("free room of the system", lambda: float(os.statvfs("/usr").f_bfree), take),
        Channel("free inodes", lambda: float(os.statvfs("/usr").f_ffree), none),
    ]
