"""The IDX format of MNIST and Fashion-MNIST: a magic number, the dimensions, then unsigned bytes."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import Any

import numpy as np

_UNSIGNED_BYTE = 0x08


def find_idx(folder: Path, name: str) -> Path:
    """The file `name` or `name`.gz in `folder`; FileNotFoundError says what was expected and where."""
    if not folder.is_dir():
        raise FileNotFoundError(f"data.path: {folder} is not a folder; expected {name} or {name}.gz in it")
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(f"data.path: neither {name} nor {name}.gz is in {folder}")


def read_idx(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The array of unsigned bytes in an IDX file, compressed where the name ends in .gz.

    Raises ValueError naming the file where it is not IDX, holds another type, is cut short or too long.
    """
    content = _read_bytes(path)
    if len(content) < 4 or content[:2] != b"\0\0":
        raise ValueError(f"{path} is not an IDX file: it does not start with two zero bytes")
    if content[2] != _UNSIGNED_BYTE:
        raise ValueError(f"{path} holds IDX type 0x{content[2]:02x}; only unsigned bytes (0x08) are read")
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise ValueError(f"{path} is cut short: it ends within the header")
    shape = tuple(int(size) for size in np.frombuffer(content[4:start], dtype=">u4"))
    if len(content) - start != math.prod(shape):
        raise ValueError(f"{path} should hold {math.prod(shape)} bytes for shape {shape}, not {len(content) - start}")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def _read_bytes(path: Path) -> bytes:
    content = path.read_bytes()
    if path.suffix != ".gz":
        return content
    try:
        return gzip.decompress(content)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file: {error}") from error
