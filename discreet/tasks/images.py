"""Image data sets, from local files or through flwr-datasets from the hub.

Pixels are divided by 255 and nothing more: a mean or a deviation taken from the clients' data would be a
release without an account.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from discreet.tasks.examples import Examples, Task
from discreet.tasks.idx import find_idx, read_idx

Array = np.ndarray[Any, Any]

# Writers whose examples make up the public test set of FEMNIST. Whole writers, so that nobody is both public
# and protected; chosen by a fixed draw, the same in every run.
_TEST_WRITERS = 0.1
_WRITER_SEED = 40961
_CIFAR_TRAIN_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
# A pickle can call anything; these are all that the CIFAR files need. Old numpy called its core numpy.core.
_CIFAR_GLOBALS = {
    ("numpy.core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


@dataclass(frozen=True)
class _Hub:
    """Where the hub keeps a data set, and what its columns are called."""

    repository: str
    image: str
    label: str


_MNIST = _Hub("ylecun/mnist", "image", "label")
_FASHION_MNIST = _Hub("zalando-datasets/fashion_mnist", "image", "label")
_CIFAR10 = _Hub("uoft-cs/cifar10", "img", "label")
_FEMNIST = _Hub("flwrlabs/femnist", "image", "character")


def load_mnist(path: str | None) -> Task:
    """MNIST: 60000 and 10000 images (1, 28, 28) in [0, 1], 10 classes.

    `path` is a folder with the four IDX files under their standard names, with or without .gz; None loads
    ylecun/mnist from the hub.
    """
    return _idx_task("mnist", path, _MNIST)


def load_fashion_mnist(path: str | None) -> Task:
    """Fashion-MNIST: 60000 and 10000 images (1, 28, 28) in [0, 1], 10 classes; `path` as for MNIST."""
    return _idx_task("fashion_mnist", path, _FASHION_MNIST)


def load_cifar10(path: str | None) -> Task:
    """CIFAR-10: 50000 and 10000 images (3, 32, 32) in [0, 1], 10 classes.

    `path` is the folder of the "python version", with data_batch_1 to data_batch_5 and test_batch; the
    pickles are read with nothing but numpy arrays allowed in them. None loads uoft-cs/cifar10 from the hub.
    """
    if path is None:
        return _image_task("cifar10", _from_hub(_CIFAR10, "train"), _from_hub(_CIFAR10, "test"))
    folder = Path(path).expanduser()
    train = [_read_cifar(folder, name) for name in _CIFAR_TRAIN_FILES]
    images, labels = (np.concatenate(parts) for parts in zip(*train, strict=True))
    return _image_task("cifar10", (images, labels), _read_cifar(folder, "test_batch"))


def load_femnist(path: str | None) -> Task:
    """FEMNIST: digits and letters, images (1, 28, 28) in [0, 1], 62 classes, with the writers as owners.

    A tenth of the writers, fixed and at least one, are the public test set; the others are numbered from 0 in
    sorted order. `path` is an .npz file with `images` (n, 28, 28), bytes or floats in [0, 1], `labels` (n,)
    and `writers` (n,); None loads flwrlabs/femnist from the hub (814 000 images, 2.6 GB of memory).
    """
    if path is None:
        split = _load_split(_FEMNIST, "train")
        images, labels = _columns(split, _FEMNIST)
        return _femnist_task(images, labels, np.asarray(split["writer_id"][:]))
    file = Path(path).expanduser()
    if not file.is_file():
        raise FileNotFoundError(f"data.path: no file {file}; femnist expects an .npz of images, labels, writers")
    with np.load(file, allow_pickle=False) as table:
        missing = [name for name in ("images", "labels", "writers") if name not in table]
        if missing:
            raise ValueError(f"data.path: {file} has no {missing[0]!r}; femnist expects images, labels, writers")
        return _femnist_task(table["images"], table["labels"], table["writers"])


def _idx_task(name: str, path: str | None, hub: _Hub) -> Task:
    if path is None:
        return _image_task(name, _from_hub(hub, "train"), _from_hub(hub, "test"))
    folder = Path(path).expanduser()
    train, test = (
        (
            read_idx(find_idx(folder, f"{part}-images-idx3-ubyte")),
            read_idx(find_idx(folder, f"{part}-labels-idx1-ubyte")),
        )
        for part in ("train", "t10k")
    )
    return _image_task(name, train, test)


def _image_task(name: str, train: tuple[Array, Array], test: tuple[Array, Array]) -> Task:
    first = _examples(*train)
    return Task(name, first, _examples(*test), num_classes=10, input_shape=tuple(first.inputs.shape[1:]))


def _femnist_task(images: Array, labels: Array, writers: Array) -> Task:
    if not len(images) == len(labels) == len(writers):
        raise ValueError(f"femnist: {len(images)} images, {len(labels)} labels and {len(writers)} writers do not fit")
    names, numbers = np.unique(writers, return_inverse=True)
    if len(names) < 2:
        raise ValueError(f"femnist: at least 2 writers are needed, one of them for the test set, not {len(names)}")
    order = np.random.default_rng(_WRITER_SEED).permutation(len(names))
    public = np.isin(numbers, order[: max(1, int(_TEST_WRITERS * len(names)))])
    train = _examples(images[~public], labels[~public])
    return Task(
        name="femnist",
        train=train,
        test=_examples(images[public], labels[public]),
        num_classes=62,
        input_shape=tuple(train.inputs.shape[1:]),
        owners=torch.from_numpy(np.unique(numbers[~public], return_inverse=True)[1]),
    )


def _examples(images: Array, labels: Array) -> Examples:
    """Pixels (n, height, width) or (n, height, width, 3), bytes or in [0, 1], to channels first in [0, 1]."""
    pixels = torch.from_numpy(np.array(images))
    if pixels.dtype == torch.uint8:
        pixels = pixels.float().div_(255)
    elif not pixels.is_floating_point() or not bool(((pixels >= 0) & (pixels <= 1)).all()):
        raise ValueError(f"images must be bytes, or floats in [0, 1]; got {images.dtype}")
    channels_first = pixels.unsqueeze(1) if pixels.ndim == 3 else pixels.permute(0, 3, 1, 2).contiguous()
    return Examples(channels_first.float(), torch.from_numpy(np.array(labels, dtype=np.int64)))


def _from_hub(hub: _Hub, split: str) -> tuple[Array, Array]:
    return _columns(_load_split(hub, split), hub)


def _load_split(hub: _Hub, split: str) -> Any:
    """A split in its order on the hub; ConnectionError says what to do without a network."""
    from flwr_datasets import FederatedDataset

    try:
        return FederatedDataset(dataset=hub.repository, partitioners={}, shuffle=False).load_split(split)
    except OSError as error:
        raise ConnectionError(
            f"{hub.repository} could not be had from the hub; set data.path to read it from local files"
        ) from error


def _columns(split: Any, hub: _Hub) -> tuple[Array, Array]:
    images: Mapping[str, Array] = split.select_columns([hub.image]).with_format("numpy")[:]
    return images[hub.image], np.asarray(split[hub.label][:])


class _CifarUnpickler(pickle.Unpickler):
    """Reads dictionaries, lists, bytes and numpy arrays, and refuses everything else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _CIFAR_GLOBALS:
            raise pickle.UnpicklingError(f"{module}.{name} does not belong in a CIFAR file")
        return _CIFAR_GLOBALS[module, name]


def _read_cifar(folder: Path, name: str) -> tuple[Array, Array]:
    file = folder / name
    if not file.is_file():
        raise FileNotFoundError(f"data.path: no {name} in {folder}; cifar10 expects the files of its python version")
    try:
        with file.open("rb") as stream:
            batch = _CifarUnpickler(stream, encoding="bytes").load()
        pixels, labels = batch[b"data"], batch[b"labels"]
    except (pickle.UnpicklingError, EOFError, KeyError, TypeError) as error:
        raise ValueError(f"data.path: {file} is not a batch of CIFAR-10's python version: {error}") from error
    images = np.asarray(pixels, dtype=np.uint8).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    return images, np.asarray(labels)
