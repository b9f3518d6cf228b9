"""The system calls that a block may make: a list of what training needs, with arguments checked.

A call that is not in the list, whatever its number, is answered as one that the kernel does not
have. So is what reads or moves a store of the whole machine: the page cache (fadvise, readahead,
mincore, preadv2 with flags), watches of files, load and free memory, key rings, sockets other than
pairs. What is left, and is shared, are the numbers of pipes and sockets: `self_test` and `channels`
tell what that lets through.
"""

from __future__ import annotations

import ctypes
import platform
import struct
from collections.abc import Mapping, Sequence

from discreet.guard.block_task import MACHINE

NEW_SPACES = 0x7C020000  # flags of clone: user, mount, process, IPC, network, host and cgroup
NO_NEW_PRIVILEGES = 38
SECCOMP = 22

libc = ctypes.CDLL(None, use_errno=True)


def _numbers(words: str) -> tuple[int, ...]:
    return tuple(int(word) for word in words.split())


# The numbers are those of x86-64.
# Files and folders: read, write, open, close, stat, lseek, pread64, access, sendfile, truncate,
# getdents, rename, mkdir, link, readlink, chmod, chown, umask, utime, fsync, fallocate, statx,
# copy_file_range and what names the same with a folder.
FILES = _numbers(
    "0 1 2 3 4 5 6 8 17 18 19 20 21 40 74 75 76 77 78 79 80 81 82 83 84 85 86 87 88 89 90 91 92 93 "
    "94 95 132 217 235 257 258 260 261 262 263 264 265 266 267 268 269 280 285 295 296 316 326 332 "
    "439 452"
)
# Memory: mmap, mprotect, munmap, brk, mremap, msync, madvise, mlock.
MEMORY = _numbers("9 10 11 12 25 26 28 149 150 151 152 325")
# Processes and threads: signals, clone without new spaces, fork, execve, wait, exit, kill, futex,
# identity, groups, limits and use of its own, scheduling, rseq, membarrier.
PROCESSES = _numbers(
    "13 14 15 24 34 39 57 58 59 60 61 62 97 98 100 102 104 107 108 109 110 111 115 118 120 121 124 "
    "125 127 128 130 131 140 143 145 146 147 148 158 160 186 200 202 203 204 218 219 231 234 247 "
    "273 274 309 315 322 324 334 449"
)
# Time: clocks, timers and sleep.
TIME = _numbers("35 36 37 38 96 201 222 223 224 225 226 228 229 230")
# Pipes, polls and pairs of connected sockets: poll, select, pipe, dup, epoll, eventfd, timerfd,
# signalfd, splice, send and receive.
PIPES = _numbers(
    "7 22 23 32 33 44 45 46 47 48 51 52 213 232 233 270 271 275 276 278 281 282 283 284 286 287 "
    "289 290 291 292 293 436 441"
)
OTHERS = _numbers("63 318")  # uname, getrandom
ALLOWED = (*FILES, *PIPES, *MEMORY, *PROCESSES, *TIME, *OTHERS)
# Locks of files and extended attributes would signal to others; a session and a priority have
# numbers and effects beyond the block. These calls do nothing and report success.
FEIGNED = _numbers("73 112 141 142 144 251 314")
# Mode, owner and times of files that others see, where no name space hides them; the processors
# that a process may use.
OF_SHARED_FILES = _numbers("90 91 92 93 94 132 203 235 260 261 268 280 452")
ATTRIBUTES = _numbers("188 189 190 191 192 193 194 195 196 197 198 199 463 464 465 466")

# What user-mode Linux needs beside the above, for its own processes: ptrace, modify_ldt, statfs.
OF_A_KERNEL = _numbers("101 137 154")

# Calls of which the second argument decides.
FCNTL = 72
FCNTL_OF_A_KERNEL = (8, 10)  # F_SETOWN and F_SETSIG: who gets the signals of a pipe
IOCTL = 16
FCNTL_ALLOWED = (0, 1, 2, 3, 4, 1030, 1032)  # F_DUPFD, flags, F_DUPFD_CLOEXEC, F_GETPIPE_SZ
FCNTL_FEIGNED = (6, 7, 37, 38, 1024)  # F_SETLK, F_SETLKW, those of open files, F_SETLEASE
IOCTL_ALLOWED = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)  # a terminal? bytes to read, flags
SOCKETPAIR = 53
STREAM = 1
# Calls of which the first decides, and the third.
PRCTL = 157
PRCTL_ALLOWED = (2, 3, 15, 16, 23, 38, 39, 0x53564D41)  # of itself: names, dumpable
PRCTL_FEIGNED = (1,)  # PR_SET_PDEATHSIG: a block ends with its keeper
PRLIMIT = 302
OPTIONS = (54, 55)  # setsockopt and getsockopt: no cookie, which counts all sockets
OPTIONS_ALLOWED = (3, 4, 7, 8, 17, 20, 21, 30, 38, 39)
VECTORS = (327, 328)  # preadv2 and pwritev2, whose flags ask what is in the page cache
CLONE = 56

_ARCHITECTURE = 0xC000003E
_OTHER_ABI = 0x40000000
_ALLOW = 0x7FFF0000
_KILL = 0x80000000
_ANSWER = 0x50000  # and the number of an error: 0 feigns success
_NO_PERMISSION = _ANSWER | 1
_NO_TERMINAL = _ANSWER | 25
_WRONG = _ANSWER | 22
_NO_SUCH_CALL = _ANSWER | 38
_NO_SUCH_OPTION = _ANSWER | 92
_NOT_SUPPORTED = _ANSWER | 95
_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_MASK = 0x54
_RETURN = 0x06
_NUMBER_AT = 0
_ARCHITECTURE_AT = 4
_ARGUMENTS_AT = 16
_ARGUMENT = 8  # bytes of each: the lower half comes first
_Instruction = tuple[int, int, int, int]


def allow_calls(*, feigned: Sequence[int] = (), a_kernel: bool = False) -> None:
    """Makes the kernel answer all but the listed system calls of this process and its children as
    ones that it does not have, for good. The calls in `feigned` do nothing and report success.
    `a_kernel`: this process becomes user-mode Linux, which needs some more.

    Raises:
      OSError: the machine is not x86-64, or the kernel accepts no filter.
    """
    if platform.machine() != MACHINE:
        raise OSError(f"the system call filter supports only {MACHINE}, not {platform.machine()}")
    program = _program(feigned, a_kernel=a_kernel)
    code = b"".join(struct.pack("HBBI", *each) for each in program)
    buffer = ctypes.create_string_buffer(code)
    header = struct.pack("HxxxxxxQ", len(program), ctypes.addressof(buffer))
    if libc.prctl(SECCOMP, 2, ctypes.c_char_p(header), 0, 0) < 0:
        raise OSError(ctypes.get_errno(), "the kernel accepts no system call filter")


def _program(feigned: Sequence[int], *, a_kernel: bool) -> list[_Instruction]:
    start: list[_Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, _ARCHITECTURE),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_AT_LEAST, 0, 1, _OTHER_ABI),
        (_RETURN, 0, 0, _KILL),
    ]
    parts = [_answer(number, _ANSWER) for number in (*feigned, *FEIGNED)]
    allowed = [*ALLOWED]
    pipes = [*FCNTL_ALLOWED]
    if a_kernel:
        allowed = [*OF_A_KERNEL, *allowed]  # ptrace first: most of its calls
        pipes += FCNTL_OF_A_KERNEL
    parts += [_answer(number, _ALLOW) for number in allowed]
    parts += [_answer(number, _NOT_SUPPORTED) for number in ATTRIBUTES]
    commands = {**dict.fromkeys(pipes, _ALLOW), **dict.fromkeys(FCNTL_FEIGNED, _ANSWER)}
    parts.append(_by_argument(FCNTL, 1, commands, otherwise=_WRONG))
    parts.append(_by_argument(IOCTL, 1, _all(IOCTL_ALLOWED), otherwise=_NO_TERMINAL))
    options = {**_all(PRCTL_ALLOWED), **dict.fromkeys(PRCTL_FEIGNED, _ANSWER)}
    parts.append(_by_argument(PRCTL, 0, options, otherwise=_WRONG))
    parts.append(_by_argument(PRLIMIT, 0, _all((0,)), otherwise=_NO_PERMISSION))
    for number in OPTIONS:
        parts.append(_by_argument(number, 2, _all(OPTIONS_ALLOWED), otherwise=_NO_SUCH_OPTION))
    for number in VECTORS:
        parts.append(_by_argument(number, 5, _all((0,)), otherwise=_NOT_SUPPORTED))
    parts.append(_by_argument(SOCKETPAIR, 1, _all((STREAM,)), otherwise=_NO_PERMISSION, mask=0xF))
    parts.append(_clone())
    parts.append([(_RETURN, 0, 0, _NO_SUCH_CALL)])
    return start + [instruction for part in parts for instruction in part]


def _all(values: Sequence[int]) -> Mapping[int, int]:
    return dict.fromkeys(values, _ALLOW)


def _answer(number: int, answer: int) -> list[_Instruction]:
    return [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, answer)]


def _by_argument(
    number: int, place: int, answers: Mapping[int, int], *, otherwise: int, mask: int = 0
) -> list[_Instruction]:
    """Answers a call by the value of one argument, or of those bits of it that `mask` has."""
    inside: list[_Instruction] = [(_LOAD, 0, 0, _ARGUMENTS_AT + _ARGUMENT * place)]
    if mask:
        inside.append((_MASK, 0, 0, mask))
    for value, answer in answers.items():
        inside += _answer(value, answer)
    inside.append((_RETURN, 0, 0, otherwise))
    return [(_EQUAL, 0, len(inside), number), *inside]


def _clone() -> list[_Instruction]:
    """New processes and threads in the same spaces. The flags of clone3 can't be seen, so callers
    fall back to clone."""
    inside = [
        (_LOAD, 0, 0, _ARGUMENTS_AT),
        (_ANY_BIT, 0, 1, NEW_SPACES),
        (_RETURN, 0, 0, _NO_PERMISSION),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return [(_EQUAL, 0, len(inside), CLONE), *inside]
