"""The channels that `channels` tries, continued: stores that outlive a block, what blocks that run
side by side can hold before each other's eyes, and what no kernel hides.

A store that only has something or not takes two places, which together are one of four levels.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import resource
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from discreet.guard.channels import Channel, walk
from discreet.guard.kernel_channels import called, counters, libc, of_the_machine

NAME = "left-by-a-block"
KEY = 0x64697363
PORT = 47_119
PLACES = 2
MANY = 1000
START_SECONDS = 0.1
TAKE_SECONDS = 0.2
WALKS = 20


def pair(name: str, found: Callable[[int], float], put: Callable[[int, bool], object]) -> Channel:
    """A channel of two places: `found` tells whether one has something, `put` gives or takes it."""

    def write(level: int) -> None:
        for place in range(PLACES):
            with suppress(OSError, ValueError):  # there was nothing to take
                put(place, bool(level >> place & 1))

    return Channel(name, lambda: sum(found(place) * 2**place for place in range(PLACES)), write)


def beside_python(name: str = "this.py") -> str:
    """A file of Python that every block may read, none should change, and nothing else reads."""
    return os.path.join(os.path.dirname(os.__file__), name)


def cached_by_read(path: str) -> float:
    """1 if the first bytes of the file are in memory, by a read that may not wait."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return float(os.preadv(descriptor, [bytearray(16)], 0, os.RWF_NOWAIT) > 0)
    except BlockingIOError:
        return 0.0
    finally:
        os.close(descriptor)


def cached_by_map(path: str) -> float:
    """The same by mincore, of a file that is mapped."""
    told = ctypes.create_string_buffer(1)
    one = ctypes.c_size_t(1)
    libc.mmap.restype = ctypes.c_void_p
    with open(path, "rb") as file:
        place = libc.mmap(None, one, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
    try:
        called(27, ctypes.c_void_p(place), 1, told)
    finally:
        libc.munmap(ctypes.c_void_p(place), one)
    return float(told.raw[0] & 1)


def cached_by_count(path: str) -> float:
    """The same by cachestat."""
    descriptor = os.open(path, os.O_RDONLY)
    found = (ctypes.c_uint64 * 5)()
    try:
        called(451, descriptor, (ctypes.c_uint64 * 2)(0, 0), found, 0)
    finally:
        os.close(descriptor)
    return float(found[0] > 0)


def set_cache(path: str, bit: bool) -> None:
    """Reads a file into memory, or has it forgotten."""
    descriptor = os.open(path, os.O_RDONLY)
    if bit:
        os.read(descriptor, 4096)
    else:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def cached(how: str, read: Callable[[str], float], *names: str) -> Channel:
    """Two files in the page cache, or not."""
    paths = [beside_python(name) for name in names]
    return pair(
        f"the page cache, {how}",
        lambda place: read(paths[place]),
        lambda place, bit: set_cache(paths[place], bit),
    )


def file_flags(flags: int | None = None) -> float:
    """The attributes of the watched file, by file_getattr or file_setattr of Linux 6.17."""
    found = (ctypes.c_uint64 * 3)(flags or 0)
    number = 468 if flags is None else 469
    called(number, -100, ctypes.c_char_p(beside_python().encode()), found, 24, 0)
    return float(found[0])


def left_in(folder: str) -> Channel:
    """A file that is left in a folder."""
    path = Path(folder, NAME)

    def write(level: int) -> None:
        if level:
            path.write_text(f"{level}")
        else:
            path.unlink(missing_ok=True)

    def read() -> float:
        return float(path.read_text()) if path.exists() else 0.0

    return Channel(f"a file left in {folder}", read, write)


def left_object(name: str, key: int, make: Sequence[int], find: Sequence[int], end: int) -> Channel:
    """An object of System V: made by the call `make`, found by `find`, ended by the call `end`."""

    def found(place: int) -> int:
        return called(find[0], KEY + 2 * key + place, *find[1:])

    def exists(place: int) -> float:
        try:
            return float(found(place) >= 0)
        except OSError as error:
            if error.errno == 2:
                return 0.0
            raise

    def put(place: int, bit: bool) -> None:
        if bit:
            called(make[0], KEY + 2 * key + place, *make[1:])
        else:
            calls = {31: (0, None), 66: (0, 0), 71: (0, None)}[end]
            called(end, found(place), *calls)

    return pair(name, exists, put)


def listener(place: int, bit: bool) -> None:
    """Leaves a process that listens at a port, or ends it by a call."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", PORT + place), timeout=1):
        pass  # one that listens ends with its first call
    if hears(place) or not bit:  # or there are no sockets
        return
    ready, tell = os.pipe()
    if os.fork() == 0:
        os.close(ready)
        with suppress(OSError):
            os.setsid()
            server = socket.create_server(("127.0.0.1", PORT + place))
            os.write(tell, b"1")
            for number in (0, 1, 2, tell):
                os.close(number)
            signal.alarm(60)
            server.accept()
        os._exit(0)
    os.close(tell)
    os.read(ready, 1)
    os.close(ready)


def hears(place: int) -> float:
    """1 if something listens at the port. It is not called: that would end it."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("127.0.0.1", PORT + place))
        except OSError as error:
            if error.errno == 98:  # the address is in use
                return 1.0
            raise
    return 0.0


def named(place: int) -> bytes:
    """The name of a place."""
    return f"{NAME}-{place}".encode()


def queue(place: int, bit: bool) -> None:
    """Makes a POSIX queue, or removes it."""
    name = ctypes.c_char_p(named(place))
    if bit:
        os.close(called(240, name, os.O_CREAT | os.O_RDWR, 0o600, None))
    else:
        called(241, name)


def queue_is_there(place: int) -> float:
    """1 if the POSIX queue is there."""
    try:
        os.close(called(240, ctypes.c_char_p(named(place)), os.O_RDWR, 0, None))
    except OSError as error:
        if error.errno == 2:
            return 0.0
        raise
    return 1.0


def key(place: int, bit: bool) -> None:
    """Adds a key to the key ring of the user, or removes it."""
    user = -4
    given = (ctypes.c_char_p(b"user"), ctypes.c_char_p(named(place)))
    if bit:
        called(248, *given, ctypes.c_char_p(b"1"), 1, user)
    else:
        called(250, 9, called(250, 10, user, *given, 0), user)


def key_is_there(place: int) -> float:
    """1 if the key is there."""
    given = (ctypes.c_char_p(b"user"), ctypes.c_char_p(named(place)))
    try:
        return float(called(250, 10, -4, *given, 0) > 0)
    except OSError as error:
        if error.errno == 126:
            return 0.0
        raise


def set_parent(level: int) -> None:
    """Changes a limit of the process that starts the blocks."""
    _, hard = resource.prlimit(os.getppid(), resource.RLIMIT_STACK)
    resource.prlimit(os.getppid(), resource.RLIMIT_STACK, ((8 + level) << 20, hard))


def own_stack() -> float:
    """A limit that a block has from the process that started it."""
    return float(resource.getrlimit(resource.RLIMIT_STACK)[0])


def remember(level: int) -> None:
    """Changes the memory of this process, which the next one may have from its starter."""
    os.environ[NAME] = str(level)


def call_host(level: int) -> None:
    """Changes the name of the host."""
    socket.sethostname("block" + "s" * level)


def of_a_file(path: str) -> list[Channel]:
    """What a file has beside its content."""
    attribute = "user.bit"
    return [
        Channel(
            "a file's mode",
            lambda: float(os.stat(path).st_mode),
            lambda level: os.chmod(path, 0o644 + level),
        ),
        Channel(
            "a file's time",
            lambda: os.stat(path).st_mtime,
            lambda level: os.utime(path, (1, 1 + level)),
        ),
        Channel("a file's attributes", file_flags, lambda level: file_flags(0x40 * level)),
        Channel(
            "a file's extended attribute",
            lambda: float(os.getxattr(path, attribute)),
            lambda level: os.setxattr(path, attribute, b"%d" % level),
        ),
    ]


def accessed() -> Channel:
    """The time of access of two files that are read, or not, after a third one."""
    first, *others = (beside_python(name) for name in ("wave.py", "sched.py", "colorsys.py"))

    def put(place: int, bit: bool) -> None:
        if place == 0:
            Path(first).read_bytes()
            time.sleep(0.01)  # of which a file's time is a multiple
        if bit:
            Path(others[place]).read_bytes()

    def found(place: int) -> float:
        return float(os.stat(others[place]).st_atime_ns > os.stat(first).st_atime_ns)

    return pair("a file's time of access", found, put)


def stores() -> list[Channel]:
    """Places that keep a level when a block has ended."""
    folders = ("/tmp", "/var/tmp", "/dev/shm", "/run", "/", os.path.dirname(os.__file__))
    return [
        cached("by a read", cached_by_read, "antigravity.py", "turtle.py"),
        cached("by mincore", cached_by_map, "nturl2path.py", "rlcompleter.py"),
        cached("by cachestat", cached_by_count, "tabnanny.py", "pyclbr.py"),
        *of_a_file(beside_python()),
        accessed(),
        *map(left_in, folders),
        left_object("shared memory", 1, (29, 4096, 0o1600), (29, 0, 0), 31),
        left_object("a semaphore", 2, (64, 1, 0o1600), (64, 0, 0), 66),
        left_object("a message queue", 3, (68, 0o1600), (68, 0), 71),
        pair("a POSIX queue", queue_is_there, queue),
        pair("a key ring", key_is_there, key),
        pair("a port", hears, listener),
        Channel("the starter's limits", own_stack, set_parent),
        Channel("the starter's memory", lambda: float(os.environ.get(NAME, 0)), remember),
        Channel("the host's name", lambda: float(len(os.uname().nodename)), call_host),
    ]


def wait_until(done: Callable[[], bool], seconds: float) -> None:
    """Waits until something is done, at most so long."""
    until = time.time() + seconds
    while not done() and time.time() < until:
        time.sleep(0.001)


def locked(descriptor: int) -> bool:
    """Takes the lock of a file, if nobody else has it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Locks:
    """Locks of two files that every block may read."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {}

    def put(self, place: int, bit: bool) -> None:
        """Takes a lock, or gives it back."""
        if place in self.held:
            os.close(self.held.pop(place))
        if bit:
            self.held[place] = self._opened(place)
            # somebody who reads may have it for a moment
            wait_until(lambda: locked(self.held[place]), TAKE_SECONDS)

    def found(self, place: int) -> float:
        """1 if somebody else has the lock."""
        descriptor = self._opened(place)
        try:
            return float(not locked(descriptor))
        finally:
            os.close(descriptor)

    def _opened(self, place: int) -> int:
        return os.open(beside_python(("this.py", "wave.py")[place]), os.O_RDONLY)


class Watch:
    """The count of all openings of a file since the first reading, by inotify."""

    def __init__(self) -> None:
        self.descriptor: int | None = None
        self.events = 0
        self.path = beside_python("sched.py")

    def read(self) -> float:
        """The number of openings so far."""
        if self.descriptor is None:
            self.descriptor = called(294, os.O_NONBLOCK)
            called(254, self.descriptor, ctypes.c_char_p(self.path.encode()), 0x30)  # open, close
        with suppress(BlockingIOError):
            self.events += len(os.read(self.descriptor, 1 << 16)) // struct.calcsize("iIII")
        return float(self.events)

    def write(self, level: int) -> None:
        """Opens the file."""
        for _ in range(level):
            os.close(os.open(self.path, os.O_RDONLY))


class Sleepers:
    """Threads that wait for a word of a file that every block may read, until the next level is
    set. A call that wakes them tells how many they are."""

    def __init__(self) -> None:
        self.word: ctypes.c_void_p | None = None
        self.value = 0
        self.turn = 0

    def write(self, level: int) -> None:
        """Lets so many threads wait, and no others any more."""
        self.turn += 1
        called(202, self._mapped(), 1, MANY)  # wakes those of before
        for _ in range(level):
            given = (self._mapped(), self.turn)
            threading.Thread(target=self._wait, args=given, daemon=True).start()
        wait_until(lambda: self.read() >= level, START_SECONDS)

    def read(self) -> float:
        """The number that wait: moves them from the word to the word itself, and wakes none."""
        return float(called(202, self._mapped(), 3, 0, MANY, self._mapped()))

    def _wait(self, word: ctypes.c_void_p, turn: int) -> None:
        seconds = (ctypes.c_long * 2)(1, 0)
        while self.turn == turn:
            with suppress(OSError):
                called(202, word, 0, self.value, seconds)

    def _mapped(self) -> ctypes.c_void_p:
        if self.word is None:
            libc.mmap.restype = ctypes.c_void_p
            with open(beside_python("colorsys.py"), "rb") as file:
                self.value = int.from_bytes(file.read(4), "little")
                size = ctypes.c_size_t(4096)
                place = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
            self.word = ctypes.c_void_p(place)
        return self.word


def held() -> list[Channel]:
    """What a block can only show to another one beside it."""
    locks = Locks()
    watch = Watch()
    sleepers = Sleepers()
    return [
        pair("a lock of a file", locks.found, locks.put),
        Channel("a watch of a file", watch.read, watch.write),
        Channel("a futex in a file", sleepers.read, sleepers.write),
    ]


def of_the_processor() -> list[Channel]:
    """What no kernel hides: a plain Prime+Probe of the processor's cache, and a clock. They are
    measured and decide nothing."""
    seconds = ("the time of one walk through memory", "the time of many")
    makes = (walk, lambda: sum(walk() for _ in range(WALKS)))
    return [
        Channel(name, read, lambda level: None, covered=False)
        for name, read in zip(seconds, makes, strict=True)
    ]


def all_channels(*, side_by_side: bool = False) -> list[Channel]:
    """The channels, in the order of a turn's levels."""
    more = held() if side_by_side else []
    kept = [replace(store, alone=True) for store in (*stores(), *more)]
    return [*kept, *of_the_machine(), *counters(), *of_the_processor()]
