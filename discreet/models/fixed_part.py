"""The frozen first part of a model: its features are computed once, and the rest learns.

A model says which part that is: the first layers of an `nn.Sequential`, or the attribute `features`
of a model that gives head(features(x)). Made-up examples show if it is so.

Features are as private as the examples, and stay on the same machine: in memory, or if they are
large in an unnamed file, which vanishes with the process. At a node, where each message has its own
process, they are files in a folder that its SuperNode makes, and erases when it ends (`FEATURES`).
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from discreet.data.examples import Examples
from discreet.models.models import (
    MISTAKES,
    bytes_of,
    dropout_layers,
    frozen_digest,
    is_partly_fixed,
    to_train,
)
from discreet.per_example.attributes import put_back
from discreet.per_example.objective import trainable
from discreet.per_example.own_code import memory_for
from discreet.per_example.perceptron import unchanged
from discreet.per_example.trial import differ, made_up, same_chance

logger = logging.getLogger("discreet.client")

MEMORY = 2**30  # most bytes of features that are held in memory; more are in a file
_EVERY = 10.0  # seconds between two lines on the progress
# Numbers of made-up examples on which the parts are tried, and the widths of their floats around 0:
# a forward may treat negative or large inputs or features otherwise. None: floats from 0 to 1.
_TRIALS = ((7, None), (5, 20.0), (6, 2000.0))
_AGREEMENT = 1e-5  # the tolerance of the outputs
_APART = 1e-3  # the tolerance of features of one example, as a share of the largest of all
_HELD_BY_ALL = frozenset(vars(nn.Module()))  # attributes that are no settings of a layer

# The parts of a model, or None if its frozen part is computed at each step.
_parts: WeakKeyDictionary[nn.Module, tuple[nn.Module, nn.Module] | None] = WeakKeyDictionary()
_held: dict[str, Tensor] = {}  # features by the digest of their sources, the latest last


def behind_fixed(model: nn.Module, examples: Examples) -> tuple[nn.Module, Examples]:
    """The learning part of a model, and the examples as it reads them; both unchanged if the model
    does not begin with a frozen part. The parts share their parameters with the model, which is
    then in training mode."""
    fixed, learned = split_fixed(model, examples.inputs)
    if fixed is None:
        return model, examples
    try:
        return learned, features_of(fixed, examples)
    except (*MISTAKES, OSError) as error:
        logger.warning("the features of the frozen part are recomputed at each step: %s", error)
        return model, examples


def split_fixed(model: nn.Module, inputs: Tensor) -> tuple[nn.Module | None, nn.Module]:
    """The frozen first part of a model, and the rest. The first part is None if there is none, or
    if it must be computed at each step; the log then has the reason. Only the shape and type of the
    inputs are used."""
    if not is_partly_fixed(model):
        return None, model
    if model not in _parts:
        try:
            _parts[model] = _tried(model, inputs)
        except MISTAKES as error:
            logger.info("the frozen part is computed at each step: %s", error)
            _parts[model] = None
    return _parts[model] or (None, model)


def _tried(model: nn.Module, inputs: Tensor) -> tuple[nn.Module, nn.Module]:
    """The parts of a model, tried on made-up examples. Raises ValueError with the reason if they
    are not the model, and any error of a forward."""
    to_train(model)
    fixed, learned = _named(model)
    if not any(_works(layer) for layer in fixed.modules()):
        raise ValueError("no frozen layer that multiplies matrices comes first")
    if list(map(id, trainable(learned))) != list(map(id, trainable(model))):
        raise ValueError("the model has trained parameters outside its head")
    for kind, (count, width) in enumerate(_TRIALS):
        some = made_up(model, inputs, count, kind=kind).to(_device_of(fixed))
        if width and some.is_floating_point():
            some = (some - 0.5) * width
        with put_back(model.modules(), memory_for(model.modules())):
            _try(model, fixed, learned, some)
    return fixed, learned


def _try(model: nn.Module, fixed: nn.Module, learned: nn.Module, some: Tensor) -> None:
    """Raises ValueError with the reason if the parts are not the model on some examples."""
    from discreet.models.rows_apart import rows_apart

    with torch.enable_grad():
        rows = fixed(some)
    if not isinstance(rows, Tensor) or rows.dtype != torch.float32 or len(rows) != len(some):
        raise ValueError("its features are not one row of float32 an example")
    if rows.requires_grad:
        raise ValueError("its features depend on a trained parameter")
    if differ(rows, rows_apart(fixed, some), _APART):
        raise ValueError("its features of an example depend on others")
    # The head first: the model's forward may leave it what it needs.
    with torch.no_grad(), same_chance(some.device):
        found = learned(rows)
    with torch.no_grad(), same_chance(some.device):
        wanted = model(some)
    if not torch.allclose(found, wanted, rtol=_AGREEMENT, atol=_AGREEMENT, equal_nan=True):
        raise ValueError("head(features(x)) has other values than the model")


def _named(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """The two parts that a model names. Raises ValueError if it names none, or if the first is not
    wholly frozen."""
    if type(model) is nn.Sequential and unchanged(model):
        count = len(list(takewhile(_is_fixed, model)))
        return model[:count], model[count:]
    fixed = getattr(model, "features", None)
    learned = getattr(model, "head", None)
    if not isinstance(fixed, nn.Module) or not isinstance(learned, nn.Module):
        raise ValueError("the model is no nn.Sequential and has no layers `features` and `head`")
    if not _is_fixed(fixed):
        raise ValueError("a layer of its features is trained, draws masks or has a hook")
    return fixed, learned


def _is_fixed(layer: nn.Module) -> bool:
    """True if a layer and those in it behave as their classes, learn nothing and draw no masks."""
    draws = any(part.training for part in dropout_layers(layer))
    return all(map(unchanged, layer.modules())) and not trainable(layer) and not draws


def _works(layer: nn.Module) -> bool:
    """True if a layer holds a matrix, other than a mere embedding table."""
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        return False
    held = (*layer._parameters.values(), *layer._buffers.values())
    return any(value is not None and value.dim() > 1 for value in held)


@torch.no_grad()
def features_of(fixed: nn.Module, examples: Examples, *, batch_size: int = 256) -> Examples:
    """The examples as the learning part of a model reads them, on the CPU. They are computed once
    for the same frozen values and inputs, on the device of the fixed part. Raises ValueError: an
    example takes another path through the model than others; OSError: there is no room for a file
    of features."""
    inputs = examples.inputs
    digest = hashlib.sha256()
    # A bundle with other code, whose forward may differ, is in another file.
    layers = f"{fixed} {_settings_of(fixed)} {frozen_digest(fixed)}"
    digest.update(f"{__file__} {layers} {inputs.dtype} {tuple(inputs.shape)}".encode())
    digest.update(bytes_of(inputs))
    key = digest.hexdigest()
    if (found := _held.pop(key, None)) is None:
        found = _computed(fixed, inputs, key, batch_size)
    _held[key] = found
    while len(_held) > 1 and sum(value.nbytes for value in _held.values()) > MEMORY:
        _held.pop(next(iter(_held)))
    return replace(examples, inputs=found)


def _settings_of(fixed: nn.Module) -> list[str]:
    """The buffers and attributes of layers, and the files of their classes, as text: forwards may
    read them, and the text of a layer need not have them."""
    found = [f"{name} {_text_of(value)}" for name, value in fixed.named_buffers()]
    for name, layer in fixed.named_modules():
        found.append(f"{name} {getattr(sys.modules.get(type(layer).__module__), '__file__', '')}")
        for key, value in sorted(vars(layer).items()):
            if key not in _HELD_BY_ALL:
                leaves, shape = tree_flatten(value)
                found.append(f"{name}.{key} {shape} {[*map(_text_of, leaves)]}")
    return found


def _text_of(value: Any) -> str:
    """An attribute as text, the same in each process."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {hashlib.sha256(bytes_of(value)).hexdigest()}"
    if isinstance(value, set | frozenset):
        return str(sorted(map(_text_of, value)))
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _device_of(fixed: nn.Module) -> torch.device:
    return next(iter((*fixed.parameters(), *fixed.buffers()))).device


def _computed(fixed: nn.Module, inputs: Tensor, key: str, batch_size: int) -> Tensor:
    from discreet.settings.training import FEATURES

    folder = os.environ.get(FEATURES)
    if folder:
        kept = Path(folder, f"{key}.npy")
    else:
        kept = None
    if kept is not None and kept.exists():
        return torch.from_numpy(np.load(kept, mmap_mode="r+"))
    unfinished = kept and kept.with_suffix(f".{os.getpid()}")
    device = _device_of(fixed)
    to_train(fixed)
    logger.info("the features of %d examples are computed once", len(inputs))
    table = None
    done = 0
    said = time.monotonic()
    for part in torch.split(inputs, batch_size):
        rows = _features(fixed, part.to(device)).cpu()
        if table is None:
            table = _table((len(inputs), *rows.shape[1:]), unfinished)
        table[done : done + len(rows)] = rows
        done += len(rows)
        if time.monotonic() - said > _EVERY:
            logger.info("features of %d of %d examples", done, len(inputs))
            said = time.monotonic()
    if kept and unfinished:
        unfinished.rename(kept)
    assert table is not None
    return table


def _features(fixed: nn.Module, inputs: Tensor) -> Tensor:
    """The features of examples, (n, ...); NaN for one that has none, which then counts as lost."""
    from discreet.models.rows_apart import rows_apart

    try:
        return rows_apart(fixed, inputs, keeps=True)
    except Exception as error:  # noqa: BLE001 - of a model that a site may have written
        logger.error("features can't be computed together: %s", error)
    found = list[Tensor | None]()
    for row in torch.split(inputs, 1):
        with suppress(Exception):
            found.append(rows_apart(fixed, row, keeps=True))
            continue
        found.append(None)
    known = [each for each in found if each is not None]
    if not known:
        raise ValueError("no example has features")
    lost = torch.full_like(known[0], torch.nan)
    return torch.cat([lost if each is None else each for each in found])


def _table(shape: tuple[int, ...], path: Path | None) -> Tensor:
    """An empty table for features: in a file of a node's folder; otherwise in memory, or if it is
    large in an unnamed file."""
    if path is None and 4 * torch.Size(shape).numel() <= MEMORY:
        return torch.empty(shape)
    with tempfile.TemporaryDirectory(prefix="discreet-") as folder:
        path = path or Path(folder, "features.npy")
        table = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
        with path.open("r+b") as file:
            # A full disk is an error now instead of a crash later.
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return torch.from_numpy(table)
