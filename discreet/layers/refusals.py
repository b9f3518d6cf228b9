"""Errors for a model that is refused, or that takes the slower way."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path

import torch

# Errors that a forward may raise on inputs that it can't handle.
CONFUSED = (TypeError, ValueError, RuntimeError, AttributeError, LookupError, AssertionError)
SCRIPTED = "a scripted module, which vmap can't see into: give it as it was before the script"
FILLING = "filling"
COPYING = "copying"
DERIVING = "deriving"
_HERE = Path(__file__).parent
_HOMES = (str(Path(torch.__file__).parent), str(_HERE), str(_HERE.with_name("per_example")))


class Unserved(Exception):
    """The examples can't run side by side, so they run one after the other."""


class Needs(Unserved):
    """A pass needs to be made again in another way, `need`: `FILLING` if the forward writes what
    differs between examples into a new tensor that they share, `DERIVING` if it takes gradients,
    `COPYING` if a weight that it computes from parameters must be computed for each example."""

    def __init__(self, need: str, reason: str) -> None:
        super().__init__(reason)
        self.need = need


class MixesExamples(ValueError):
    """The forward mixes examples. The message names the call that does."""

    def __init__(self, reason: str) -> None:
        why = "Clipping bounds what one example changes only if each goes through the model alone"
        super().__init__(f"the model's forward mixes examples: {reason}. {why}")


def place() -> str:
    """The nearest line of code outside PyTorch and this folder, in words."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HOMES):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return ""
    return _words(frame.f_code.co_filename, frame.f_lineno)


def place_of_error(error: BaseException) -> str:
    """As `place`, for the line that raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith(_HOMES)]
    lines = [frame for frame in outside if not frame.filename.startswith("<")]
    if lines:
        return _words(lines[-1].filename, lines[-1].lineno or 0)
    return ""


def _words(file: str, line: int) -> str:
    return f" at {Path(file).name}:{line}"
