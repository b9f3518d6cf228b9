"""A stopped process as a program: started, it goes on where the process stood.

A process that has imported PyTorch is written once, and each block starts from it. That takes a
tenth of the processor time of importing. The program is an ELF file of one page or more: a list of
system calls that map the memory of the process, and the registers. Both processes need the same
kernel with addresses that are not random, one thread, and no open file above 2. This holds in a
kernel of the guard's own (`own_kernel`), and is assumed nowhere else.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import struct
from collections.abc import Iterator
from collections.abc import Mapping as Mapping_
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

PAGE = mmap.PAGESIZE
ROOM = 64 * PAGE  # at the end of the heap, for the list of calls; and a page, as some kernels
# leave one between a program and its heap
FIRST_FREE = 3  # the descriptor of the next file that is opened
OF_THE_KERNEL = "[v"  # vdso, vvar, vsyscall: it gives them anew, at the same address
STACK = "[stack]"

_ATTACH = 16
_DETACH = 17
_GET_REGISTERS = 12
_OPEN = 2
_CLOSE = 3
_MMAP = 9
_PREAD = 17
_ARCH_PRCTL = 158
_SET_FS = 0x1002
_FIXED = 0x10
_NO_RESERVE = 0x4000


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


_NAMES = _words(
    "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi orig_rax rip cs eflags rsp ss "
    "fs_base gs_base ds es fs gs"
)  # struct user_regs_struct of x86-64
_RESTORED = _words("rbx rbp r12 r13 r14 r15 rdi rsi rdx r8 r9 r10 rsp")
_NUMBERED = _words("rax rcx rdx rbx rsp rbp rsi rdi r8 r9 r10 r11 r12 r13 r14 r15")
_CODES = {name: code for code, name in enumerate(_NUMBERED)}

libc = ctypes.CDLL(None, use_errno=True)
Call = tuple[int, ...]  # the number of a system call, and its six arguments


@dataclass(frozen=True)
class Mapping:
    """One line of `/proc/PID/maps`."""

    start: int
    end: int
    allowed: str
    offset: int
    path: str

    @property
    def size(self) -> int:
        """Its bytes."""
        return self.end - self.start

    @property
    def is_program_text(self) -> bool:
        """True for instructions of a file, which no process changes."""
        return self.path.startswith("/") and "x" in self.allowed and "w" not in self.allowed

    @property
    def protection(self) -> int:
        """PROT_READ, PROT_WRITE and PROT_EXEC, as mmap takes them."""
        bits = {"r": mmap.PROT_READ, "w": mmap.PROT_WRITE, "x": mmap.PROT_EXEC}
        return sum(bit for letter, bit in bits.items() if letter in self.allowed)


def room_for_calls() -> int:
    """Takes the end of this process's heap for the list of calls, and returns its address. The
    kernel puts the heap of a program behind its file: behind this room, as before."""
    libc.sbrk.restype = ctypes.c_void_p
    libc.sbrk.argtypes = [ctypes.c_long]
    top = int(libc.sbrk(0))
    start = -(-top // PAGE) * PAGE
    libc.sbrk(start + ROOM - top)
    return start


def write_image(pid: int, room: int, path: Path) -> None:
    """Writes a stopped process as a program. `room`: what `room_for_calls` returned in it. OSError:
    the process can't be read."""
    registers = _registers(pid)
    calls = _Calls(room)
    with path.open("wb") as image, Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        image.seek(PAGE + ROOM)
        calls.open(str(path))
        others = []
        for mapping in _mappings(pid, room):
            if mapping.path == STACK:
                used = registers["rsp"] // PAGE * PAGE - PAGE  # the kernel has made the stack
                mapping = replace(mapping, start=used)
            if mapping.is_program_text:
                others.append(mapping)
            else:
                _keep(mapping, memory, image, calls)
        calls.close()
        for mapping in others:
            calls.open(mapping.path)
            calls.map(mapping, mapping.offset)
            calls.close()
        calls.map_empty(Mapping(room + ROOM, room + ROOM + PAGE, "rw", 0, ""))
        calls.add(_ARCH_PRCTL, _SET_FS, registers["fs_base"])
        program = calls.program(registers)
        image.seek(0)
        image.write(_header(room, entry=room + len(program) - calls.code_size))
        image.seek(PAGE)
        image.write(program)
    path.chmod(0o755)


def _keep(mapping: Mapping, memory: BinaryIO, image: BinaryIO, calls: _Calls) -> None:
    """Writes one mapping's content behind the image, and the call that maps it again."""
    content = b""
    if "r" in mapping.allowed:
        memory.seek(mapping.start)
        content = memory.read(mapping.size)
    if not content.strip(b"\0"):
        calls.map_empty(mapping)
        return
    offset = image.tell()
    image.write(content)
    if mapping.path == STACK:
        calls.read(mapping, offset)
    else:
        calls.map(mapping, offset)


def _mappings(pid: int, room: int) -> Iterator[Mapping]:
    """The mappings to restore. The heap ends where the room for the calls begins."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        addresses, allowed, offset, _, _, *path = line.split(maxsplit=5)
        start, end = (int(each, 16) for each in addresses.split("-"))
        if start <= room < end:
            end = room
        found = Mapping(start, end, allowed, int(offset, 16), "".join(path))
        if found.size and not found.path.startswith(OF_THE_KERNEL):
            yield found


class _Calls:
    """The system calls that restore a process, as the bytes at the address `room`."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.texts = bytearray()
        self.listed: list[Call] = []
        self.code_size = 0

    def add(self, number: int, *arguments: int) -> None:
        """Adds a call. Arguments that are not given are 0."""
        self.listed.append((number, *arguments, *[0] * (6 - len(arguments))))

    def open(self, path: str) -> None:
        """Opens a file for reading, with the descriptor FIRST_FREE."""
        self.add(_OPEN, self.room + len(self.texts), os.O_RDONLY)
        self.texts += os.fsencode(path) + b"\0"

    def close(self) -> None:
        """Closes the open file."""
        self.add(_CLOSE, FIRST_FREE)

    def map(self, mapping: Mapping, offset: int) -> None:
        """Maps a part of the open file, of which each process has its own copy."""
        flags = mmap.MAP_PRIVATE | _FIXED
        place = (mapping.start, mapping.size, mapping.protection)
        self.add(_MMAP, *place, flags, FIRST_FREE, offset)

    def map_empty(self, mapping: Mapping) -> None:
        """Maps zeros."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED | _NO_RESERVE
        self.add(_MMAP, mapping.start, mapping.size, mapping.protection, flags, -1, 0)

    def read(self, mapping: Mapping, offset: int) -> None:
        """Reads a part of the open file into memory that is there."""
        self.add(_PREAD, FIRST_FREE, mapping.start, mapping.size, offset)

    def program(self, registers: Mapping_[str, int]) -> bytes:
        """Paths, the list of calls, and the code that makes them and goes on with `registers`."""
        paths = bytes(self.texts).ljust(-(-len(self.texts) // 8) * 8, b"\0")
        first = self.room + len(paths)
        table = b"".join(struct.pack("<7q", *each) for each in self.listed)
        code = _code(first, first + len(table), registers)
        self.code_size = len(code)
        if len(paths) + len(table) + len(code) > ROOM:
            raise OSError("the process has too many mappings for an image")
        return paths + table + code


def _code(first: int, end: int, registers: Mapping_[str, int]) -> bytes:
    """Instructions that make the calls listed from `first` to `end`, set registers, and jump."""
    arguments = ("rax", "rdi", "rsi", "rdx", "r10", "r8", "r9")
    loop = b"".join(_load(name, 8 * place) for place, name in enumerate(arguments))
    loop += b"\x0f\x05"  # syscall
    loop += b"\x48\x83\xc3\x38"  # add rbx, 56
    loop += b"\x48\x39\xeb"  # cmp rbx, rbp
    loop += b"\x75" + struct.pack("b", -(len(loop) + 2))  # jne: back to the start of the loop
    code = _set("rbx", first) + _set("rbp", end) + loop
    code += b"".join(_set(name, registers[name]) for name in _RESTORED)
    code += _set("rcx", registers["rip"]) + _set("rax", 0)
    return code + b"\xff\xe1"  # jmp rcx: a system call may change rcx, so nobody needs it


def _set(name: str, value: int) -> bytes:
    """mov name, value"""
    code = _CODES[name]
    return bytes([0x48 | code >> 3, 0xB8 | code & 7]) + struct.pack("<Q", value)


def _load(name: str, offset: int) -> bytes:
    """mov name, [rbx + offset]"""
    code = _CODES[name]
    return bytes([0x48 | code >> 3 << 2, 0x8B, 0x43 | (code & 7) << 3, offset])


def _header(room: int, *, entry: int) -> bytes:
    """An ELF file whose bytes from the second page on are mapped at `room`."""
    ident = b"\x7fELF\x02\x01\x01".ljust(16, b"\0")
    head = struct.pack("<16sHHIQQQIHHHHHH", ident, 2, 62, 1, entry, 64, 0, 0, 64, 56, 1, 0, 0, 0)
    readable_and_executable = 5
    return head + struct.pack(
        "<IIQQQQQQ", 1, readable_and_executable, PAGE, room, room, ROOM, ROOM, PAGE
    )


def _registers(pid: int) -> dict[str, int]:
    """The registers of a stopped process."""
    found = (ctypes.c_uint64 * len(_NAMES))()
    _trace(_ATTACH, pid)
    os.waitpid(pid, 0)
    try:
        _trace(_GET_REGISTERS, pid, found)
    finally:
        _trace(_DETACH, pid)
    return dict(zip(_NAMES, found, strict=True))


def _trace(request: int, pid: int, data: object = None) -> None:
    if libc.ptrace(ctypes.c_long(request), ctypes.c_long(pid), None, data) < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"ptrace: {os.strerror(error)}")
