"""Random numbers from a cryptographic stream, keyed by the operating system or by a seed."""

from __future__ import annotations

import hmac
import math
import os
import threading
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from torch import Tensor

if TYPE_CHECKING:
    from discreet.privacy.chacha import ChaCha

CPU = torch.device("cpu")
Words = npt.NDArray[np.uint64]
Bits = npt.NDArray[np.int64]  # the same, as PyTorch has them
Floats = npt.NDArray[Any]

CHUNK = 1 << 16  # words processed at a time: they stay in a core's cache
# pairs of normal values processed at a time: PyTorch splits this many over at most two threads
PAIRS = 1 << 16
GPU_PAIRS = 1 << 20
LOW_63_BITS = (1 << 63) - 1
# A 63-bit uniform below this (chance 2^-20) has too few significant bits for its logarithm.
FEW_BITS = 1 << 43
_HALF = torch.tensor(2.0**-64, dtype=torch.float64)  # half a step of a radius uniform
_SHORT_HALF_STEP = np.float32(math.pi * 2.0**-31)  # the angle of a half of a word
# The plaintext that is encrypted to a stream; small, so that it takes little of the cache.
_ZEROS = memoryview(bytes(1 << 16))


class Scratch(threading.local):
    """A thread's buffers for `pairs` pairs of normal draws, and four words. They are kept, as new
    memory would take as long as the draws."""

    pairs = -1

    def reserve(self, pairs: int) -> None:
        if pairs > self.pairs:
            self.pairs = pairs
            self.words = torch.empty(2 * pairs + 4, dtype=torch.int64)
            self.cosine = torch.empty(pairs, dtype=torch.float64)
            self.normals, self.wholes, self.rounded = np.empty((3, 2 * pairs), np.float32)
            self.radii: Floats = np.empty(pairs, np.float32)
            self.bits: Bits = self.words.numpy()


scratch = Scratch()


class RandomSource:
    """A stream of random 64-bit words: the AES-256-CTR keystream of one key, and the draws made
    from it. Draws on an accelerator have a second stream (`words_on`).

    It is built by `secure_source` or `seeded_source`, and `is_secure` tells by which; a seeded
    stream protects nobody. Not thread-safe. Copying, pickling and use in a forked process are
    refused: two copies would give the same noise twice, and the difference of two noised releases
    would be that of the data.
    """

    def __init__(self, key: bytes, *, is_secure: bool) -> None:
        if len(key) != 32:
            raise ValueError(f"key must have 32 bytes, not {len(key)}")
        self.is_secure = is_secure
        self._key = key
        self._process = os.getpid()
        self._on_devices: ChaCha | None = None
        self._begun: dict[str, CipherContext] = {}  # empty before the first draw

    def __repr__(self) -> str:
        kind = "secure" if self.is_secure else "seeded: reproducible, protects nobody"
        return f"RandomSource({kind})"

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a RandomSource is not copied or pickled: a copy would repeat its noise; pass a "
            "child or a seed"
        )

    def child(self, *labels: str | int) -> RandomSource:
        """Another stream, independent of this one and of every child with other labels. At least
        one label is needed.

        A seeded source gives the same child for the same labels, whatever was drawn before. A
        secure source takes a new key from the operating system each time. `child("a", "b")` and
        `child("a").child("b")` differ.

        >>> source = seeded_source(20617)
        >>> _ = source.words(3)
        >>> again = seeded_source(20617).child("round", 4)
        >>> bool((source.child("round", 4).words(2) == again.words(2)).all())
        True
        """
        if not labels:
            raise ValueError("child needs at least one label")
        if self.is_secure:
            return secure_source()
        return RandomSource(_derive(self._key, "child", *labels), is_secure=False)

    def words(self, count: int) -> Words:
        """`count` independent words, uniform over 0 .. 2^64 - 1, shape (count,). Two calls give the
        same words as one call for both. Raises RuntimeError in a process other than the one that
        built the source.
        """
        words = np.empty(count, dtype=np.uint64)
        self.fill(words)
        return words

    def uniform(self, count: int) -> Tensor:
        """`count` values uniform over the multiples of 2^-53 in [0, 1), float64, shape (count,)."""
        return torch.from_numpy((self.words(count) >> np.uint64(11)).astype(np.float64)).mul_(
            2.0**-53
        )

    def normal(
        self,
        count: int,
        *,
        stddev: float = 1.0,
        draws: int = 1,
        dtype: torch.dtype = torch.float32,
        device: torch.device = CPU,
    ) -> Tensor:
        """`count` independent normal values of mean 0, shape (count,), of type `dtype` and on
        `device`.

        Box and Muller's method with a radius of 63 bits: the tails follow the normal distribution
        to 8 sigma and end at 9.4. Each value is the sum of `draws` draws over sqrt(draws). An
        attacker who knows how floating-point noise is made has to search all of these draws (the
        secure mode of Holohan and Braghin 2021, with 2n draws; their n = 2 is draws = 4). A single
        draw in float32 computes its angle and its products in float32 (`fast_pairs`); all else is
        in float64, cast last."""
        if not 0 <= stddev < math.inf:
            raise ValueError(f"stddev must be finite and >= 0, not {stddev}")
        if draws == 1 and dtype == torch.float32:
            return self._fast_normal(count, stddev, device)
        values = torch.empty(count, dtype=dtype)
        each = stddev / math.sqrt(draws)
        for part in torch.split(values, 2 * PAIRS):
            pairs = (len(part) + 1) // 2
            cosine, sine = self._normal_pairs(pairs, each)
            if draws > 1:
                cosine = cosine.clone()
                sine = sine.clone()
                for _ in range(draws - 1):
                    more = self._normal_pairs(pairs, each)
                    cosine += more[0]
                    sine += more[1]
            part[:pairs].copy_(cosine)
            part[pairs:].copy_(sine[: len(part) - pairs])
        return values.to(device)

    def _fast_normal(self, count: int, stddev: float, device: torch.device) -> Tensor:
        """`fast_pairs` of the stream, computed on `device`: on the CPU by NumPy, whose functions
        take half of PyTorch's time."""
        values = torch.empty(count, device=device)
        at_once = PAIRS if device.type == "cpu" else GPU_PAIRS
        for part in torch.split(values, 2 * at_once):
            pairs = (len(part) + 1) // 2
            needed = pairs + (pairs + 1) // 2
            # A value that is left over must not stay in the memory behind the others: with the
            # other of its pair it would tell the radius.
            whole = part if len(part) == 2 * pairs else part.new_empty(2 * pairs)
            if device.type == "cpu":
                scratch.reserve(pairs)
                words = scratch.bits[:needed]
                self.fill(words)
                radius = radii(words[:pairs], stddev)
                write_pairs(radius, words[pairs:], whole.numpy())
            else:
                buffers = torch.empty(2, pairs, device=device)
                fast_pairs(self.words_on(device, needed), whole, stddev, *buffers)
            if whole is not part:
                part.copy_(whole[: len(part)])
        return values

    def permutation(self, count: int) -> Tensor:
        """A uniformly random order of 0 .. count - 1, int64, shape (count,).

        It sorts `count` random words, drawn again if two are equal, so every order is equally
        likely.
        """
        while True:
            words = self.words(count)
            order = np.argsort(words)
            ranked = words[order]
            if not (ranked[1:] == ranked[:-1]).any():
                return torch.from_numpy(order.astype(np.int64, copy=False))

    def _normal_pairs(self, pairs: int, stddev: float) -> tuple[Tensor, Tensor]:
        """`box_muller` of the next 2 * pairs words: two float64 tensors (pairs,), which the next
        call overwrites."""
        scratch.reserve(pairs)
        words = scratch.words[: 2 * pairs]
        cosine = scratch.cosine[:pairs]
        self.fill(words.numpy())
        words[:pairs].bitwise_and_(LOW_63_BITS)
        # The floats take the place of the words, so that less memory is touched.
        floats = words.view(torch.float64).copy_(words)
        box_muller(floats[:pairs], floats[pairs:], cosine, stddev)
        return cosine, floats[pairs:]

    def fill(self, words: npt.NDArray[Any]) -> None:
        """Overwrites an array (count,) of 64-bit words; otherwise as `words`."""
        self._check_process()
        cipher = self._begun.get("stream")
        if cipher is None:
            key = _derive(self._key, "stream")
            made = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
            # In one step: a second thread must not begin the stream again.
            cipher = self._begun.setdefault("stream", made)
        stream = words.view(np.uint8).data
        for start in range(0, len(stream), len(_ZEROS)):
            part = stream[start : start + len(_ZEROS)]
            cipher.update_into(_ZEROS[: len(part)], part)

    def words_on(self, device: torch.device, count: int) -> Tensor:
        """`count` words as int64 (count,) on `device`, of a second stream, ChaCha20, which is the
        same on every device."""
        self._check_process()
        if self._on_devices is None:
            from discreet.privacy.chacha import ChaCha

            nonce = _derive(self._key, "devices, nonce")[:8]
            self._on_devices = ChaCha(_derive(self._key, "devices"), nonce)
        return self._on_devices.words(count, device)

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                "a RandomSource was carried into another process, where it would repeat its noise"
            )


def secure_source() -> RandomSource:
    """A source with a fresh key from the operating system. Its stream never repeats."""
    return RandomSource(os.urandom(32), is_secure=True)


def source_of(seed: int | None) -> RandomSource:
    """A seeded source, or a secure one without a seed."""
    if seed is None:
        return secure_source()
    return seeded_source(seed)


def seeded_source(seed: int) -> RandomSource:
    """A source that gives the same stream for the same seed (an int >= 0): for simulation and tests
    only.

    Anyone who knows the seed can subtract the noise, so it protects nobody.
    """
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed must be an int >= 0, not {seed!r}")
    return RandomSource(_derive(bytes(32), "seed", seed), is_secure=False)


def signed(words: Words) -> Tensor:
    """The same bits as an int64 tensor, without a copy."""
    return torch.from_numpy(words.view(np.int64))


def open_uniform(words: Tensor) -> Tensor:
    """Uniform in (0, 1] from the low 63 bits of int64 words: (low + 1/2) / 2^63 in float64, never
    0."""
    return (words & LOW_63_BITS).double().add_(0.5).mul_(2.0**-63)


def box_muller(radius: Tensor, angle: Tensor, cosine: Tensor, stddev: float = 1.0) -> None:
    """Normal values from words as float64 (m,) by Box and Muller's method (1958): radii
    sqrt(-2 ln u) from 63 bits, and angles pi * word / 2^63. Writes the values from cosines into
    `cosine` and those from sines into `angle`."""
    torch.add(_HALF, radius, alpha=2.0**-63, out=radius)
    # stddev^2 inside the root could vanish or overflow
    radius.log_().mul_(-2.0).sqrt_().mul_(stddev)
    torch.cos(angle.mul_(math.pi * 2.0**-63), out=cosine).mul_(radius)
    angle.sin_().mul_(radius)


def fast_pairs(words: Tensor, out: Tensor, stddev: float, radius: Tensor, angle: Tensor) -> None:
    """Writes normal values into `out`, float32 (2m,), by Box and Muller's method (1958), mostly in
    float32.

    The low 63 bits of words 0 .. m-1, int64, give the radii, with a logarithm in float64: in
    float32 the distribution would lack its tail or its centre. The 32-bit halves of the following
    words give the angles, pi * half / 2^31. The m values from cosines come first, then those from
    sines. `words` is overwritten; `radius` and `angle`, float32 (m,), are buffers. All are on one
    device.
    """
    pairs = len(radius)
    bits = words[:pairs].bitwise_and_(LOW_63_BITS)
    uniform = bits.view(torch.float64).copy_(bits).add_(0.5).mul_(2.0**-63)
    # stddev^2 inside the root could vanish or overflow
    radius.copy_(uniform.log_()).mul_(-2.0).sqrt_().mul_(stddev)
    angle.copy_(words[pairs:].view(torch.int32)[:pairs]).mul_(math.pi * 2.0**-31)
    torch.cos(angle, out=out[:pairs]).mul_(radius)
    torch.sin(angle, out=out[pairs:]).mul_(radius)


def radii(words: Bits, stddev: float) -> Floats:
    """`stddev` times the radii of `fast_pairs`, float32 (m,), which the next call overwrites, from
    the low 63 bits of words int64 (m,), which are overwritten."""
    uniform = scratch.cosine.numpy()[: len(words)]
    radius: Floats = scratch.radii[: len(words)]
    np.bitwise_and(words, LOW_63_BITS, out=words)
    np.add(words, 0.5, out=uniform)
    uniform *= 2.0**-63
    np.copyto(radius, np.log(uniform, out=uniform), casting="same_kind")
    radius *= np.float32(-2.0)
    np.sqrt(radius, out=radius)
    # stddev^2 inside the root could vanish or overflow
    radius *= np.float32(stddev)
    return radius


def write_pairs(radius: Floats, words: Bits, out: Floats) -> None:
    """Writes the values of `fast_pairs` into `out`, float32 (2m,), for radii (m,) and the words of
    their angles."""
    pairs = len(radius)
    cosine = out[:pairs]
    angle = out[pairs:]
    np.copyto(angle, words.view(np.int32)[:pairs], casting="same_kind")
    angle *= _SHORT_HALF_STEP
    np.cos(angle, out=cosine)
    cosine *= radius
    np.sin(angle, out=angle)
    angle *= radius


def laplace_values(words: Tensor) -> Tensor:
    """Standard Laplace values from as many int64 words, float64: -ln u of 63 bits, with the word's
    sign.

    They end at 44.4; `discreet.privacy.grid.second_laplace` takes more bits in the tail.
    """
    return open_uniform(words).log_().copysign_(words)


def _derive(key: bytes, *labels: str | int) -> bytes:
    """HMAC-SHA-256 of the labels, each with type and length, so that no two lists have the same
    encoding."""
    message = b""
    for label in labels:
        if not isinstance(label, str | int):
            raise TypeError(f"a label must be a str or an int, not {type(label).__name__}")
        text = str(label).encode()
        message += (b"i" if isinstance(label, int) else b"s") + len(text).to_bytes(8, "big") + text
    return hmac.digest(key, message, "sha256")
