"""Random words for an accelerator: a ChaCha20 stream (RFC 8439), made where it is used.

On a CUDA device with Triton one kernel makes it, which reads 64 bytes and writes 64 for each block.
Elsewhere `cryptography` makes the same words on the processor, and they are moved.
"""

from __future__ import annotations

import logging
import struct
from functools import cache
from importlib.util import find_spec

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from torch import Tensor

WORDS = 8  # words of 64 bits in a block
_log = logging.getLogger("discreet")


class ChaCha:
    """A ChaCha20 stream of 64-bit words, of which none is given twice.

    The number of a block has 64 bits: its upper half takes the place of the first word of RFC
    8439's nonce. Not thread-safe, and a copy would repeat the stream: `RandomSource`, to which it
    belongs, refuses copies and forks.

    Args:
        key: 32 bytes.
        nonce: 8 bytes.
    """

    def __init__(self, key: bytes, nonce: bytes) -> None:
        self._key = key
        self._nonce = nonce
        self._next = 0

    def words(self, count: int, device: torch.device) -> Tensor:
        """The next `count` words on `device`, int64 (count,). Each call begins with a new block."""
        blocks = -(-count // WORDS)
        first = self._next
        self._next += blocks
        if device.type == "cuda" and has_kernel(device):
            return self.by_kernel(first, blocks, device)[:count]
        return self.by_processor(first, blocks)[:count].to(device)

    def by_processor(self, first: int, blocks: int) -> Tensor:
        """The words of `blocks` blocks from number `first` on, int64 (8 * blocks,)."""
        words = np.empty(WORDS * blocks, dtype=np.int64)
        done = 0
        while done < blocks:
            number = first + done
            # A cipher of the library refuses to carry into the upper 32 bits of the number.
            part = min(blocks - done, 2**32 - number % 2**32)
            start = number.to_bytes(8, "little") + self._nonce
            cipher = Cipher(algorithms.ChaCha20(self._key, start), None).encryptor()
            into = words[WORDS * done : WORDS * (done + part)].view(np.uint8)
            cipher.update_into(bytes(into.nbytes), into.data)
            done += part
        return torch.from_numpy(words)

    def by_kernel(self, first: int, blocks: int, device: torch.device) -> Tensor:
        """The same words, made on a CUDA device."""
        from discreet.privacy.chacha_kernel import make_blocks

        state = struct.unpack("<16i", b"expand 32-byte k" + self._key + bytes(8) + self._nonce)
        return make_blocks(torch.tensor(state, dtype=torch.int32, device=device), first, blocks)


@cache
def has_kernel(device: torch.device) -> bool:
    """True if Triton is there and its kernel gives the processor's words on `device`. It is tried
    once in a process; if it fails, the log says why."""
    if find_spec("triton") is None:
        return False
    tried = ChaCha(bytes(range(32)), bytes(range(8)))
    first = 2**32 - 150  # a number of a block is carried into its upper half
    try:
        found = tried.by_kernel(first, 300, device).cpu()
    except Exception as error:  # noqa: BLE001 - a compiler, a linker or a driver may be missing
        failure = str(error)
    else:
        if torch.equal(found, tried.by_processor(first, 300)):
            return True
        failure = "it gives other words"
    _log.warning("noise for %s is drawn on the processor: Triton's kernel: %s", device, failure)
    return False
