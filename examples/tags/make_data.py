"""Made-up data: 480 sentences of 60 writers, who keep them private, tagged word by word.

`python examples/tags/make_data.py` wrote train.csv, and test.csv with 120 other sentences, which
are public.
"""

from __future__ import annotations

import csv
import random
from pathlib import Path

LENGTH, WRITERS, EACH = 8, 60, 8
# Ids of words; 0 is padding after the end of a sentence. Some words are a noun or a verb, depending
# on the word before.
DETERMINERS, NOUNS, VERBS, BOTH, ADVERBS = (
    range(1, 5),
    range(5, 15),
    range(15, 23),
    range(23, 27),
    range(27, 30),
)


def sentence(draw: random.Random) -> list[tuple[int, str]]:
    """Words with their tags, cut at `LENGTH`."""
    words = []
    while not words or (len(words) < LENGTH and draw.random() < 0.6):
        words.append((draw.choice(DETERMINERS), "determiner"))
        words.append((draw.choice([*NOUNS, *BOTH]), "noun"))
        words.append((draw.choice([*VERBS, *BOTH]), "verb"))
        if draw.random() < 0.4:
            words.append((draw.choice(ADVERBS), "adverb"))
    return words[:LENGTH]


def write(path: Path, writers: list[int], *, seed: int) -> None:
    """A row a sentence: words w0 .. w7, tags t0 .. t7, "-" for none."""
    draw = random.Random(seed)
    with path.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(
            [
                "writer",
                *(f"w{place}" for place in range(LENGTH)),
                *(f"t{place}" for place in range(LENGTH)),
            ]
        )
        for writer in writers:
            words = sentence(draw)
            words += [(0, "-")] * (LENGTH - len(words))
            table.writerow([writer, *(word for word, _ in words), *(tag for _, tag in words)])


if __name__ == "__main__":
    here = Path(__file__).parent
    write(
        here / "train.csv", [writer for writer in range(WRITERS) for _ in range(EACH)], seed=61507
    )
    write(here / "test.csv", [-1] * 120, seed=61508)
