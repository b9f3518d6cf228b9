"""Sequences of tokens with a tag at each position, padded: a folder of them, and models of one's
own that tag them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from discreet.data.examples import Examples
from discreet.layers.recurrent import ClassesSecond, LSTMLayer
from discreet.per_example.objective import PADDING

TOKENS, TAGS, LENGTH = 9, 4, 6
GRU, LAYERS = "tests.sequences:gru", "tests.sequences:layers"


class Tagger(nn.Module):
    """Logits (n, classes, length) from tokens (n, length)."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.embedding, self.recurrent = nn.Embedding(TOKENS, 5), nn.GRU(5, 6, batch_first=True)
        self.output = nn.Linear(6, num_classes)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.output(self.recurrent(self.embedding(tokens))[0])
        return logits.transpose(1, 2)


def gru(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return Tagger(num_classes)


def layers(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A tagger of layers whose passes are known, for cohorts too."""
    first = [nn.Embedding(TOKENS, 5), LSTMLayer(5, 6), nn.Linear(6, 7), nn.Tanh()]
    return nn.Sequential(*first, nn.Linear(7, num_classes), ClassesSecond())


class Mapped(Tagger):
    """With an LSTM of torch.nn, which torch.func maps over examples."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(num_classes)
        self.recurrent = nn.LSTM(5, 6, batch_first=True)  # type: ignore[assignment]


BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "by rules": lambda: layers((LENGTH,), TAGS),
    "by torch.func": lambda: Mapped(TAGS),
    "sequential": lambda: Tagger(TAGS),
}


def built(how: str = "by rules", *, seed: int = 90121) -> nn.Module:
    """A tagger with random parameters, whose per-example gradients are found in that way."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return BUILDERS[how]()


def rows(count: int, *, seed: int, longest: int = LENGTH) -> tuple[np.ndarray, np.ndarray]:
    """Tokens (count, LENGTH), 0 where there is none, and tags, -1 there; lengths from 0 to
    `longest`. A tag follows from the token and the one before it."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(0, longest + 1, count)
    lengths[:2] = (longest, 0)[:count]
    there = np.arange(LENGTH) < lengths[:, None]
    tokens = np.where(there, draw.integers(1, TOKENS, (count, LENGTH)), 0)
    before = np.concatenate([np.zeros((count, 1), np.int64), tokens[:, :-1]], axis=1)
    return tokens, np.where(there, (tokens // 3 + before // 5) % TAGS, -1)


def sequences(count: int, *, seed: int = 3119, longest: int = LENGTH) -> Examples:
    """`rows` as examples have them."""
    tokens, tags = rows(count, seed=seed, longest=longest)
    return Examples(torch.from_numpy(tokens), torch.from_numpy(np.where(tags < 0, PADDING, tags)))


TAGGED = f"tokens = {TOKENS}\nnum_classes = {TAGS}\npadding = -1\n"


def folder(path: Path, description: str = TAGGED, *, seed: int = 70111, count: int = 120) -> Path:
    """A folder with train.npz, test.npz and data.toml."""
    path.mkdir(parents=True, exist_ok=True)
    for name, number in (("train", count), ("test", 40)):
        tokens, tags = rows(number, seed=seed + len(name))
        owners = np.arange(number) % 8
        np.savez(
            path / f"{name}.npz", inputs=tokens, tags=tags, who=owners + 1000 * (name == "test")
        )
    target = "" if "next_token" in description else 'target = "tags"\n'
    words = (
        f'format = "npz"\nfile = "train.npz"\ntest = "test.npz"\nowner = "who"\nmodel = '
        f'"{LAYERS}"\n{target}'
    )
    (path / "data.toml").write_text(words + description)
    return path


def wrong_way(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Gives the classes last."""
    return nn.Sequential(nn.Embedding(TOKENS, 5), nn.Linear(5, num_classes))
