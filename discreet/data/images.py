"""Image data sets, from local files or through flwr-datasets from the hub.

Pixels are only divided by 255: a mean or a deviation of the clients' data would be an unaccounted
release.
"""

from __future__ import annotations

import gzip
import math
import pickle
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from discreet.data.examples import SHAPES, Examples, Task
from discreet.data.targets import Array
from discreet.settings.rules import require_extra

# A data set's name on the hub, and its columns of images and labels.
_HUB = {
    "mnist": ("ylecun/mnist", "image", "label"),
    "fashion_mnist": ("zalando-datasets/fashion_mnist", "image", "label"),
    "cifar10": ("uoft-cs/cifar10", "img", "label"),
    "femnist": ("flwrlabs/femnist", "image", "character"),
}
FROM_HUB = frozenset(_HUB)
# Writers whose examples make up the public test set of FEMNIST. Whole writers, so that nobody is
# both public
# and protected; chosen by a fixed draw, the same in every run.
_TEST_WRITERS = 0.1
_WRITER_SEED = 40961
# A pickle can call any function; CIFAR files need only these. Old numpy called its core numpy.core.
_CIFAR_GLOBALS = {
    ("numpy.core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}
_UNSIGNED_BYTES = b"\0\0\x08"  # the head of an IDX file that holds them


def load_mnist(path: str | None, *, name: str = "mnist") -> Task:
    """MNIST, or `name` in the same form: 60000 and 10000 images (1, 28, 28) in [0, 1], 10 classes.

    `path` is a folder with the four IDX files under their standard names, with or without .gz; None
    loads ylecun/mnist (zalando-datasets/fashion_mnist) from the hub.
    """
    if path is None:
        return _from_hub(name)
    folder = Path(path).expanduser()
    files = (
        "train-images-idx3-ubyte",
        "train-labels-idx1-ubyte",
        "t10k-images-idx3-ubyte",
        "t10k-labels-idx1-ubyte",
    )
    images, labels, test_images, test_labels = (read_idx(find_idx(folder, file)) for file in files)
    return Task(name, _examples(images, labels), _examples(test_images, test_labels), SHAPES[name])


def load_cifar10(path: str | None) -> Task:
    """CIFAR-10: 50000 and 10000 images (3, 32, 32) in [0, 1], 10 classes.

    `path` is the folder of the "python version", with data_batch_1 to data_batch_5 and test_batch;
    the
    pickles are read with nothing but numpy arrays allowed in them. None loads uoft-cs/cifar10 from
    the hub.
    """
    if path is None:
        return _from_hub("cifar10")
    folder = Path(path).expanduser()
    train = [_read_cifar(folder / f"data_batch_{number}") for number in range(1, 6)]
    images, labels = (np.concatenate(parts) for parts in zip(*train, strict=True))
    return Task(
        "cifar10",
        _examples(images, labels),
        _examples(*_read_cifar(folder / "test_batch")),
        SHAPES["cifar10"],
    )


def load_femnist(path: str | None) -> Task:
    """FEMNIST: digits and letters, images (1, 28, 28) in [0, 1], 62 classes, with the writers as
    owners.

    A tenth of the writers, fixed and at least one, are the public test set; the others are numbered
    from 0 in
    sorted order. `path` is an .npz file with `images` (n, 28, 28), bytes or floats in [0, 1],
    `labels` (n,)
    and `writers` (n,); None loads flwrlabs/femnist from the hub (814 000 images, 2.6 GB of memory).
    """
    if path is None:
        split = _load_split("femnist", "train")
        return _femnist_task(*_columns("femnist", split), np.asarray(split["writer_id"][:]))
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(
            f"data.path: no file {file}; femnist expects an .npz of images, labels, writers"
        )
    with np.load(file, allow_pickle=False) as table:
        missing = [name for name in ("images", "labels", "writers") if name not in table]
        if missing:
            raise ValueError(
                f"data.path: {file} has no {missing[0]!r}; femnist expects images, labels, writers"
            )
        return _femnist_task(table["images"], table["labels"], table["writers"])


def _femnist_task(images: Array, labels: Array, writers: Array) -> Task:
    if not len(images) == len(labels) == len(writers):
        raise ValueError(
            f"femnist: {len(images)} images, {len(labels)} labels and {len(writers)} writers do "
            "not fit"
        )
    names, numbers = np.unique(writers, return_inverse=True)
    if len(names) < 2:
        raise ValueError(
            "femnist: at least 2 writers are needed, one of them for the test set, not "
            f"{len(names)}"
        )
    order = np.random.default_rng(_WRITER_SEED).permutation(len(names))
    public = np.isin(numbers, order[: max(1, int(_TEST_WRITERS * len(names)))])
    owners = torch.from_numpy(np.unique(numbers[~public], return_inverse=True)[1])
    train = replace(_examples(images[~public], labels[~public]), owners=owners)
    test = _examples(images[public], labels[public])
    return Task("femnist", train, test, SHAPES["femnist"])


def _examples(images: Array, labels: Array) -> Examples:
    """Pixels (n, height, width) or (n, height, width, 3), bytes or in [0, 1], to channels first in
    [0, 1]."""
    pixels = torch.from_numpy(np.array(images))
    if pixels.dtype == torch.uint8:
        pixels = pixels.float().div_(255)
    elif not pixels.is_floating_point() or not bool(((pixels >= 0) & (pixels <= 1)).all()):
        raise ValueError(f"images must be bytes, or floats in [0, 1]; got {images.dtype}")
    if pixels.ndim == 3:
        channels_first = pixels.unsqueeze(1)
    else:
        channels_first = pixels.permute(0, 3, 1, 2).contiguous()
    return Examples(channels_first.float(), torch.from_numpy(np.array(labels, dtype=np.int64)))


def _from_hub(name: str) -> Task:
    train, test = (
        _examples(*_columns(name, _load_split(name, split))) for split in ("train", "test")
    )
    return Task(name, train, test, SHAPES[name])


def _load_split(name: str, split: str) -> Any:
    """A split in the order of the hub. ConnectionError: its message says how to proceed without a
    network."""
    require_extra("flwr_datasets", why=f"data.name={name} without data.path")
    from flwr_datasets import FederatedDataset

    try:
        return FederatedDataset(dataset=_HUB[name][0], partitioners={}, shuffle=False).load_split(
            split
        )
    except OSError as error:
        raise ConnectionError(
            f"{_HUB[name][0]} could not be downloaded from the hub: set data.path"
        ) from error


def _columns(name: str, split: Any) -> tuple[Array, Array]:
    _, image, label = _HUB[name]
    images: Mapping[str, Array] = split.select_columns([image]).with_format("numpy")[:]
    return images[image], np.asarray(split[label][:])


class _CifarUnpickler(pickle.Unpickler):
    """Reads dictionaries, lists, bytes and numpy arrays; refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _CIFAR_GLOBALS:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong in a CIFAR file")
        return _CIFAR_GLOBALS[module, name]


def _read_cifar(file: Path) -> tuple[Array, Array]:
    if not file.is_file():
        raise FileNotFoundError(
            f"data.path: {file.parent} has no {file.name}, which is part of cifar10's "
            "python version"
        )
    try:
        with file.open("rb") as stream:
            batch = _CifarUnpickler(stream, encoding="bytes").load()
        pixels = batch[b"data"]
        labels = batch[b"labels"]
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError) as error:
        raise ValueError(
            f"data.path: {file} is not a batch of CIFAR-10's python version: {error}"
        ) from error
    images = np.asarray(pixels, dtype=np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return images, np.asarray(labels)


def find_idx(folder: Path, name: str) -> Path:
    """The file `name` or `name`.gz in `folder`. FileNotFoundError: its message names the expected
    files and the folder."""
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(f"data.path: neither {name} nor {name}.gz is in {folder}")


def read_idx(path: Path) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The unsigned bytes in an IDX file (a magic number, the dimensions, then bytes), unzipped if
    it ends in .gz.

    Raises ValueError naming the file if it is not IDX, holds another type, is cut short or too
    long.
    """
    try:
        if path.suffix == ".gz":
            content = gzip.decompress(path.read_bytes())
        else:
            content = path.read_bytes()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a complete gzip file: {error}") from error
    if len(content) > 3:
        start = 4 + 4 * content[3]
    else:
        start = 4
    if content[:3] != _UNSIGNED_BYTES or len(content) < start:
        raise ValueError(
            f"{path} is not an IDX file of unsigned bytes: it starts with "
            f"{content[:start].hex(' ')}"
        )
    shape = tuple(int(size) for size in np.frombuffer(content[4:start], dtype=">u4"))
    if len(content) - start != math.prod(shape):
        raise ValueError(
            f"{path} should hold {math.prod(shape)} bytes for shape {shape}, not "
            f"{len(content) - start}"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)
