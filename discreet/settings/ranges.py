"""The types of settings, each with its range: the annotations of sections."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, Field, GetCoreSchemaHandler

from discreet.privacy.quantile import LARGEST_NUMBER, LEAST_NUMBER

T = TypeVar("T")


class Rule:
    """A rule for a value, in words and as a test; of an annotation. `names` are proposed for a misspelt value."""

    def __init__(self, words: str, holds: Callable[[Any], bool], names: tuple[str, ...] = ()) -> None:
        self.words, self.holds, self.names = words, holds, names

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return AfterValidator(self._kept).__get_pydantic_core_schema__(source, handler)

    def _kept(self, value: T) -> T:
        if not self.holds(value):
            raise ValueError(self.words)
        return value


def one_of(*names: str) -> Rule:
    """The rule that a value is one of the names."""
    return Rule(f"one of {', '.join(names)}", lambda value: value in names, names)


def at_least(least: int) -> Rule:
    """The rule that a whole number is not too small."""
    return Rule(f"at least {least}", lambda value: least <= value)


def within(least: float, largest: float) -> Rule:
    """The rule that a number lies in a closed interval."""
    return Rule(f"within [{least:g}, {largest:g}]", lambda value: least <= value <= largest)


def list_of(each: Rule, one: str) -> Rule:
    """The rule that a list has at least one number, and each keeps a rule."""
    words = f"a list of numbers {each.words}, one a {one}"
    return Rule(words, lambda values: bool(values) and all(map(each.holds, values)))


def different(*names: str) -> Rule:
    """The rule that a list has at least one of the names, and none twice."""
    words = f"a list of different names of {', '.join(names)}"
    return Rule(words, lambda given: bool(given) and set(given) <= set(names) and len(set(given)) == len(given))


# Numbers that float32 bears: a server can't hide a gradient below the smallest float, or behind the largest.
POSITIVE = within(LEAST_NUMBER, LARGEST_NUMBER)
FINITE = within(-LARGEST_NUMBER, LARGEST_NUMBER)
Positive = Annotated[float, POSITIVE]
NotNegative = Annotated[float, Rule(f"0 or {POSITIVE.words}", lambda value: value == 0 or POSITIVE.holds(value))]
Finite = Annotated[float, FINITE]
OpenShare = Annotated[float, Rule("within (0, 1)", lambda value: 0 < value < 1)]
Probability = Annotated[float, Rule("within (0, 1]", lambda value: 0 < value <= 1)]
LearningRate = Annotated[float, within(LEAST_NUMBER, 1e4)]  # far beyond 1e4 a model overflows in its first round
Momentum = Annotated[float, Rule("within [0, 1)", lambda value: 0 <= value < 1)]
Count = Annotated[int, at_least(1)]
CountOrZero = Annotated[int, at_least(0)]
Text = Annotated[str, Field(strict=False)]  # on a command line 2024 is a number, and a folder's name
Sampling = Annotated[str, one_of("poisson", "fixed", "everyone", "cyclic")]
