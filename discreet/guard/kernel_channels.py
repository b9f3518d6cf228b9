"""The channels that `channels` tries: counters that a kernel keeps for all its processes, numbers
of the whole machine, and stores that outlive a block.

System calls are named by their numbers on x86-64, as Python has no names for them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import signal
import socket
import struct
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from discreet.guard.channels import Channel

MANY = 100  # times AT_ONCE pipes: more than others make in a turn, whom a processor serves too
AT_ONCE = 64
FEW = 3  # where a step is a process
SOME = 20  # where a step is dear, or a counter is of the whole kernel and not of a processor
NAME = "left-by-a-block"
KEY = 0x64697363

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
    """A counter that a bit moves on by so many steps."""

    def write(bit: bool) -> None:
        for _ in range(steps * bit):
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
    path = os.path.join(folder, f"{NAME}-{os.getpid()}")
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


def beside_python(name: str = "this.py") -> str:
    """A file of Python that every block may read, none should change, and nothing else reads."""
    return os.path.join(os.path.dirname(os.__file__), name)


def cached_by_read(name: str) -> float:
    """1 if the first bytes of the file are in memory, by a read that may not wait."""
    descriptor = os.open(beside_python(name), os.O_RDONLY)
    try:
        return float(os.preadv(descriptor, [bytearray(16)], 0, os.RWF_NOWAIT) > 0)
    except BlockingIOError:
        return 0.0
    finally:
        os.close(descriptor)


def cached_by_map(name: str) -> float:
    """The same by mincore, of a file that is mapped."""
    told = ctypes.create_string_buffer(1)
    one = ctypes.c_size_t(1)
    libc.mmap.restype = ctypes.c_void_p
    with open(beside_python(name), "rb") as file:
        place = libc.mmap(None, one, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    try:
        called(27, ctypes.c_void_p(place), 1, told)
    finally:
        libc.munmap(ctypes.c_void_p(place), one)
    return float(told.raw[0] & 1)


def cached_by_count(name: str) -> float:
    """The same by cachestat."""
    descriptor = os.open(beside_python(name), os.O_RDONLY)
    found = (ctypes.c_uint64 * 5)()
    try:
        called(451, descriptor, (ctypes.c_uint64 * 2)(0, 0), found, 0)
    finally:
        os.close(descriptor)
    return float(found[0])


def set_cache(name: str, bit: bool) -> None:
    """Reads a file into memory, or has it forgotten."""
    descriptor = os.open(beside_python(name), os.O_RDONLY)
    if bit:
        os.read(descriptor, 4096)
    else:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def cached(how: str, read: Callable[[str], float], name: str) -> Channel:
    """A file of its own in the page cache, or not."""
    return Channel(f"the page cache, {how}", partial(read, name), partial(set_cache, name))


def file_flags(flags: int | None = None) -> float:
    """The attributes of the watched file, by file_getattr or file_setattr of Linux 6.17."""
    found = (ctypes.c_uint64 * 3)(flags or 0)
    number = 468 if flags is None else 469
    called(number, -100, ctypes.c_char_p(beside_python().encode()), found, 24, 0)
    return float(found[0])


def left_in(folder: str) -> Channel:
    """A file that is left in a folder."""
    path = Path(folder, NAME)

    def write(bit: bool) -> None:
        if bit:
            path.write_text("1")
        else:
            path.unlink(missing_ok=True)

    return Channel(f"a file left in {folder}", lambda: float(path.exists()), write)


def left_object(name: str, key: int, make: Sequence[int], find: Sequence[int], end: int) -> Channel:
    """An object of System V: made by the call `make`, found by `find`, ended by the call `end`."""

    def found() -> int:
        return called(find[0], KEY + key, *find[1:])

    def exists() -> float:
        try:
            return float(found() >= 0)
        except OSError:
            return 0.0

    def write(bit: bool) -> None:
        if bit:
            called(make[0], KEY + key, *make[1:])
        else:
            calls = {31: (0, None), 66: (0, 0), 71: (0, None)}[end]
            called(end, found(), *calls)

    return Channel(name, exists, write)


def listener(bit: bool) -> None:
    """Leaves a process that listens at a port and an abstract address, or ends it by a call."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", PORT), timeout=1):
        pass  # one that listens ends with its first call
    if not bit:
        return
    ready, tell = os.pipe()
    if os.fork() == 0:
        os.close(ready)
        with suppress(OSError):
            os.setsid()
            server = socket.create_server(("127.0.0.1", PORT))
            os.write(tell, b"1")
            for number in (0, 1, 2, tell):
                os.close(number)
            signal.alarm(60)
            server.accept()
        os._exit(0)
    os.close(tell)
    os.read(ready, 1)
    os.close(ready)


PORT = 47_119


def hears() -> float:
    """1 if something listens at the port. It is not called: that would end it."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", PORT))
        except OSError as error:
            if error.errno == 98:  # the address is in use
                return 1.0
            raise
    return 0.0


def queue(bit: bool) -> None:
    """Makes a POSIX queue, or removes it."""
    name = ctypes.c_char_p(NAME.encode())
    if bit:
        os.close(called(240, name, os.O_CREAT | os.O_RDWR, 0o600, None))
    else:
        called(241, name)


def queue_is_there() -> float:
    """1 if the POSIX queue is there."""
    try:
        os.close(called(240, ctypes.c_char_p(NAME.encode()), os.O_RDWR, 0, None))
    except OSError as error:
        if error.errno == 2:
            return 0.0
        raise
    return 1.0


def key(bit: bool) -> None:
    """Adds a key to the key ring of the user, or removes it."""
    user = -4
    given = (ctypes.c_char_p(b"user"), ctypes.c_char_p(NAME.encode()))
    if bit:
        called(248, *given, ctypes.c_char_p(b"1"), 1, user)
    else:
        called(250, 9, called(250, 10, user, *given, 0), user)


def key_is_there() -> float:
    """1 if the key is there."""
    given = (ctypes.c_char_p(b"user"), ctypes.c_char_p(NAME.encode()))
    try:
        return float(called(250, 10, -4, *given, 0) > 0)
    except OSError as error:
        if error.errno == 126:
            return 0.0
        raise


def set_parent(bit: bool) -> None:
    """Changes a limit of the process that starts the blocks."""
    soft, hard = resource.prlimit(os.getppid(), resource.RLIMIT_STACK)
    del soft
    resource.prlimit(os.getppid(), resource.RLIMIT_STACK, ((8 + bit) << 20, hard))


def own_stack() -> float:
    """A limit that a block has from the process that started it."""
    return float(resource.getrlimit(resource.RLIMIT_STACK)[0])


def spin(bit: bool) -> None:
    """Uses the processor for a moment."""
    for _ in range(200_000 * bit):
        pass


def take(bit: bool) -> None:
    """Takes memory and gives it back: the cache of a file that is left in the temporary folder."""
    with open(os.path.join(temporary(), NAME + "-large"), "wb") as file:
        file.write(bytes((1 << 20) * bit))


def touch(bit: bool) -> None:
    """Reads the watched file, whose time of access may tell."""
    if bit:
        Path(beside_python()).read_bytes()


def none(bit: bool) -> None:
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
    return inode_of([os.memfd_create(NAME)])


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
        Channel(path, lambda path=path, at=at: numbers_in(path, at[0], at[1]), at[2])  # type: ignore[misc]
        for path, at in files.items()
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


def stores() -> list[Channel]:
    """Places that keep a bit when a block has ended."""
    return [
        cached("by a read", cached_by_read, "antigravity.py"),
        cached("by mincore", cached_by_map, "nturl2path.py"),
        cached("by cachestat", cached_by_count, "tabnanny.py"),
        *of_a_file(beside_python()),
        *map(left_in, ("/tmp", "/var/tmp", "/dev/shm", "/run", "/", os.path.dirname(os.__file__))),
        left_object("shared memory", 1, (29, 4096, 0o1600), (29, 0, 0), 31),
        left_object("a semaphore", 2, (64, 1, 0o1600), (64, 0, 0), 66),
        left_object("a message queue", 3, (68, 0o1600), (68, 0), 71),
        Channel("a POSIX queue", queue_is_there, queue),
        Channel("a key ring", key_is_there, key),
        Channel("a port", hears, listener),
        Channel("the starter's limits", own_stack, set_parent),
        Channel("the starter's memory", lambda: float(NAME in os.environ), remember),
        Channel("the host's name", lambda: float(len(os.uname().nodename)), call_host),
    ]


def of_a_file(path: str) -> list[Channel]:
    """What a file has beside its content."""
    attribute = "user.bit"
    return [
        Channel(
            "a file's mode",
            lambda: float(os.stat(path).st_mode),
            lambda bit: os.chmod(path, 0o644 + bit),
        ),
        Channel(
            "a file's time",
            lambda: os.stat(path).st_mtime,
            lambda bit: os.utime(path, (1, 1 + bit)),
        ),
        Channel("a file's time of access", lambda: os.stat(path).st_atime, touch),
        Channel("a file's attributes", file_flags, lambda bit: file_flags(0x80 * bit)),
        Channel(
            "a file's extended attribute",
            lambda: float(os.getxattr(path, attribute)),
            lambda bit: os.setxattr(path, attribute, b"%d" % bit),
        ),
    ]


def remember(bit: bool) -> None:
    """Changes the memory of this process, which the next one may have from its starter."""
    os.environ.pop(NAME, None)
    if bit:
        os.environ[NAME] = "1"


def call_host(bit: bool) -> None:
    """Changes the name of the host."""
    socket.sethostname("block" + "s" * bit)


def all_channels() -> list[Channel]:
    """The channels, in the order of a turn's bits."""
    kept = [replace(store, alone=True) for store in stores()]
    return [*kept, *of_the_machine(), *counters()]
