"""Texts as integers, by the tokenizer in a folder in Hugging Face's layout, without network access;
and plays for next-character prediction, with each speaking role as one user (McMahan et al. 2017,
section 3)."""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from discreet.data.cell_reading import CellError
from discreet.data.examples import SHAPES, Examples, Task, concatenated
from discreet.data.targets import Array, FolderError
from discreet.settings.foreign_files import one_line
from discreet.settings.rules import require_extra
from discreet.settings.training import HF

(WINDOW,) = SHAPES["shakespeare"].input_shape
# Every eighth character of a role is a target. Adjacent windows share 79 of 80 characters, so using
# all of them would take eight times the memory and add little.
STRIDE = 8
PADDING = 0
UNKNOWN = 1
# A fixed public alphabet: the set of characters that occur would reveal which characters the users
# wrote.
ALPHABET = "\n" + "".join(chr(code) for code in range(32, 127))
NUM_TOKENS = len(ALPHABET) + 2
# no network access, and no code from a folder runs
LOCAL = {
    "local_files_only": True,
    "trust_remote_code": False,
}
_TEST_SHARE = 5
_LONGEST_NAME = 60


def load_shakespeare(path: str | None) -> Task:
    """Next-character prediction from a text of plays; owners are the speaking roles, sorted by
    name.

    inputs: (n, 80) int64, the characters before the target, with 0 before the role's text begins.
    targets: the next character. Both are numbers in [0, 98): 0 padding, 1 unknown, then `ALPHABET`.
    The last fifth of a role's speeches (rounded down, so none below five speeches) is the public
    test set.
    """
    if path is None:
        raise ValueError("data.path: shakespeare is read from a text file; set data.path to it")
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(
            f"data.path: {file} is not a text of plays, with a line for each speaker"
        )
    train = []
    test = []
    for _, speeches in sorted(read_speeches(file.read_text(encoding="utf-8")).items()):
        kept = len(speeches) - len(speeches) // _TEST_SHARE
        train.append(_windows(speeches[:kept]))
        if speeches[kept:]:
            test += [_windows(speeches[kept:])]
    if not test:
        raise ValueError(
            f"data.path: no role in {file} has {_TEST_SHARE} speeches; the test set is empty"
        )
    owners = torch.repeat_interleave(
        torch.arange(len(train)), torch.tensor([len(table) for table in train])
    )
    return Task(
        "shakespeare", concatenated(train, owners), concatenated(test), SHAPES["shakespeare"]
    )


def read_speeches(text: str) -> dict[str, list[str]]:
    """Speeches by role, in the order of the text. Raises ValueError if there are none.

    A speech is a block of lines between empty lines whose first line is the speaker's name and a
    mark, ":" or "." (the one that ends more first lines). Blocks without such a line, and speakers
    without a speech, are left out.

    >>> read_speeches("ANNA:\\nGood day.\\n\\nBEN:\\nWho\\nis there?\\n\\nANNA:\\nI.\\n")
    {'ANNA': ['Good day.', 'I.'], 'BEN': ['Who\\nis there?']}
    """
    blocks = [
        block.strip().split("\n") for block in re.split(r"\n\s*\n", text.replace("\r\n", "\n"))
    ]
    heads = Counter(lines[0].rstrip()[-1:] for lines in blocks if len(lines) > 1)
    if heads[":"] >= heads["."]:
        mark = ":"
    else:
        mark = "."
    speeches: dict[str, list[str]] = {}
    for head, *lines in blocks:
        name = head.rstrip()
        if lines and name.endswith(mark) and 1 < len(name) <= _LONGEST_NAME:
            speeches.setdefault(name[:-1], []).append("\n".join(line.strip() for line in lines))
    if not speeches:
        raise ValueError(
            "the text names no speakers: expected lines such as 'ROMEO:' before each speech"
        )
    return speeches


def character_numbers(text: str) -> torch.Tensor:
    """Characters as numbers, (len(text),) int64; a character outside `ALPHABET` is 1.

    >>> character_numbers("\\na~é").tolist()
    [2, 68, 97, 1]
    """
    codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    table = np.full(128, UNKNOWN, dtype=np.int64)
    table[[ord(character) for character in ALPHABET]] = np.arange(2, NUM_TOKENS)
    return torch.from_numpy(np.where(codes < 128, table[np.minimum(codes, 127)], UNKNOWN))


def _windows(speeches: list[str]) -> Examples:
    """Windows of one role: the targets are the characters 0, STRIDE, 2 STRIDE, ... of its text."""
    tokens = torch.cat([torch.full((WINDOW,), PADDING), character_numbers("\n".join(speeches))])
    rows = tokens.unfold(0, WINDOW + 1, STRIDE)
    return Examples(rows[:, :WINDOW].clone(), rows[:, WINDOW].clone())


def pretrained_folder(name: str, *, setting: str = "model.name") -> Path:
    """The absolute path of the folder in `hf:FOLDER`. FolderError, with the setting's name: it has
    no model in Hugging Face's layout."""
    folder = Path(name.removeprefix(HF)).expanduser().resolve()
    if not (folder / "config.json").is_file():
        raise FolderError(
            f"{setting}: {name}: {folder / 'config.json'} is missing; models are never downloaded"
        )
    return folder


def transformers_library(*, why: str) -> Any:
    """The transformers library, with its messages off. ConfigError: it is not installed."""
    require_extra("transformers", "peft", why=why)
    import transformers

    library: Any = transformers
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


@lru_cache(maxsize=4)
def tokenizer_in(folder: Path) -> Any:
    """The tokenizer in a folder. It pads at the end, with its own padding token or otherwise with
    its end-of-text token."""
    library = transformers_library(why="text")
    with one_line(folder, FolderError, "has no tokenizer that transformers can read"):
        tokenizer = library.AutoTokenizer.from_pretrained(
            folder, padding_side="right", truncation_side="right", **LOCAL
        )
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise FolderError(
            f"{folder}: its tokenizer has neither a padding token nor an end-of-text token"
        )
    return tokenizer


def num_tokens_in(folder: Path) -> int:
    """The number of tokens for which the model in a folder has embeddings."""
    library = transformers_library(why="text")
    with one_line(folder, FolderError, "has no config.json that transformers can read"):
        return int(library.AutoConfig.from_pretrained(folder, **LOCAL).vocab_size)


def tokens_of(texts: Any, folder: Path, *, length: int) -> tuple[Array, Array]:
    """The token ids of a column of texts, (n, length) int64, truncated or padded at the end, and a
    mask that is False for padding. CellError: a cell is not text."""
    cells = texts.to_pylist()
    for row, cell in enumerate(cells):
        if not isinstance(cell, str):
            raise CellError(
                row, "the text is missing" if cell is None else "the cell is no text in UTF-8"
            )
    read = tokenizer_in(folder)(
        cells, truncation=True, max_length=length, padding="max_length", return_tensors="np"
    )
    return np.asarray(read["input_ids"], np.int64), np.asarray(read["attention_mask"], bool)
