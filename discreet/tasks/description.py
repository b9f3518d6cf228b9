"""`data.toml`, which says what the data in a folder are: its keys are in the head of `discreet/tasks/folder.py`."""

from __future__ import annotations

import difflib
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from discreet.privacy.rules.objective import PADDING
from discreet.tasks.targets import CLASS, LABELS, NUMBERS, SEQUENCES, FolderError, Target

DESCRIPTION = "data.toml"
FORMATS = ("csv", "parquet", "npz", "idx")
_REQUIRED = ("format", "file")
_TEXTS = (*_REQUIRED, "target", "test", "test_target", "owner", "model")
Bound = float | tuple[float, ...]
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class DataDescription:
    """What `data.toml` says: see the head of `discreet/tasks/folder.py`."""

    format: str
    file: str
    target: str | None = None
    targets: tuple[str, ...] = ()
    target_low: float | tuple[float, ...] | None = None
    target_high: float | tuple[float, ...] | None = None
    inputs: str | tuple[str, ...] | None = None
    low: float | tuple[float, ...] | None = None
    high: float | tuple[float, ...] | None = None
    classes: tuple[str, ...] = ()
    task: str | None = None
    test: str | None = None
    test_target: str | None = None
    num_classes: int | None = None
    shape: tuple[int, ...] | None = None
    owner: str | None = None
    model: str | None = None
    tokens: int | None = None
    padding: int | str | None = None
    next_token: bool = False

    def __post_init__(self) -> None:
        if self.format not in FORMATS:
            raise FolderError(f"format must be one of {', '.join(FORMATS)} (got {self.format!r})")
        _check_range("low", self.low, self.high)
        _check_range("target_low", self.target_low, self.target_high)
        self._check_tokens()
        if not self.next_token and (self.target is None) == (not self.targets):
            raise FolderError("target or targets must be given, and not both")
        self._check_classes()
        sizes = self.shape or ()
        if not isinstance(sizes, tuple) or not all(isinstance(size, int) and size > 0 for size in sizes):
            raise FolderError(f"shape must be a list of whole numbers above 0 (got {self.shape!r})")

    def _check_classes(self) -> None:
        if any(not isinstance(name, str) for name in (*self.classes, *self.targets)):
            raise FolderError("classes and targets must be lists of texts; classes that are numbers need none")
        if self.num_classes is not None and self.classes:
            raise FolderError("num_classes and classes are both given: give one")
        if self.num_classes is not None and not (isinstance(self.num_classes, int) and self.num_classes > 1):
            raise FolderError(f"num_classes must be a whole number of at least 2 (got {self.num_classes!r})")
        several = self.targets and self.padding is None
        if (self.num_classes or self.classes) and (several or self.target_low is not None):
            raise FolderError("classes and num_classes are of a single target, and go with neither targets nor a range")

    def _check_tokens(self) -> None:
        """The keys of sequences."""
        if self.tokens is not None and not (type(self.tokens) is int and self.tokens > 1 and self.low is None):
            raise FolderError(
                f"tokens must be a whole number of at least 2, without low and high (got {self.tokens!r})"
            )
        kind, rule = (str, "a text that is none of classes") if self.classes else (int, "a whole number")
        if self.padding is not None and (type(self.padding) is not kind or self.padding in self.classes):
            raise FolderError(f"padding must be {rule} (got {self.padding!r})")
        if not isinstance(self.next_token, bool):
            raise FolderError(f"next_token must be true or false (got {self.next_token!r})")
        others = (self.target, self.targets, self.classes, self.num_classes, self.target_low, self.test_target)
        if self.next_token and (self.tokens is None or any(others)):
            raise FolderError("next_token needs tokens, and goes without a target, classes and a range")

    @property
    def target_names(self) -> tuple[str, ...]:
        """The columns or arrays of what is predicted."""
        return self.targets if self.target is None else (self.target,)  # none with next_token

    @property
    def class_count(self) -> int:
        """How many classes there are; 0 if it does not say."""
        return self.num_classes or len(self.classes) or (self.tokens or 0 if self.next_token else 0)

    @property
    def mark(self) -> int:
        """Which number among targets is padding, after words have become numbers."""
        return self.padding if isinstance(self.padding, int) else PADDING

    def predicted(self, targets: Array) -> Target:
        """What is predicted, for the task that the folder describes, of which `targets` are an example."""
        if self.next_token or self.padding is not None:
            if targets.ndim != 2 or not targets.shape[1]:
                raise FolderError(
                    f"{self.file}: targets of sequences must be of shape (n, length), not {targets.shape}"
                )
            return Target(SEQUENCES, length=targets.shape[1])
        if self.target_low is None or self.target_high is None:
            return Target(LABELS, self.targets) if self.targets else CLASS
        low, high = (_for_each(bound, len(self.target_names)) for bound in (self.target_low, self.target_high))
        return Target(NUMBERS, self.target_names, low, high)


def _check_range(name: str, low: Bound | None, high: Bound | None) -> None:
    names = f"{name} and {name.replace('low', 'high')}"
    if (low is None) != (high is None):
        raise FolderError(f"{names} must be given together")
    if low is not None and high is not None:
        lows, highs = np.asarray(low, float), np.asarray(high, float)
        if len({lows.size, highs.size} - {1}) > 1:
            raise FolderError(f"{names} must be one number, or equally many")
        if not np.all(highs > lows):
            raise FolderError(f"{name.replace('low', 'high')} must be above {name} (got {high} and {low})")


def _for_each(bound: Bound, count: int) -> tuple[float, ...]:
    values = tuple(map(float, bound)) if isinstance(bound, tuple) else (float(bound),) * count
    if len(values) != count:
        raise FolderError(f"target_low and target_high must be one number or {count} of them")
    return values


def read_description(folder: Path) -> DataDescription:
    """`data.toml` of a folder.

    Raises:
      FolderError: it is missing, is not TOML, or has a key that is unknown, missing, or of the wrong kind.
    """
    path = folder / DESCRIPTION
    try:
        settings = tomllib.loads(path.read_text())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FolderError(f"{path} is missing: it says in which file the data are, and in which form") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FolderError(f"{path} is not TOML: {error}") from error
    known = [field.name for field in fields(DataDescription)]
    for key in settings:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            raise FolderError(f"{path} has an unknown key {key}" + (f"; did you mean {close[0]}?" if close else ""))
    for key in _TEXTS:
        if not isinstance(settings.get(key, None if key in _REQUIRED else ""), str):
            raise FolderError(f"{path} must give {key} as a text")
    try:
        values: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in settings.items()}
        return DataDescription(**values)
    except (TypeError, ValueError) as error:
        raise FolderError(f"{path}: {error}") from error
