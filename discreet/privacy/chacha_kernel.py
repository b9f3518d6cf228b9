# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call, import-not-found"
# Triton compiles functions without types.
"""Blocks of a ChaCha20 stream by one kernel of Triton. Imported only where Triton is there."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SIZE = 128  # blocks that one program of the kernel makes


def make_blocks(state: Tensor, first: int, blocks: int) -> Tensor:
    """The words of `blocks` blocks from number `first` on: int64 (8 * blocks,), on the device of
    `state`, int32 (16,). That is the block before its rounds (RFC 8439, 2.3), whose number is 0."""
    programs = triton.cdiv(blocks, SIZE)
    words = torch.empty(8 * SIZE * programs, dtype=torch.int64, device=state.device)
    with torch.cuda.device_of(words):
        _blocks[(programs,)](words, state, first, SIZE)
    return words[: 8 * blocks]


@triton.jit(do_not_specialize=["first"])
def _blocks(words, state, first, size: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    number = place + first
    low = number.to(tl.uint32)
    high = (number >> 32).to(tl.uint32)
    x0, x1, x2, x3 = _row(state, size)
    x4, x5, x6, x7 = _row(state + 4, size)
    x8, x9, x10, x11 = _row(state + 8, size)
    x12, x13, x14, x15 = _row(state + 12, size)
    x12 += low
    x13 += high
    for _ in range(10):
        x0, x4, x8, x12 = _quarter_round(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter_round(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter_round(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter_round(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter_round(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter_round(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter_round(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter_round(x3, x4, x9, x14)
    words += 8 * place
    _put(words, state, x0, x1)
    _put(words + 1, state + 2, x2, x3)
    _put(words + 2, state + 4, x4, x5)
    _put(words + 3, state + 6, x6, x7)
    _put(words + 4, state + 8, x8, x9)
    _put(words + 5, state + 10, x10, x11)
    _put(words + 6, state + 12, x12 + low, x13 + high)
    _put(words + 7, state + 14, x14, x15)


@triton.jit
def _quarter_round(a, b, c, d):
    a += b
    d = _rotated(d ^ a, 16)
    c += d
    b = _rotated(b ^ c, 12)
    a += b
    d = _rotated(d ^ a, 8)
    c += d
    b = _rotated(b ^ c, 7)
    return a, b, c, d


@triton.jit
def _rotated(word, by: tl.constexpr):
    return (word << by) | (word >> (32 - by))


@triton.jit
def _row(state, size: tl.constexpr):
    zeros = tl.zeros([size], tl.uint32)
    a = zeros + _word(state)
    b = zeros + _word(state + 1)
    c = zeros + _word(state + 2)
    d = zeros + _word(state + 3)
    return a, b, c, d


@triton.jit
def _word(state):
    return tl.load(state).to(tl.uint32, bitcast=True)


@triton.jit
def _put(words, state, low, high):
    low = (low + _word(state)).to(tl.uint64)
    high = (high + _word(state + 1)).to(tl.uint64)
    tl.store(words, (low | (high << 32)).to(tl.int64, bitcast=True))
