"""The first process of a block's own kernel: `own_kernel` starts it, once to prepare and then for
each block.

To prepare, it imports the libraries that apps need in a child, stops it there, and writes it as a
program. For a block that program is the first process: it mounts what the block sees, runs the app
in a child without rights, writes the length of the result, and switches its kernel off."""

from __future__ import annotations

import gc
import os
import signal
import sys
import termios
import traceback
from pathlib import Path
from typing import NoReturn

from discreet.guard.block_app import flush_output, run_and_end, run_app
from discreet.guard.block_task import IMAGE, BlockTask, unpacked
from discreet.guard.enclosure import (
    NODEV,
    NOEXEC,
    NOSUID,
    SHARED_MEMORY,
    WRITABLE,
    BlockLimits,
    call,
    enclose_in_kernel,
    mount,
    mount_writable,
)
from discreet.guard.process_image import room_for_calls, write_image
from discreet.simulation.processes import import_before_forking

PROGRAM = f"{IMAGE}/block"
INPUT = "/dev/ubda"
OUTPUT = "/dev/ubdb"
DATA = "/tmp/data"
HEAD = 4096  # bytes before the result: the first 8 are its length
PARTS = 3  # task, archive, state
WORD = 8
DIGITS = 20
POWER_OFF = 0x4321FEDC
USER = 1000


def joined(parts: list[bytes]) -> bytes:
    """Some byte strings as one, as `_given` reads them."""
    lengths = b"".join(len(each).to_bytes(WORD, "little") for each in parts)
    return b"".join([lengths, *parts])


def prepare(libraries: list[str]) -> NoReturn:
    """Writes the program that each block starts from, and switches this kernel off."""
    try:
        mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC)
        mount("tmpfs", WRITABLE, "tmpfs", NOSUID | NODEV)
        mount("none", IMAGE, "hostfs", 0, IMAGE)
        told, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(told)
            _stop_here(libraries, tell)
            _first_process()
        os.close(tell)
        room = int(os.read(told, DIGITS))
        os.waitpid(pid, os.WUNTRACED)
        write_image(pid, room, Path(PROGRAM))
    except BaseException:  # noqa: BLE001  (the first process: its kernel ends with it)
        traceback.print_exc()
    finally:
        _power_off()


def _stop_here(libraries: list[str], tell: int) -> None:
    """Imports the libraries and stops. It goes on as the first process of a block's kernel."""
    import_before_forking(libraries)
    import torch

    torch.set_num_threads(1)
    torch.nn.functional.linear(torch.ones(2, 2), torch.ones(2, 2)).sum()
    gc.collect()
    gc.freeze()  # a collection in a block would touch, and so copy, all of this memory
    room = room_for_calls()
    os.write(tell, str(room).encode())
    os.close(tell)
    os.kill(os.getpid(), signal.SIGSTOP)


def _first_process() -> NoReturn:
    """Runs the app of one block in a child, and switches the kernel off when it has ended."""
    try:
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)  # as Python has it: lost with the old kernel
        mount("proc", "/proc", "proc", NOSUID | NODEV | NOEXEC, "subset=pid,hidepid=2")
        _print_plainly()
        packed, archive, state = _given()
        task = unpacked(packed)
        limits = BlockLimits(**task.limits)  # type: ignore[arg-type]
        os.makedirs(SHARED_MEMORY, exist_ok=True)
        mount_writable(limits, USER)
        out = os.open(OUTPUT, os.O_RDWR)
        os.lseek(out, HEAD, os.SEEK_SET)
        pid = os.fork()
        if pid == 0:
            _run(task, archive, state, out=out, limits=limits)
        _, status = os.waitpid(pid, 0)
        if status == 0:
            length = os.lseek(out, 0, os.SEEK_CUR) - HEAD
            os.pwrite(out, length.to_bytes(WORD, "little"), 0)
            os.fsync(out)
    except BaseException:  # noqa: BLE001  (the first process: its kernel ends with it)
        traceback.print_exc()
    finally:
        _power_off()


def _print_plainly() -> None:
    """Makes the console, which is the block's log, pass bytes on as they are."""
    settings = termios.tcgetattr(1)
    settings[1] &= ~termios.OPOST
    termios.tcsetattr(1, termios.TCSANOW, settings)


def _given() -> list[bytes]:
    """The parts that `joined` made one of."""
    with open(INPUT, "rb") as device:
        head = device.read(PARTS * WORD)
        lengths = [
            int.from_bytes(head[at : at + WORD], "little") for at in range(0, len(head), WORD)
        ]
        return [device.read(length) for length in lengths]


def _run(
    task: BlockTask, archive: bytes, state: bytes, *, out: int, limits: BlockLimits
) -> NoReturn:
    """The process of the app, without rights. It has one descriptor beside the three of a
    process."""

    def app() -> None:
        os.setsid()
        os.dup2(out, 3)
        os.closerange(4, 64)
        os.setgroups([])
        os.setresgid(USER, USER, USER)
        os.setresuid(USER, USER, USER)
        enclose_in_kernel(limits)
        data = Path(DATA)
        data.mkdir()
        run_app(task, archive=archive, state=state, data=data, out=3)

    run_and_end(app)


def _power_off() -> NoReturn:
    flush_output()
    call("reboot", POWER_OFF)
    os._exit(1)


if __name__ == "__main__":
    prepare(sys.argv[1:])
