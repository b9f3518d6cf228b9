"""Texts as token ids, by the tokenizer in a folder in Hugging Face's layout. Nothing is fetched from the network."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from discreet.data.targets import Array, FolderError, RowError
from discreet.settings.rules import require_extra
from discreet.settings.training import HF

LOCAL = {"local_files_only": True, "trust_remote_code": False}  # nothing is fetched, and no code of a folder runs


def pretrained_folder(name: str, *, setting: str = "model.name") -> Path:
    """The folder that `hf:FOLDER` names, absolute. Raises FolderError, which names the setting, if no model in Hugging
    Face's layout is there.
    """
    folder = Path(name.removeprefix(HF)).expanduser().resolve()
    if not (folder / "config.json").is_file():
        raise FolderError(f"{setting}: {name}: {folder / 'config.json'} is missing, and no model is ever fetched")
    return folder


def transformers_library(*, why: str) -> Any:
    """The library, silent. Raises ConfigError if it is not installed."""
    require_extra("transformers", "peft", extra="text", why=why)
    import transformers

    library: Any = transformers
    library.logging.set_verbosity_error()
    library.logging.disable_progress_bar()
    return library


@lru_cache(maxsize=4)
def tokenizer_in(folder: Path) -> Any:
    """The tokenizer in a folder. It pads at the end, by its own padding token or else by the one that ends a text."""
    try:
        tokenizer = transformers_library(why="text").AutoTokenizer.from_pretrained(
            folder, padding_side="right", truncation_side="right", **LOCAL
        )
    except (OSError, ValueError) as error:
        raise FolderError(f"{folder} has no tokenizer that transformers reads: {error}") from error
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    if tokenizer.pad_token is None:
        raise FolderError(f"{folder}: its tokenizer has neither a token for padding nor one that ends a text")
    return tokenizer


def num_tokens_in(folder: Path) -> int:
    """The number of tokens that the model in a folder has vectors for."""
    found = transformers_library(why="text").AutoConfig.from_pretrained(folder, **LOCAL)
    return int(found.vocab_size)


def tokens_of(texts: Any, folder: Path, *, length: int) -> tuple[Array, Array]:
    """The ids of a column of texts, (n, length) int64, cut or padded at the end, and which of them are no padding.
    Raises RowError: a cell is no text.
    """
    cells = texts.to_pylist()
    for row, cell in enumerate(cells):
        if not isinstance(cell, str):
            raise RowError(row, "the text is missing" if cell is None else "the text is none in UTF-8")
    read = tokenizer_in(folder)(cells, truncation=True, max_length=length, padding="max_length", return_tensors="np")
    return np.asarray(read["input_ids"], np.int64), np.asarray(read["attention_mask"], bool)
