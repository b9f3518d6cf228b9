"""Image data sets, IDX files and the hospitals' tables: from local files, and from a hub that a
fake stands for."""

from __future__ import annotations

import csv
import os
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from discreet.data.datasets import load_task, loaded
from discreet.data.examples import Examples
from discreet.data.heart import HOSPITALS, patients, read_hospital, train_and_test
from discreet.data.partition import client_examples_of
from discreet.settings.data import DataConfig

RANDOM = np.random.default_rng(31153)


def write_idx(file: Path, array: np.ndarray[Any, Any]) -> None:
    header = bytes([0, 0, 8, array.ndim]) + b"".join(
        struct.pack(">I", size) for size in array.shape
    )
    file.write_bytes(header + array.tobytes())


def write_mnist(folder: Path) -> np.ndarray[Any, Any]:
    images = RANDOM.integers(0, 256, (6, 28, 28)).astype(np.uint8)
    for part in ("train", "t10k"):
        write_idx(folder / f"{part}-images-idx3-ubyte", images)
        write_idx(folder / f"{part}-labels-idx1-ubyte", np.arange(6, dtype=np.uint8))
    return images


def python2_batch(pixels: np.ndarray[Any, Any], labels: list[int]) -> bytes:
    """The bytes that Python 2 wrote for CIFAR-10: byte strings for keys, numpy's core under its old
    name."""
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01K" + bytes([len(pixels)]) + b"M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        b"T" + struct.pack("<I", pixels.size) + pixels.tobytes() + b"tb"
    )
    numbers = b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels" + numbers + b"u."


def write_cifar(folder: Path) -> np.ndarray[Any, Any]:
    pixels = RANDOM.integers(0, 256, (2, 3072)).astype(np.uint8)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (folder / name).write_bytes(python2_batch(pixels, [7, 2]))
    return pixels


def write_femnist(file: Path, **changes: Any) -> None:
    writers = np.repeat([f"f{i:02}" for i in range(20)], 3)
    arrays = {
        "images": np.zeros((60, 28, 28), np.uint8),
        "labels": np.arange(60),
        "writers": writers,
    } | changes
    kept: dict[str, Any] = {name: array for name, array in arrays.items() if array is not None}
    np.savez(file, **kept)


def test_mnist_is_the_published_one(shared_data: Path) -> None:
    task = load_task("mnist", path=str(shared_data / "mnist"))
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert task.train.targets.bincount().tolist() == counts
    assert task.train.targets[:5].tolist() == [5, 0, 4, 1, 9]
    assert (len(task.test), task.shape.input_shape) == (10000, (1, 28, 28))
    # The mean and deviation that every MNIST recipe quotes.
    assert float(task.train.inputs.mean()) == pytest.approx(0.1307, abs=1e-4)
    assert float(task.train.inputs.std()) == pytest.approx(0.3081, abs=1e-4)


def test_cifar_pixels_are_red_green_blue_planes(tmp_path: Path) -> None:
    pixels = write_cifar(tmp_path)
    task = load_task("cifar10", path=str(tmp_path))
    assert torch.equal(task.test.inputs.flatten(1), torch.from_numpy(pixels) / 255)
    assert task.train.inputs.shape == (10, 3, 32, 32)
    assert task.train.targets.tolist() == [7, 2] * 5


def test_a_cifar_file_that_would_run_code_is_refused(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    (tmp_path / "test_batch").write_bytes(pickle.dumps(os.getcwd))
    with pytest.raises(ValueError, match=r"test_batch .*getcwd does not belong"):
        load_task("cifar10", path=str(tmp_path))


def test_femnist_holds_out_whole_writers(tmp_path: Path) -> None:
    # The label of each example is its row, so the rows and their writers can be told from the
    # tables.
    write_femnist(tmp_path / "letters.npz")
    task = load_task("femnist", path=str(tmp_path / "letters.npz"))
    public = {label // 3 for label in task.test.targets.tolist()}
    assert len(public) == 2
    assert not public & {label // 3 for label in task.train.targets.tolist()}
    assert task.owners.tolist() == [number for number in range(18) for _ in range(3)]
    assert task.train.targets.tolist() == sorted(task.train.targets.tolist())


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A hub with small data sets in the columns of the real ones; nothing is sent and nothing
    fetched."""
    import datasets
    from flwr_datasets import federated_dataset
    from PIL import Image

    def split(shape: tuple[int, ...], image: str, label: str, **more: list[str]) -> Any:
        pixels = [Image.fromarray(np.full(shape, 51 * i, np.uint8)) for i in range(4)]
        return datasets.Dataset.from_dict({image: pixels, label: [0, 1, 2, 3], **more})

    splits = {
        "ylecun/mnist": split((28, 28), "image", "label"),
        "uoft-cs/cifar10": split((32, 32, 3), "img", "label"),
        "flwrlabs/femnist": split(
            (28, 28), "image", "character", writer_id=["f1", "f0", "f1", "f2"]
        ),
    }

    def load_dataset(path: str, name: str | None = None) -> Any:
        if path not in splits:
            raise ConnectionError("no route")
        return datasets.DatasetDict({"train": splits[path], "test": splits[path]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(federated_dataset, "event", lambda *_: None)
    loaded.cache_clear()
    return splits


@pytest.mark.parametrize(("name", "shape"), [("mnist", (1, 28, 28)), ("cifar10", (3, 32, 32))])
def test_images_come_from_the_hub_in_its_order(
    hub: dict[str, Any], name: str, shape: tuple[int, ...]
) -> None:
    writers = load_task("femnist").owners
    assert sorted(writers.unique().tolist()) == [0, 1]
    task = load_task(name)
    assert task.shape.input_shape == shape
    assert task.train.targets.tolist() == [0, 1, 2, 3]
    assert task.test.inputs[:, 0, 5, 7].tolist() == pytest.approx([0.0, 0.2, 0.4, 0.6])


TRAIN, TEST = (199, 172, 30, 85), (104, 89, 16, 45)  # FLamby's table of Fed-Heart-Disease
BY_HOSPITAL = DataConfig(name="heart", num_clients=4, partition="natural")


@pytest.fixture(scope="module")
def folder(shared_data: Path) -> Path:
    return shared_data / "heart"


def raw_rows(folder: Path, name: str) -> list[list[str]]:
    """The lines of a hospital's file without a missing value in the columns that are kept."""
    with (folder / f"processed.{name}.data").open(newline="") as file:
        return [row for row in csv.reader(file) if "?" not in (*row[:10], row[13])]


def by_hand(row: list[str]) -> list[float]:
    """A line of the file as the model should see it, written out feature by feature."""
    age, sex, kind, pressure, cholesterol, sugar, ecg, rate, angina, depression = map(
        float, row[:10]
    )
    scaled = [
        (age - 55) / 35,  # 20 to 90
        sex,
        (pressure - 140) / 60,  # 80 to 200
        (cholesterol - 250) / 150,  # 100 to 400
        sugar,
        (rate - 140) / 80,  # 60 to 220
        angina,
        (depression - 2.5) / 2.5,  # 0 to 5
        *(1.0 if kind == number else 0.0 for number in (2, 3, 4)),
        *(1.0 if ecg == number else 0.0 for number in (1, 2)),
    ]
    return [min(1.0, max(-1.0, value)) for value in scaled]


def test_each_hospital_has_as_many_patients_as_flamby_counts(folder: Path) -> None:
    task = load_task("heart", path=str(folder))
    assert tuple(task.owners.bincount().tolist()) == TRAIN
    assert tuple(client_examples_of(task, BY_HOSPITAL).sizes(np.arange(4))) == TRAIN
    hospitals = [read_hospital(folder / f"processed.{name}.data") for name in HOSPITALS]
    assert tuple(len(labels) for _, labels in hospitals) == (303, 261, 46, 130)
    tests = [train_and_test(labels)[1] for _, labels in hospitals]
    assert tuple(map(len, tests)) == TEST
    parts = [
        patients(every[rows], labels[rows])
        for (every, labels), rows in zip(hospitals, tests, strict=True)
    ]
    assert torch.equal(task.test.inputs, torch.cat([part.inputs for part in parts]))
    assert len(task.test) == sum(TEST)
    with pytest.raises(ValueError, match=r"data\.path: heart"):
        load_task("heart")


def test_patients_are_their_lines_of_the_file_by_hand(folder: Path) -> None:
    for name in HOSPITALS:
        rows, every = (
            raw_rows(folder, name),
            patients(*read_hospital(folder / f"processed.{name}.data")),
        )
        assert len(every) == len(rows)
        for number in (0, 1, 17, len(rows) - 1):
            assert every.inputs[number].tolist() == pytest.approx(by_hand(rows[number]), abs=1e-6)
        assert every.targets.tolist() == [int(float(row[13]) > 0) for row in rows]


def test_a_change_of_one_patient_changes_nothing_of_another(folder: Path, tmp_path: Path) -> None:
    def cleveland(lines: list[str]) -> Examples:
        (tmp_path / "processed.cleveland.data").write_text("\n".join(lines) + "\n")
        return patients(*read_hospital(tmp_path / "processed.cleveland.data"))

    lines = (folder / "processed.cleveland.data").read_text().splitlines()
    outlier = "9999.0,1.0,1.0,9999.0,9999.0,1.0,2.0,9999.0,0.0,9999.0,3.0,0.0,6.0,4.0"
    before, after = cleveland(lines), cleveland([outlier, *lines[1:]])
    assert torch.equal(before.inputs[1:], after.inputs[1:])
    assert float(after.inputs.abs().max()) <= 1
