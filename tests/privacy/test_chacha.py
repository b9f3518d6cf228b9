"""The stream of words for an accelerator is ChaCha20, whichever way makes it.

Triton's interpreter runs the kernel on the processor, in a process of its own. Triton is installed,
or in the folder that DISCREET_TEST_TRITON names.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from discreet.privacy import chacha
from discreet.privacy.chacha import ChaCha
from discreet.privacy.randomness import CPU, seeded_source, signed

# key, nonce, the number of the first block and how many there are
Asked = tuple[str, str, int, int]
CASES = 100
PROGRAM = """
import json, sys
import torch
from discreet.privacy.chacha import ChaCha
for key, nonce, first, blocks in json.load(sys.stdin):
    words = ChaCha(bytes.fromhex(key), bytes.fromhex(nonce)).by_kernel(first, blocks, torch.device("cpu"))
    print(words.numpy().tobytes().hex())
"""
# RFC 8439, 2.3.2. The counter is 1, and the first word of the nonce is the upper half of a number.
RFC_ASKED: Asked = (bytes(range(32)).hex(), "0000004a00000000", 1 | 0x09000000 << 32, 1)
RFC_BLOCK = (
    "10f1e7e4d13b5915500fdd1fa32071c4c7d1f4c733c068030422aa9ac3d46c4e"
    "d2826446079faa0914c2d705d98b02a2b5129cd1de164eb9cbd083e8a2503c4e"
)
COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from discreet.privacy import chacha_kernel
types = {"words": "*i64", "state": "*i32", "first": "i64", "size": "constexpr"}
source = ASTSource(chacha_kernel._blocks, types, {"size": chacha_kernel.SIZE})
print(compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])
"""
FOLDER = os.environ.get("DISCREET_TEST_TRITON", "")
needs_triton = pytest.mark.skipif(
    not FOLDER and find_spec("triton") is None, reason="Triton is not installed"
)


def asked_at_random(case: int) -> Asked:
    """Every other stream carries from the lower half of a number into the upper one."""
    draw = seeded_source(90533).child("case", case)
    blocks = 2 + int(draw.words(1)[0] % 150)
    upper = int(draw.words(1)[0] % 2**20)
    lower = int(draw.words(1)[0] % (2**32 - blocks))
    if case % 2:
        lower = 2**32 - 1 - int(draw.words(1)[0]) % (blocks - 1)
    return draw.words(4).tobytes().hex(), draw.words(1).tobytes().hex(), upper << 32 | lower, blocks


def by_cryptography(asked: Asked) -> str:
    """Each block by a cipher of its own."""
    key, nonce, first, blocks = asked
    stream = b""
    for number in range(first, first + blocks):
        start = number.to_bytes(8, "little") + bytes.fromhex(nonce)
        cipher = Cipher(algorithms.ChaCha20(bytes.fromhex(key), start), None)
        stream += cipher.encryptor().update(bytes(64))
    return stream.hex()


def with_triton(program: str, given: object = None, **environment: str) -> str:
    """What a program prints that finds Triton."""
    path = os.pathsep.join(filter(None, [FOLDER, *sys.path]))
    return subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
    ).stdout


def by_processor(asked: Asked) -> str:
    key, nonce, first, blocks = asked
    stream = ChaCha(bytes.fromhex(key), bytes.fromhex(nonce))
    return stream.by_processor(first, blocks).numpy().tobytes().hex()


def test_the_processor_makes_rfc_8439s_block_and_100_streams_of_cryptography() -> None:
    assert by_processor(RFC_ASKED) == RFC_BLOCK
    for case in range(CASES):
        asked = asked_at_random(case)
        assert by_processor(asked) == by_cryptography(asked)


@needs_triton
def test_the_kernel_makes_rfc_8439s_block_and_100_streams_of_cryptography() -> None:
    cases = [asked_at_random(case) for case in range(CASES)]
    rfc, *streams = with_triton(PROGRAM, [RFC_ASKED, *cases], TRITON_INTERPRET="1").split()
    assert rfc == RFC_BLOCK
    assert streams == [by_cryptography(asked) for asked in cases]


@needs_triton
def test_the_kernel_compiles_for_a_card_and_keeps_its_state_in_registers(tmp_path: Path) -> None:
    code = with_triton(COMPILED, TRITON_CACHE_DIR=str(tmp_path))
    assert code.count(".entry") == 1
    assert ".local" not in code


def test_a_seeded_source_gives_the_same_words_again_and_not_those_of_words() -> None:
    source = seeded_source(90371)
    words = source.words_on(CPU, 100)
    assert torch.equal(words, seeded_source(90371).words_on(CPU, 100))
    assert not set(words.tolist()) & set(signed(source.words(200)).tolist())
    assert not set(words.tolist()) & set(source.child("a").words_on(CPU, 100).tolist())


def test_no_word_is_given_twice_by_calls_of_any_size() -> None:
    stream = ChaCha(bytes(range(32)), bytes(8))
    drawn = [stream.words(count, CPU) for count in (1, 0, 9, 8, 3000, 7)]
    assert [len(each) for each in drawn] == [1, 0, 9, 8, 3000, 7]
    words = torch.cat(drawn)
    assert len(words.unique()) == len(words)


@pytest.mark.parametrize("fails", [False, True])
def test_a_kernel_that_fails_or_gives_other_words_is_not_used(
    fails: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(stream: ChaCha, first: int, blocks: int, device: torch.device) -> torch.Tensor:
        if fails:
            raise RuntimeError("no C compiler was found")
        words = stream.by_processor(first, blocks)
        words[-1] += 1
        return words

    monkeypatch.setattr(chacha, "find_spec", lambda name: name)
    monkeypatch.setattr(ChaCha, "by_kernel", broken)
    with caplog.at_level(logging.WARNING, logger="discreet"):
        assert not chacha.has_kernel.__wrapped__(CPU)
    assert "drawn on the processor" in caplog.text
    monkeypatch.setattr(
        ChaCha, "by_kernel", lambda own, first, count, _: own.by_processor(first, count)
    )
    assert chacha.has_kernel.__wrapped__(CPU)
