"""A kernel of its own for each block: user-mode Linux, an ordinary process without rights.

The kernel of a block starts, runs one block and ends. Its counters and stores begin anew each time,
so that no block finds what another one did to them. It sees the folders that any block may read,
read-only, its input and its output, and no network. Its processes are processes of the guard's
user, in name spaces of their own (`enclosure`), and end together.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from discreet.guard.block_task import IMAGE, KERNEL_PROGRAM, ROOT
from discreet.guard.enclosure import BlockLimits, call, enclose_a_kernel
from discreet.guard.inside_kernel import HEAD, PROGRAM, WORD

# Of the kernel's process: its memory is a file in TMPDIR.
ENVIRONMENT = {
    "PATH": "/usr/bin",
    "TMPDIR": "/tmp",
    "HOME": "/tmp",
}
NOT_MEASURED = "raid6_select_algo,calibrate_xor_blocks"  # a second of each start
PREPARE_MB = 2048
PREPARE_SECONDS = 240
SECTOR = 512
PIECE = 1 << 20
LOG = 5  # the descriptors of a kernel are nothing, nothing, nothing, input, output, log
HIGH = 100  # above all that a keeper has open


class KernelError(OSError):
    """A kernel for blocks can't be prepared."""


def prepare_kernel(libraries: Sequence[str], environment: Mapping[str, str]) -> None:
    """Writes the program that blocks start from. KernelError: it can't be written."""
    variables = [f"{name}={value}" for name, value in environment.items()]
    words = ["--", "-m", "discreet.guard.inside_kernel", *libraries]
    command = [*_command(PREPARE_MB, sys.executable, log=1), *variables, *words]
    done = subprocess.run(
        command,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        timeout=PREPARE_SECONDS,
        check=False,
        preexec_fn=stay_on_this_processor,
    )
    if not Path(ROOT + PROGRAM).exists():
        said = (done.stdout + done.stderr).decode(errors="replace").strip()
        raise KernelError(f"user-mode Linux can't prepare a block: {said[-500:]}")


def stay_on_this_processor() -> None:
    """Keeps this process, and those that it starts, on the processor that it runs on. A kernel and
    its program are two processes that wait for each other at each system call, which takes twice
    as long where each has a processor of its own."""
    os.sched_setaffinity(0, {call("sched_getcpu")})


def memory_file(content: bytes = b"", size: int = 0) -> int:
    """A file in memory of whole sectors, as a kernel takes for a disk; zeros follow its content."""
    descriptor = os.memfd_create("block")
    whole = -(-max(size, len(content)) // SECTOR) * SECTOR
    os.ftruncate(descriptor, whole)
    view = memoryview(content)
    while view:
        view = view[os.write(descriptor, view) :]
    return descriptor


def start_kernel(given: int, made: int, log: int, limits: BlockLimits) -> NoReturn:
    """Becomes the kernel of one block, which reads `given` and writes `made`. It runs in the first
    process of new namespaces."""
    code = 1
    try:
        os.setsid()
        stay_on_this_processor()
        nothing = os.open(os.devnull, os.O_RDWR)
        kept = [fcntl.fcntl(each, fcntl.F_DUPFD, HIGH) for each in (given, made, log)]
        for target, source in enumerate((nothing, nothing, nothing, *kept)):
            os.dup2(source, target)
        os.closerange(LOG + 1, 1 << 16)
        enclose_a_kernel(limits, ROOT + IMAGE)
        disks = ["ubd0r=/proc/self/fd/3", "ubd1=/proc/self/fd/4"]
        command = _command(limits.memory_mb + limits.disk_mb, PROGRAM, log=LOG)
        os.execvpe(command[0], [*command, *disks], ENVIRONMENT)
    except BaseException:  # noqa: BLE001  (a process of its own, which says why it ends)
        os.write(LOG, traceback.format_exc()[-2000:].encode())
    finally:
        os._exit(code)


def send_result(made: int, out: int) -> None:
    """Writes what a block has left in its output to a pipe: nothing if it did not end by
    itself."""
    left = int.from_bytes(os.pread(made, WORD, 0), "little")
    at = HEAD
    while left > 0:
        piece = os.pread(made, min(left, PIECE), at)
        if not piece:
            return
        at += os.write(out, piece)
        left -= len(piece)


def _command(megabytes: int, first: str, *, log: int) -> list[str]:
    """The command line of a kernel whose first process is `first`. Addresses are not random, as a
    process image needs; the kernel prints nothing of its own."""
    return [
        KERNEL_PROGRAM,
        f"mem={megabytes}M",
        f"hostfs={ROOT}",
        "root=/dev/root",
        "rootfstype=hostfs",
        "rootflags=/",
        "ro",
        "norandmaps",
        "lpj=40000000",
        f"initcall_blacklist={NOT_MEASURED}",
        "quiet",
        "loglevel=0",
        "con=null",
        f"con0=fd:0,fd:{log}",
        f"init={first}",
    ]
