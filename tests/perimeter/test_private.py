"""What holds people's values before their noise can't be printed."""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import pkgutil
from collections.abc import Iterator

import pytest
import torch

from discreet.data.encoding import Reading
from discreet.data.examples import Examples
from discreet.mechanisms.sums import CohortSum, PartialReply, UpdateRows
from discreet.node.client import ExactReply
from discreet.privacy.clipping import ClippedSum
from discreet.privacy.private import Private
from discreet.protocol.messages import TrainReply
from discreet.training.units import Drawn

ROOMS = (
    "data", "privacy", "protocol", "training", "mechanisms", "node", "dpsgd", "simulation", "guard"
)  # fmt: skip
# Tensors of these are released, public or random, or what holds private values hides them itself.
PUBLIC = {
    "Reading": "its text is an address: an exported model, which has no Discreet, reads cells by it",
    "Task": "its examples hide themselves; its test set is public",
    "BlockWork": "the places of parameters in a vector",
    "StateInMemory": "noise that was drawn, a secret of the run and nobody's value",
    "RoundStart": "the released model",
    "Released": "after the noise",
    "UnopenedSum": "a function that opens a noised sum",
    "Client": "its examples hide themselves",
    "MaskedWork": "a request, and a client, whose examples hide themselves",
    "TrainedExamples": "its examples hide themselves",
    "Engine": "its examples hide themselves",
    "OptimizerState": "of noised steps",
    "Activation": "two functions",
    "Admitted": "a function that makes tensors",
    "ClientRound": "a function that makes tensors",
}
VALUE = 0.123456


def classes() -> Iterator[type]:
    """The dataclasses of these rooms that have a tensor, an array or a table of examples."""
    for room in ROOMS:
        package = importlib.import_module(f"discreet.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if module.name == "discreet.privacy.chacha_kernel":  # functions, which need Triton
                continue
            for each in vars(importlib.import_module(module.name)).values():
                if isinstance(each, type) and dataclasses.is_dataclass(each):
                    types = " ".join(str(field.type) for field in dataclasses.fields(each))
                    if each.__module__ == module.name and any(
                        word in types for word in ("Tensor", "Array", "ndarray", "Examples")
                    ):
                        yield each


def test_what_holds_a_tensor_hides_it_or_is_said_to_be_public() -> None:
    found = {each.__name__: each for each in classes()}
    shown = {name for name, each in found.items() if not issubclass(each, Private)}
    assert shown == set(PUBLIC)
    assert Reading.__repr__ is object.__repr__
    hidden = [each for each in found.values() if issubclass(each, Private)]
    assert all(each.__repr__ is Private.__repr__ for each in hidden)
    assert len(hidden) >= 15


def made() -> list[object]:
    """One of each kind that travels between functions."""
    row = torch.full((3,), VALUE)
    summed = ClippedSum(3, 1.0)
    summed.add(row.unsqueeze(0))
    examples = Examples(row.unsqueeze(0), row.unsqueeze(0))
    return [
        examples,
        TrainReply(1, row, True, answer=row),
        PartialReply(row.double(), 1, 1, 1.0),
        UpdateRows(row.unsqueeze(0), torch.tensor([True])),
        ExactReply(row, True, row),
        summed,
        CohortSum(summed, below=1),
        Drawn(torch.tensor([123456]), torch.tensor([123456])),
        [examples],
        {"rows": examples},
    ]


@pytest.mark.parametrize("given", made(), ids=lambda given: type(given).__name__)
def test_a_line_that_is_given_a_private_value_tells_nothing(
    given: object, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        logging.getLogger("discreet").info("got %s and %r", given, given)
    said = f"{given} {given!r} {caplog.text} {ValueError(given)!r}"
    assert not any(word in said for word in ("tensor", "True", "below", "0.1"))
    with pytest.raises(TypeError):
        json.dumps(given)
