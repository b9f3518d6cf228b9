"""What the server holds before it unmasks is uniform; the same test finds out Flower's masks.

The test of uniformity is a chi-square over bytes. Its false-alarm rate is 1e-10 for each call, and at most 30 calls are
made here: 3e-9 over all, so each single claim is below 1e-9.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from numpy.typing import NDArray
from scipy.stats import chisquare

from discreet.masking.masks import add_mask, own_key
from discreet.masking.wire import Stage
from tests.masking.federation import Federation, body_of, federation, terms_of

FALSE_ALARM = 1e-10
LENGTH = 40_000


def is_uniform(data: bytes) -> bool:
    """Chi-square of the bytes' counts against equal counts, with 255 degrees of freedom."""
    return float(chisquare(np.bincount(np.frombuffer(data, dtype=np.uint8), minlength=256)).pvalue) >= FALSE_ALARM


def constant(bits: int) -> Federation:
    """A federation whose nodes all sum the same small constant: as far from uniform as vectors can be."""
    ours = federation(terms_of(3, bits=bits, length=LENGTH))
    ours.vectors = {name: np.full(LENGTH, 3, dtype=np.int64) for name in ours.vectors}
    return ours


@pytest.mark.parametrize("bits", [16, 21, 24, 32])
def test_each_masked_vector_and_their_sum_are_uniform_before_unmasking(bits: int) -> None:
    ours = constant(bits)
    exchange = ours.until(Stage.MASKED)
    replies = {name: ours.answer(name, request) for name, request in exchange.requests.items()}
    assert all(is_uniform(body_of(reply)) for reply in replies.values())
    for name, reply in replies.items():
        exchange.take(name, reply)
    held = exchange._attempts[0].total & np.uint32((1 << bits) - 1)
    assert is_uniform((held >> np.uint32(bits - 16)).astype(np.uint16).tobytes())


def test_a_vector_is_uniform_to_the_server_even_if_it_knows_every_vector() -> None:
    ours = constant(32)
    exchange = ours.until(Stage.MASKED)
    masked = [np.frombuffer(body_of(ours.answer(name, exchange.requests[name])), dtype=np.uint8) for name in ours.nodes]
    assert all(is_uniform((one - other).tobytes()) for one, other in itertools.pairwise(masked))


def test_the_masks_of_two_attempts_have_nothing_in_common() -> None:
    ours, masked = constant(32), []
    for _ in range(2):
        exchange = ours.until(Stage.MASKED)
        body = body_of(ours.answer("node-00", exchange.requests["node-00"]))
        masked.append(np.frombuffer(body, dtype=np.uint8))
    assert is_uniform((masked[0] - masked[1]).tobytes())


def test_the_test_finds_what_is_not_masked() -> None:
    words = np.random.default_rng(83).integers(0, 2**16, LENGTH).astype(np.uint16)
    some = np.where(np.arange(LENGTH) % 20 == 0, np.uint16(3), words)  # one value in twenty is in the clear
    for fault in (np.full_like(words, 3), some, words & np.uint16(0x7FFF), words - words):
        assert is_uniform(words.tobytes())
        assert not is_uniform(fault.tobytes())


def ours_of(seed: bytes) -> NDArray[np.uint32]:
    words = np.zeros(LENGTH, dtype=np.uint32)
    add_mask(words, own_key(seed, b"context"), subtract=False)
    return words


def flowers_of(seed: bytes) -> NDArray[np.uint32]:
    return pseudo_rand_gen(seed, 2**32, [(LENGTH,)])[0].astype(np.uint32)


def test_masks_of_two_secrets_have_nothing_in_common_and_flowers_fail_that_test() -> None:
    seed = bytes(range(16))
    swapped = seed[4:8] + seed[:4] + seed[8:]  # another secret, whose words of 32 bits have the same XOR
    assert is_uniform((ours_of(seed) - ours_of(swapped)).tobytes())
    assert not is_uniform((flowers_of(seed) - flowers_of(swapped)).tobytes())
