"""Plays as next-character prediction."""

from __future__ import annotations

from pathlib import Path

import torch

from discreet.data.datasets import load_task
from discreet.data.text import ALPHABET, STRIDE, WINDOW, encode


def decode(tokens: torch.Tensor) -> str:
    return "".join("_?"[token] if token < 2 else ALPHABET[token - 2] for token in tokens.tolist())


def write_play(file: Path, speeches: list[tuple[str, str]], mark: str = ":") -> str:
    file.write_text("\n\n".join(f"{name}{mark}\n{speech}" for name, speech in speeches))
    return str(file)


def test_a_window_holds_the_characters_before_its_target(tmp_path: Path) -> None:
    line = "".join(chr(33 + i % 90) for i in range(200))
    path = write_play(tmp_path / "play", [("ANNA", line), *[("BEN", "word")] * 5])
    train = load_task("shakespeare", path=path).train
    for row in (0, 1, 12, 24):
        where = row * STRIDE
        assert decode(train.inputs[row]) == line[max(0, where - WINDOW) : where].rjust(WINDOW, "_")
        assert decode(train.targets[row : row + 1]) == line[where]


def test_the_last_fifth_of_a_roles_speeches_is_the_test_set(tmp_path: Path) -> None:
    speeches = [("ANNA", letter * 20) for letter in "abcdefghij"] + [("BEN", "x" * 20)] * 4
    task = load_task("shakespeare", path=write_play(tmp_path / "play", speeches))
    assert set(decode(task.test.inputs.flatten())) <= set("_ij\n")
    assert not set("ij") & set(decode(task.train.inputs.flatten()))
    assert task.owners is not None
    ben = task.train.subset(torch.nonzero(task.owners == 1)[:, 0])  # no window crosses from one role to another
    assert set(decode(ben.inputs.flatten())) | set(decode(ben.targets)) == {"x", "_", "\n"}
    assert decode(encode("caf\u00e9 \U0001f600\tz")) == "caf? ??z"
