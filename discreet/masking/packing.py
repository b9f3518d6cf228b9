"""Integers of k bits as bytes: k bits a value on the wire."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from discreet.masking.wire import MalformedBytes

Words = NDArray[np.uint32]


def packed_size(length: int, bits: int) -> int:
    """How many bytes `length` values of `bits` bits take: a plane of bytes for each 8 bits, then one for each bit.

    >>> packed_size(1_000_000, 20), packed_size(3, 17)
    (2500000, 7)
    """
    return bits // 8 * length + bits % 8 * ((length + 7) // 8)


def pack(words: Words, bits: int) -> bytes:
    """The low `bits` bits of each word: first the planes of whole bytes, the lowest first, then those of single bits.

    >>> unpack(pack(np.array([1, 2, 131071], dtype=np.uint32), 17), length=3, bits=17).tolist()
    [1, 2, 131071]
    """
    whole = bits // 8
    planes = [(words >> np.uint32(8 * place)).astype(np.uint8).tobytes() for place in range(whole)]
    planes += [
        np.packbits(((words >> np.uint32(place)) & np.uint32(1)).astype(np.uint8)).tobytes()
        for place in range(8 * whole, bits)
    ]
    return b"".join(planes)


def unpack(data: bytes, *, length: int, bits: int) -> Words:
    """What `pack` was given, modulo 2^bits, shape (length,).

    Raises:
      MalformedBytes: another number of bytes, or bits set behind the last value.
    """
    if len(data) != packed_size(length, bits):
        raise MalformedBytes(f"{len(data)} bytes in place of {packed_size(length, bits)}")
    words, source = np.zeros(length, dtype=np.uint32), np.frombuffer(data, dtype=np.uint8)
    whole, plane = bits // 8, (length + 7) // 8
    for place in range(whole):
        words |= source[place * length : (place + 1) * length].astype(np.uint32) << np.uint32(8 * place)
    for place in range(8 * whole, bits):
        start = whole * length + (place - 8 * whole) * plane
        values = np.unpackbits(source[start : start + plane])
        if values[length:].any():
            raise MalformedBytes("bits are set behind the last value")
        words |= values[:length].astype(np.uint32) << np.uint32(place)
    return words
