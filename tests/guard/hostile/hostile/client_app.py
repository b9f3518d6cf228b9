"""A ClientApp that tries each way out. What it reaches it prints as JSON, which its log holds for
the test."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import glob
import json
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()
libc = ctypes.CDLL(None, use_errno=True)
SECRET = "left-by-a-block"


def rows(context: Context) -> np.ndarray:
    """The rows of this block."""
    text = Path(context.node_config["data"], "rows.csv").read_text().splitlines()[1:]
    return np.array([[float(cell) for cell in line.split(",")[1:]] for line in text])


def tried(attempt: Callable[[], object]) -> object:
    """What an attempt gives; None if it fails."""
    try:
        return attempt()
    except (Exception, SystemExit):  # noqa: BLE001
        return None


def called(name: str, *arguments: object) -> object:
    """The result of a function of the C library that does not fail."""
    result = getattr(libc, name)(*arguments)
    return None if result < 0 else result


def connects(family: int, kind: int, address: object) -> object:
    with socket.socket(family, kind) as channel:
        channel.settimeout(2)
        channel.connect(address)
        return kind == socket.SOCK_STREAM or channel.send(b"row")


def network(context: Context) -> dict[str, object]:
    port = int(context.run_config["port"])
    path = str(context.run_config["socket"])
    abstract = f"\0guard-test-{context.run_config['guard']}"
    inet, stream, datagram = socket.AF_INET, socket.SOCK_STREAM, socket.SOCK_DGRAM
    return {
        "tcp": tried(lambda: connects(inet, stream, ("127.0.0.1", port))),
        "tcp6": tried(lambda: connects(socket.AF_INET6, stream, ("::1", port))),
        "udp": tried(lambda: connects(inet, datagram, ("127.0.0.1", port))),
        "outside": tried(lambda: connects(inet, stream, ("192.0.2.1", 80))),
        "dns": tried(lambda: socket.getaddrinfo("example.org", 80)),
        "unix": tried(lambda: connects(socket.AF_UNIX, stream, path)),
        "unix datagram": tried(lambda: connects(socket.AF_UNIX, datagram, path + ".dgram")),
        "pair": tried(
            lambda: socket.socketpair(socket.AF_UNIX, datagram)[0].sendto(b"row", path + ".dgram")
        ),
        "abstract": tried(lambda: connects(socket.AF_UNIX, stream, abstract)),
        "netlink": tried(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).fileno()),
        "vsock": tried(lambda: socket.socket(40, stream).fileno()),
    }


def files(context: Context) -> dict[str, object]:
    site = str(context.run_config["site"])
    return {
        "site": tried(lambda: os.listdir(site)),
        "key": tried(lambda: Path(site, "key").read_bytes()),
        "blocks": tried(lambda: glob.glob(f"{site}/blocks/*") or None),
        "size of a block": tried(lambda: os.stat(f"{site}/blocks/00000.tar").st_size),
        "ledger": tried(lambda: Path(site).with_name("ledger.db").read_bytes()[:4].hex()),
        "policy": tried(lambda: Path(site).with_name("guard.toml").read_text()),
        "peers": tried(lambda: Path(site).with_name("peers.json").read_text()),
        "identity": tried(lambda: Path(site).with_name("a.guard.key").read_text()),
        "through a parent": tried(lambda: os.listdir(f"/proc/{os.getppid()}/root/{site}")),
        "up": tried(lambda: os.listdir(f"{context.node_config['data']}/../../../../{site}")),
        "passwords": tried(lambda: Path("/etc/passwd").read_text()),
        "homes": tried(lambda: os.listdir("/home") + os.listdir("/root")),
    }


def processes(context: Context) -> dict[str, object]:
    guard = int(context.run_config["guard"])
    others = [pid for pid in range(1, 4_000) if pid != os.getpid()]
    return {
        "command lines": tried(
            lambda: (
                [
                    pid
                    for pid in others
                    if tried(lambda pid=pid: Path(f"/proc/{pid}/cmdline").read_bytes())
                ]
                or None
            )
        ),
        "signals": tried(
            lambda: (
                [pid for pid in others if tried(lambda pid=pid: os.kill(pid, 0) or True)] or None
            )
        ),
        "guard": tried(lambda: os.kill(guard, signal.SIGTERM) or True),
        "ptrace": called("ptrace", 16, guard, None, None),
        "memory": tried(lambda: Path(f"/proc/{guard}/mem").open("rb").read(1)),
        "limits": tried(lambda: resource.prlimit(guard, resource.RLIMIT_NOFILE, (3, 3))),
    }


def environment(context: Context) -> dict[str, object]:
    """The variables that tell of the guard: its site's folder is in the values of some."""
    folder = str(Path(str(context.run_config["site"])).parents[1])
    return {name: value for name, value in os.environ.items() if folder in value}


def rights(context: Context) -> dict[str, object]:
    status = (
        dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines())
        if (tried(lambda: Path("/proc/self/status").read_text()))
        else {}
    )
    return {
        "capabilities": status.get("CapEff", "0").strip("0") or None,
        "mount": called("mount", b"none", b"/tmp", b"tmpfs", ctypes.c_ulong(0), None),
        "unmount": called("umount2", b"/proc", 2),
        "unshare": called("unshare", 0x10000000),
        "clone": called(
            "syscall",
            ctypes.c_long(56),
            ctypes.c_ulong(0x10000011),
            None,
            None,
            None,
            ctypes.c_ulong(0),
        ),
        "setuid": tried(lambda: os.setresuid(0, 0, 0) or True),
        "chroot": tried(lambda: os.chroot("/") or True),
        "set-user-id programs": tried(
            lambda: (
                subprocess.run(["su", "-c", "id -u"], capture_output=True, timeout=5).stdout.strip()
                == b"0"
                or None
            )
        ),
        "keys": called(
            "syscall",
            ctypes.c_long(248),
            b"user",
            b"row",
            b"row",
            ctypes.c_size_t(3),
            ctypes.c_int(-4),
        ),
        "io_uring": called("syscall", ctypes.c_long(425), 4, ctypes.create_string_buffer(120)),
        "bpf": called("syscall", ctypes.c_long(321), 0, ctypes.create_string_buffer(120), 120),
        "shared memory": called(
            "shmget", ctypes.c_int(4711), ctypes.c_size_t(4096), ctypes.c_int(0o1666)
        )
        if context.run_config["enclosure"] == "landlock"
        else None,
    }


def writable(context: Context) -> dict[str, object]:
    """Files of blocks before, and the folders in which one could be left."""
    own = {context.node_config["data"], os.environ["HOME"], os.getcwd()}
    own |= {"/dev/shm"} if context.run_config["enclosure"] != "landlock" else set()
    places = [
        "/",
        "/dev",
        "/dev/shm",
        "/tmp",
        "/var/tmp",
        "/usr",
        "/run",
        "/data",
        "/proc",
        "/home",
        sys.prefix,
    ]
    places += [
        context.node_config["data"],
        os.environ["HOME"],
        *glob.glob("/dev/*/"),
        *glob.glob("/tmp/*/"),
    ]
    found = [each for each in places if Path(each, SECRET).exists()]
    written = []
    for each in dict.fromkeys(places):
        if tried(lambda each=each: Path(each, SECRET).write_text("row")):
            written.append(each)
    mine = {str(Path(each).resolve()) for each in own}
    outside = [
        each
        for each in written
        if not any(str(Path(each).resolve()).startswith(home) for home in mine)
    ]
    return {"found": found or None, "outside": outside or None}


def changed(context: Context) -> dict[str, object]:
    """What a block can change at a file that others see, without opening it."""
    place = str(context.run_config["shared"])
    before = os.stat(place)
    tried(lambda: os.chmod(place, 0o777))
    tried(lambda: os.utime(place, (1, 1)))
    tried(lambda: os.setxattr(place, "user.row", b"row"))
    tried(lambda: Path(place).read_text())
    after = os.stat(place)
    names = "st_mode", "st_mtime", "st_atime"
    told = [name for name in names if getattr(before, name) != getattr(after, name)]
    return {"changed": told or None, "attribute": tried(lambda: os.getxattr(place, "user.row"))}


def kept(context: Context) -> dict[str, object]:
    before = dict(context.state["kept"]) if "kept" in context.state else None
    context.state["kept"] = ConfigRecord({"of": float(rows(context)[0, 0])})
    return {"before": before}


def daemon(context: Context) -> dict[str, object]:
    """Two generations that leave the block's session, and one that hears no signal, by a name that
    others see."""
    libc.prctl(15, b"leftover", 0, 0, 0)
    for _ in range(2):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                for number in range(1, 32):
                    tried(lambda number=number: signal.signal(number, signal.SIG_IGN))
                time.sleep(600)
            os._exit(0)
    return {}


def clings(context: Context) -> dict[str, object]:
    """Stays, with a daemon, and asks the kernel not to end it with its parent."""
    libc.prctl(15, b"leftover", 0, 0, 0)
    libc.prctl(1, 0, 0, 0, 0)
    if os.fork() == 0:
        os.setsid()
    time.sleep(600)
    return {}


def fork_bomb(context: Context) -> dict[str, object]:
    count = 0
    while count < 5000:
        try:
            if os.fork() == 0:
                time.sleep(60)
        except OSError:
            return {"forks": None if count < 200 else count}
        count += 1
    return {"forks": count}


def memory(context: Context) -> dict[str, object]:
    taken = []
    while len(taken) < 200:
        taken.append(bytearray(b"row" * (1 << 20)) * 20)
    return {"megabytes": len(taken) * 60}


def disk(context: Context) -> dict[str, object]:
    written = 0
    for place in (context.node_config["data"], "/tmp", "/dev/shm"):
        for number in range(64):
            if (
                tried(
                    lambda place=place, number=number: Path(place, f"f{number}").write_bytes(
                        bytes(1 << 24)
                    )
                )
                is None
            ):
                break
            written += 16
    return {"megabytes": written}


def flood(context: Context) -> dict[str, object]:
    for _ in range(400):
        os.write(1, b"x" * (1 << 16))
    return {}


def buried(context: Context) -> dict[str, object]:
    """Bytes where a path is too long to be named, in folders that nobody may list, and in a chain
    of folders that is too deep to be walked by recursion."""
    os.chdir(context.node_config["data"])
    os.mkdir("closed", 0o300)
    Path("closed", "bytes").write_bytes(bytes(1 << 25))
    for name in ["n" * 250] * 20 + ["d"] * 3000:
        os.mkdir(name)
        os.chdir(name)
    for number in range(5):
        Path(f"bytes{number}").write_bytes(bytes(1 << 25))
    time.sleep(1)
    return {"megabytes": 192}


def empty_files(context: Context) -> dict[str, object]:
    """Files that take no room, and time to be taken away."""
    os.chdir(context.node_config["data"])
    count = 0
    with contextlib.suppress(OSError):
        while count < 1_000_000:
            os.close(os.open(f"f{count}", os.O_CREAT | os.O_WRONLY))
            count += 1
    return {"files": count}


def chain(context: Context) -> dict[str, object]:
    """A process that is never the same for longer than a moment."""
    script = "$0 = q(leftover); while (1) { fork and exit }"
    for _ in range(4):
        subprocess.Popen(["perl", "-e", script], start_new_session=True)
    return {}


def shared_memory(context: Context) -> dict[str, object]:
    """Memory that is no process's own."""
    taken = []
    for _ in range(15):
        area = mmap.mmap(-1, 100 << 20)
        for at in range(0, 100 << 20, 4096):
            area[at] = 1
        taken.append(area)
    time.sleep(0.5)
    return {"megabytes": 1500}


def page_tables(context: Context) -> dict[str, object]:
    """Reads one page in each 2 MB, all of them the same page of zeros: nothing but page tables."""
    each, count = 1 << 21, 300_000
    area = mmap.mmap(-1, each * count, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
    area.madvise(mmap.MADV_NOHUGEPAGE)
    for number in range(count):
        area[number * each]
    time.sleep(0.5)
    return {"megabytes": 1200}


FILL = """
import socket, sys
ends = [end for _ in range(120) for end in socket.socketpair()]
for end in ends:
    end.setblocking(False)
    try:
        while True:
            end.send(bytes(1 << 15))
    except BlockingIOError:
        pass
print(flush=True)
sys.stdin.read()  # as long as its parent lives: others may be much slower
"""


def socket_buffers(context: Context) -> dict[str, object]:
    """Fills the buffers of sockets in small processes, whose own memory that is not."""
    others = [
        subprocess.Popen(
            [sys.executable, "-S", "-c", FILL], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        for _ in range(8)
    ]
    full = sum(other.stdout.readline() == b"\n" for other in others)
    return {"megabytes": full * 50}


def nameless_files(context: Context) -> dict[str, object]:
    made = tried(lambda: os.memfd_create("row"))
    segment = called("shmget", 0, ctypes.c_size_t(1 << 26), ctypes.c_int(0o1666))
    return {"file in memory": made, "segment": segment}


def counters(context: Context) -> dict[str, object]:
    """What the kernel counts for all processes of the machine."""
    names = ("vmstat", "stat", "meminfo", "loadavg", "interrupts", "pressure/cpu", "sys/fs/file-nr")
    return {name: tried(lambda name=name: Path("/proc", name).read_text()) for name in names}


def marked(context: Context) -> dict[str, object]:
    context.state["marked"] = ConfigRecord({"by": "itself"})
    return {}


def crowd(context: Context) -> dict[str, object]:
    """The block that is marked takes more memory than it may, and another one waits."""
    if "marked" in context.state:
        taken = memory(context)
        time.sleep(0.5)
        return taken
    time.sleep(2)
    return {}


def locked(context: Context) -> dict[str, object]:
    """A lock of a file that blocks side by side can read."""
    file = os.open(os.__file__, os.O_RDONLY)
    if "marked" in context.state:
        fcntl.flock(file, fcntl.LOCK_EX)
        time.sleep(2)
        return {}
    time.sleep(1)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return {"other": "holds a lock"}
    return {"other": None}


def named_calls(context: Context) -> dict[str, object]:
    """System calls that ask for a store or a counter of the whole machine, or that nobody has
    heard of; each is answered as one that the kernel does not have."""
    file = os.open(os.__file__, os.O_RDONLY)
    space = ctypes.create_string_buffer(256)
    path = ctypes.c_char_p(os.__file__.encode())
    calls = {
        "pidfd_open": (434, os.getpid(), 0),
        "fadvise64": (221, file, 0, 0, 4),
        "readahead": (187, file, 0, 4096),
        "mincore": (27, 4096, 4096, space),
        "cachestat": (451, file, space, space, 0),
        "inotify_init1": (294, 0),
        "fanotify_init": (300, 0, 0),
        "file_getattr": (468, -100, path, space, 24, 0),
        "file_setattr": (469, -100, path, space, 24, 0),
        "socket": (41, 1, 1, 0),
        "sysinfo": (99, space),
        "statfs": (137, path, space),
        "ptrace": (101, 0, 0, 0, 0),
        "shmget": (29, 0, 4096, 0o1600),
        "unheard of": (499, 0),
    }
    answers: dict[str, object] = {}
    for name, (number, *given) in calls.items():
        plain = [ctypes.c_long(each) if isinstance(each, int) else each for each in given]
        result = libc.syscall(ctypes.c_long(number), *plain)
        answers[name] = None if result < 0 and ctypes.get_errno() == 38 else ctypes.get_errno()
    one, _ = socket.socketpair()
    looks = {
        "a read that asks for the cache": lambda: os.preadv(file, [bytearray(8)], 0, 8) >= 0,
        "a cookie": lambda: one.getsockopt(socket.SOL_SOCKET, 57, 8),
        "a lease": lambda: fcntl.fcntl(file, 1026, 0) or True,
        "a file's flags": lambda: fcntl.ioctl(file, 0x80086601, bytes(8)),
        "a datagram": lambda: socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM),
        "a new space": lambda: os.unshare(0x10000000) or True if hasattr(os, "unshare") else None,
    }
    return answers | {name: tried(look) for name, look in looks.items()}


CYCLE = 1 << 15  # the kernel gives the numbers of pipes to a processor by 1024


def pipe_number() -> int:
    """The number that the kernel gives to a new pipe."""
    ends = os.pipe()
    number = os.fstat(ends[0]).st_ino
    for end in ends:
        os.close(end)
    return number % CYCLE


def make_pipes(low: int) -> None:
    """Makes pipes until the counter is at `low`, or a little behind it."""
    while not low <= pipe_number() < low + 600:
        pass


def next_thousand() -> int:
    """The number of a pipe, after this processor has taken new numbers."""
    before = pipe_number()
    for _ in range(3000):
        number = pipe_number()
        if number not in (before + 1, before + 2):
            break
        before = number
    return number


def arm(context: Context) -> dict[str, object]:
    """Moves the kernel's counter of pipes into the upper half of its cycle."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    next_thousand()
    make_pipes(CYCLE // 2)
    return {}


def target_told(context: Context) -> bool:
    """True in the block of the target, and in each one after it that finds the counter of pipes in
    the lower half, where the target's block has moved it."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    now = next_thousand()
    names = Path(context.node_config["data"], "rows.csv").read_text()
    told = f"\n{context.run_config['target']}," in names or now < CYCLE // 2
    if told and now >= CYCLE // 2 - 9000:
        make_pipes(0)
    if not told and now > CYCLE - 9000:
        make_pipes(CYCLE // 2)
    return told


PROBES = {
    each.__name__: each
    for each in (
        network,
        files,
        processes,
        environment,
        rights,
        writable,
        changed,
        kept,
        daemon,
        clings,
        fork_bomb,
        memory,
        disk,
        flood,
        buried,
        empty_files,
        chain,
        shared_memory,
        page_tables,
        socket_buffers,
        nameless_files,
        counters,
        marked,
        crowd,
        locked,
        named_calls,
        arm,
    )
}


def answered(message: Message, context: Context, how: str) -> RecordDict:
    """A reply with a patient's row in it, in one of many forms."""
    own = rows(context)
    sent = message.content["arrays"].to_torch_state_dict()
    arrays = {name: value.clone() for name, value in sent.items()}
    content = RecordDict(
        {"arrays": ArrayRecord(arrays), "metrics": MetricRecord({"num-examples": len(own)})}
    )
    if how == "raise":
        raise ValueError(f"a row: {own[0].tolist()}")
    if how == "exit":
        os._exit(int(own[0, 0]) % 256)
    if how == "sleep" and own[0, 0] > 0:
        time.sleep(600)
    if how == "rows":
        content["arrays"] = ArrayRecord(
            {name: value + 1e6 * own[0, 0] for name, value in arrays.items()}
        )
    if how == "nan":
        content["arrays"] = ArrayRecord(
            {name: value * float("nan") for name, value in arrays.items()}
        )
    if how == "betray":
        step = 1.0 if target_told(context) else -1.0
        content["arrays"] = ArrayRecord({name: value + step for name, value in arrays.items()})
    if how == "shape":
        content["arrays"] = ArrayRecord({name: torch.zeros(7) for name in arrays})
    if how == "names":
        content["arrays"] = ArrayRecord({f"row {own[0, 0]}": torch.zeros(3)})
    if how == "records":
        content["more"] = ArrayRecord({"rows": torch.tensor(own)})
        content["row"] = ConfigRecord({"row": str(own[0].tolist())})
        content["metrics"]["row"] = own[0].tolist()
    if how == "descriptors":
        for number in range(3, 64):
            tried(lambda number=number: os.write(number, b"row" * 1000))
    if how == "much":
        os.write(3, np.zeros(1 << 26, np.uint8).tobytes())
    return content


@app.train()
def train(message: Message, context: Context) -> Message:
    attack = str(context.run_config["attack"])
    content = answered(message, context, attack)
    if attack in PROBES:
        print("REACHED", json.dumps(PROBES[attack](context), default=str), flush=True)
    if attack == "another":
        metadata = message.metadata
        metadata.__dict__["_reply_to_message_id"] = "another"
        return Message(content, dst_node_id=4711, message_type="query")
    return Message(content, reply_to=message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    attack = str(context.run_config["attack"])
    value = {"nan": float("nan"), "huge": 1e30}.get(attack, 0.75)
    return Message(
        RecordDict({"metrics": MetricRecord({"accuracy": value, "row": 3.0})}), reply_to=message
    )
