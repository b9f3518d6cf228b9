"""Reading IDX files, against bytes written by hand."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from discreet.tasks.images import find_idx, read_idx

HEADER = b"\0\0\x08\x02" + b"\0\0\0\x02" + b"\0\0\0\x03"


def test_bytes_are_read_in_row_order(tmp_path: Path) -> None:
    file = tmp_path / "array"
    file.write_bytes(HEADER + bytes([1, 2, 3, 253, 254, 255]))
    assert read_idx(file).tolist() == [[1, 2, 3], [253, 254, 255]]


def test_a_compressed_file_reads_the_same(tmp_path: Path) -> None:
    file = tmp_path / "array.gz"
    file.write_bytes(gzip.compress(HEADER + bytes(range(6))))
    assert read_idx(file).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "does not start with two zero bytes"),
        (b"\x89PNG and more", "does not start with two zero bytes"),
        (b"\0\0\x0d\x01\0\0\0\x01\0\0\0\0", "IDX type 0x0d"),
        (HEADER + bytes(5), "should hold 6 bytes"),
        (HEADER + bytes(7), "should hold 6 bytes"),
        (HEADER[:8], "cut short"),
        (HEADER[:7], "cut short"),
    ],
)
def test_what_is_not_a_whole_idx_file_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    file = tmp_path / "array"
    file.write_bytes(content)
    with pytest.raises(ValueError, match=message) as error:
        read_idx(file)
    assert str(file) in str(error.value)


@pytest.mark.parametrize("content", [b"not gzip", gzip.compress(HEADER + bytes(6))[:-9]])
def test_a_broken_compressed_file_is_refused(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "array.gz"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="not a complete gzip file"):
        read_idx(file)


def test_the_plain_file_goes_before_the_compressed_one(tmp_path: Path) -> None:
    (tmp_path / "array.gz").touch()
    assert find_idx(tmp_path, "array").name == "array.gz"
    (tmp_path / "array").touch()
    assert find_idx(tmp_path, "array").name == "array"


def test_a_missing_file_is_named_with_its_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"data\.path: neither array nor array\.gz is in .*" + tmp_path.name):
        find_idx(tmp_path, "array")


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder; expected array"):
        find_idx(tmp_path / "nowhere", "array")
