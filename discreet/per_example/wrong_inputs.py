"""Messages for inputs and targets that a model or its loss can't take: an error of PyTorch from
inside a pass names neither."""

from __future__ import annotations

import re
from contextlib import suppress

import torch
from torch import Tensor, nn

from discreet.layers.refusals import CONFUSED
from discreet.per_example.objective import (
    PADDING,
    Objective,
    Tree,
    batches_in,
    cross_entropy,
    rows_of,
)
from discreet.per_example.trial import floats_in

_TYPES = re.compile("dtype|scalar type|[Ii]nput type")
_SHAPES = re.compile("target tensor expected|Dimension out of range")
_CLASS = re.compile(r"(?:Target|index) (-?\d+) is out of bounds(?:.* with size (\d+))?")
_TO = {torch.float32: "float()", torch.float64: "double()", torch.int64: "long()"}


def explain(error: BaseException, objective: Objective, inputs: Tree, targets: Tree) -> None:
    """Raises a ValueError that names the inputs or targets, the range, and what to do, if their
    wrong types or values caused the error."""
    if not isinstance(error, CONFUSED):
        return
    said = str(error)
    words = ""
    if _TYPES.search(said):
        words = _of_types(objective, inputs, targets, said)
    elif found := _CLASS.search(said):
        words = _of_classes(objective, (inputs, targets), int(found[1]), found[2])
    elif objective.loss is cross_entropy and _SHAPES.search(said):
        words = _of_shapes(objective, inputs, targets)
    elif "index out of range in self" in said:
        words = _of_tables(objective, inputs)
    if words:
        raise ValueError(words) from error


def _of_types(objective: Objective, inputs: Tree, targets: Tree, said: str) -> str:
    if "target" in said or "scalar type Long" in said:
        if isinstance(targets, Tensor) and targets.dtype != torch.int64:
            return f"targets are {_name(targets.dtype)}, class numbers int64: targets.long()"
        return ""
    of_tables = "indices" in said
    wanted = torch.int64 if of_tables else objective.parameters[0].dtype
    kind = "the numbers of an embedding" if of_tables else "the model"
    given = _tensors(inputs)
    wrong = [value for value in given if value.is_floating_point() and value.dtype != wanted]
    if not wrong and len(given) == 1 and not of_tables:
        wrong = [value for value in given if value.dtype != wanted]
    if not wrong:
        return ""
    change = _TO.get(wanted, f"to({wanted})")
    return f"inputs are {_name(wrong[0].dtype)} and {kind} {_name(wanted)}: inputs.{change}"


def _of_classes(
    objective: Objective, batch: tuple[Tree, Tree], wrong: int, size: str | None
) -> str:
    inputs, targets = batch
    if not isinstance(targets, Tensor) or not bool((targets == wrong).any()):
        return ""
    if size is None:
        classes = _classes(objective, inputs, targets)
    else:
        classes = int(size)
    if not classes or 0 <= wrong < classes:
        return ""
    return (
        f"targets must be in 0..{classes - 1} for a model of {classes} outputs, or {PADDING}, "
        f"which counts nothing; got {wrong}: number the classes from 0, or give the model more"
    )


def _classes(objective: Objective, inputs: Tree, targets: Tensor) -> int:
    """The number of outputs for each target; 0 if it is not known."""
    floats: list[Tensor] = []
    with suppress(*CONFUSED), torch.no_grad(), objective.put_back():
        floats = floats_in(objective.outputs(rows_of(inputs, [0])))
    if len(floats) != 1 or (floats[0].shape[2:] != targets.shape[1:]):
        return 0
    return floats[0].shape[1]


def _of_shapes(objective: Objective, inputs: Tree, targets: Tree) -> str:
    if not isinstance(targets, Tensor) or targets.dim() < 2:
        return ""
    return (
        f"targets are {tuple(targets.shape)}, and cross-entropy takes class numbers, "
        f"({len(targets)},) or one for each position: targets.squeeze(1), targets.argmax(1), or "
        "another loss"
    )


def _of_tables(objective: Objective, inputs: Tree) -> str:
    kinds = (nn.Embedding, nn.EmbeddingBag)
    tables = {part.num_embeddings for part in objective.modules if isinstance(part, kinds)}
    if len(tables) != 1:
        return ""
    size = tables.pop()
    for value in _tensors(inputs):
        outside = value[(value < 0) | (value >= size)]
        if not value.is_floating_point() and len(outside):
            return (
                f"inputs must be in 0..{size - 1}, the rows of the embedding, got "
                f"{int(outside[0])}: give it more (num_embeddings), or replace unknown numbers"
            )
    return ""


def _tensors(inputs: Tree) -> list[Tensor]:
    """The tensors of a batch; not those of graphs."""
    return [value for value in batches_in(inputs) if isinstance(value, Tensor)]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
