"""Random words for the rows of a batch: those of a row follow from a key, the row's identity and
the number of a draw, and from no other row."""

from __future__ import annotations

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

KEY_BYTES = 32
_BLOCK = 16  # bytes of a block of AES: two words
_MOST_BLOCKS = 2**40  # of one draw, and 2^24 draws, make the second half of a block's number


class RowWords:
    """AES-256 of numbered blocks: (identity, draw, place) of each. As in counter mode, different
    numbers give independent words; unlike a stream, no row's words depend on how many rows are
    drawn."""

    def __init__(self, key: bytes) -> None:
        self._cipher = Cipher(algorithms.AES(key), modes.ECB()).encryptor()

    def __call__(self, identities: Tensor, draw: int, count: int) -> Tensor:
        """Uniform 64-bit words, int64 (n, count), for n `identities`, int64 (n,), on the CPU.

        >>> words = RowWords(bytes(range(32)))
        >>> some = words(torch.tensor([4, 7, 9]), 0, 5)
        >>> torch.equal(words(torch.tensor([9]), 0, 5)[0], some[2])
        True
        """
        blocks = -(-count // 2)
        if not 0 <= draw < 2**23 or blocks >= _MOST_BLOCKS:
            raise ValueError(f"a pass draws too often, or too much at a time: {draw}, {count}")
        size = len(identities) * blocks * _BLOCK
        memory = np.empty(size + _BLOCK - 1, np.uint8)  # as much as the cipher asks for
        numbers = memory[:size].view(np.int64).reshape(len(identities), blocks, 2)
        numbers[..., 0] = identities.numpy()[:, None]
        numbers[..., 1] = np.arange(blocks) + draw * _MOST_BLOCKS
        self._cipher.update_into(memory[:size].data, memory.data)  # in place
        words = torch.from_numpy(numbers.reshape(len(identities), 2 * blocks))
        return words if words.shape[1] == count else words[:, :count]


def spread(seeds: Tensor, count: int) -> Tensor:
    """`count` words for each seed, int64 (n, 1) -> (n, count), on the seeds' device: the generator
    SplitMix64 (Steele et al. 2014). For a GPU, to which so many words would take long to send."""
    steps = torch.arange(1, count + 1, device=seeds.device) * -7046029254386353131
    values = seeds + steps
    values = (values ^ _shifted(values, 30)) * -4658895280553007687
    values = (values ^ _shifted(values, 27)) * -7723592293110705685
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """The values without their last bits, as unsigned words."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
