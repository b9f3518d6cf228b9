"""A node's own data: every format gives the same examples, and what is wrong is said to its owner alone."""

from __future__ import annotations

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from pyarrow import parquet

from discreet.data.folder import main, node_table
from discreet.data.targets import FolderError
from discreet.node.account import Refused
from discreet.node.nodes import node_examples
from discreet.settings.compose import load_config

PIXELS = np.arange(3 * 64).reshape(3, 64) % 17
CLASSES = np.array([0, 7, 9])
EXPECTED = torch.from_numpy((PIXELS / 16).astype(np.float32)).reshape(3, 1, 8, 8)
NAMES = [f"p{number}" for number in range(64)]
SCALE = "low = 0\nhigh = 16\n"


def describe(folder: Path, text: str) -> Path:
    (folder / "data.toml").write_text(text)
    return folder


def csv_folder(folder: Path, *, head: str = "", rows: np.ndarray = PIXELS, extra: str = SCALE) -> Path:
    lines = [head or ",".join([*NAMES, "digit"])]
    lines += [",".join(map(str, [*row, target])) for row, target in zip(rows, CLASSES, strict=True)]
    (folder / "a.csv").write_text("\n".join(lines) + "\n")
    return describe(folder, f'format = "csv"\nfile = "a.csv"\ntarget = "digit"\n{extra}')


def parquet_folder(folder: Path) -> Path:
    columns = {name: PIXELS[:, number] for number, name in enumerate(NAMES)}
    parquet.write_table(pa.table({"digit": CLASSES, **columns}), folder / "a.parquet")
    return describe(folder, f'format = "parquet"\nfile = "a.parquet"\ntarget = "digit"\n{SCALE}')


def npz_folder(folder: Path) -> Path:
    np.savez(folder / "a.npz", x=PIXELS.reshape(3, 8, 8), y=CLASSES)
    return describe(folder, f'format = "npz"\nfile = "a.npz"\ninputs = "x"\ntarget = "y"\n{SCALE}')


def idx_folder(folder: Path) -> Path:
    def idx(values: np.ndarray) -> bytes:
        head = bytes([0, 0, 8, values.ndim]) + np.array(values.shape, ">u4").tobytes()
        return head + values.astype(np.uint8).tobytes()

    (folder / "images.gz").write_bytes(gzip.compress(idx(PIXELS.reshape(3, 8, 8))))
    (folder / "labels").write_bytes(idx(CLASSES))
    return describe(folder, f'format = "idx"\nfile = "images.gz"\ntarget = "labels"\n{SCALE}')


@pytest.mark.parametrize("make", [csv_folder, parquet_folder, npz_folder, idx_folder])
def test_every_format_gives_the_same_examples(tmp_path: Path, make) -> None:  # type: ignore[no-untyped-def]
    examples = node_table(make(tmp_path), "digits")[0]
    torch.testing.assert_close(examples.inputs, EXPECTED)
    assert examples.targets.tolist() == CLASSES.tolist()


WRONG = [
    (lambda folder: folder, "data.toml is missing"),
    (lambda folder: csv_folder(folder, extra="hihg = 1"), "unknown key hihg; did you mean high?"),
    (lambda folder: describe(folder, 'format = "csv"\nfile = "../b.csv"\ntarget = "x"'), "must lie in"),
    (lambda folder: csv_folder(folder, extra='inputs = ["p0"]'), r"1 inputs a row, not 64 for the shape \(1, 8, 8\)"),
    (lambda folder: csv_folder(folder, rows=np.where(PIXELS == 3, np.nan, PIXELS)), "line 2: the column p3 is missing"),
    (lambda folder: csv_folder(folder, extra='task = "mnist"'), "for mnist, not for digits"),
    (lambda folder: csv_folder(folder, extra='classes = ["a"]'), "line 2: the class is not in classes"),
]


@pytest.mark.parametrize(("make", "message"), WRONG)
def test_what_is_wrong_is_said(tmp_path: Path, make: Callable[[Path], Path], message: str) -> None:
    with pytest.raises(FolderError, match=message):
        node_table(make(tmp_path), "digits")


def test_the_server_does_not_learn_what_is_wrong(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = csv_folder(tmp_path, extra='task = "mnist"')
    with pytest.raises(Refused) as refused:
        node_examples(load_config().data, {"data": str(folder)})
    assert str(refused.value) == "this node's own data do not fit the task digits; its log says why"
    assert "for mnist" in caplog.text


def test_the_check_can_be_run_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(csv_folder(tmp_path)), "digits"]) == 0
    assert "3 examples" in capsys.readouterr().out
    assert main([str(tmp_path), "mnist"]) == 2
    assert "64 inputs a row, not 784" in capsys.readouterr().err
