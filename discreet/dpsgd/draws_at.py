"""Draws at one share of their range, as a trial repeats them: what a model does with a number that
is drawn by chance must not depend on how far its example was padded, whatever the number is."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from discreet.layers.functions import by_name
from discreet.per_example.trial import Undrawn

_NORMAL = ("randn", "randn_like", "normal", "normal_")
_MOST = 2**20  # of a whole number that is drawn without a bound
_FEW = 4  # of one that is not drawn from a range
_SLOPE = 1e-12  # from one number of a result to the next
_LOW = ("low", "from")
_HIGH = ("high", "to")


class DrawsAt(Undrawn):
    """A context in which what is drawn are the numbers at a share of what is possible: of a range,
    of the probabilities of `multinomial`, of the order of `randperm`.

    Attributes:
      share: above 0 and below 1.
      rising: True if the real numbers of a result rise a little, from its first to its last, so
        that an order by them is that of their places; else they fall.
      is_used: True after a draw.
    """

    def __init__(self, share: float, *, rising: bool = True) -> None:
        super().__init__()
        self.share = share
        self.rising = rising
        self.is_used = False

    def drawn(self, result: Tensor, name: str, args: Any, named: Any) -> Tensor:
        self.is_used = True
        if name in _EACH:
            return _EACH[name](self.share, result, args, named)
        if name in _NORMAL:
            result.copy_(_normal(self.share, name, args, named))
        else:
            low, high = _bounds(args[1:], named, 1.0) if name == "uniform_" else (0.0, 1.0)
            result.fill_(low + self.share * (high - low))
        if result.dtype == torch.float64:
            ranks = torch.arange(result.numel(), dtype=torch.float64, device=result.device)
            result.add_(ranks.reshape(result.shape), alpha=_SLOPE if self.rising else -_SLOPE)
        return result


def _normal(share: float, name: str, args: Any, named: Any) -> Tensor:
    """Numbers of a mean and a standard deviation, which may be tensors; () if they are none."""
    given = {}
    if name in ("normal", "normal_"):
        given = by_name(("mean", "std"), args[1:] if name == "normal_" else args, named)
    spread = given.get("std", 1.0) * NormalDist().inv_cdf(share)
    return torch.as_tensor(given.get("mean", 0.0) + spread)


def _chance(share: float, result: Tensor, args: Any, named: Any) -> Tensor:
    """Ones where the chance, p or else the first argument, is above the share."""
    given = by_name(("input", "p"), args, named)
    chance = given["p"] if "p" in given else given["input"]
    return result.copy_(torch.as_tensor(chance) > share)


def _chance_into(share: float, result: Tensor, args: Any, named: Any) -> Tensor:
    given = {"p": 0.5} | by_name(("self", "p"), args, named)
    return _chance(share, result, (), given)


def _whole(share: float, result: Tensor, args: Any, named: Any) -> Tensor:
    low, high = _bounds(args, named, _MOST)
    return result.fill_(low + math.floor(share * (high - low)))


def _whole_into(share: float, result: Tensor, args: Any, named: Any) -> Tensor:
    """As `_whole`, of a function whose first argument is a tensor."""
    return _whole(share, result, args[1:], named)


def _bounds(args: Any, named: Any, otherwise: float) -> tuple[Any, Any]:
    """The lower and the upper bound among the arguments of a function."""
    given = [named[key] for key in _LOW if key in named]
    given += [each for each in args if not isinstance(each, tuple | list)][:2]
    given += [named[key] for key in _HIGH if named.get(key) is not None]
    given = given or [otherwise]
    return (0, given[0]) if len(given) == 1 else (given[0], given[1])


def _of_weights(share: float, result: Tensor, args: Any, named: Any) -> Tensor:
    weights = by_name(("input",), args, named)["input"].double().cumsum(-1)
    place = (weights <= share * weights[..., -1:]).sum(-1, keepdim=True)
    return result.copy_(place.expand_as(result))


def _order(share: float, result: Tensor, _args: Any, _named: Any) -> Tensor:
    backwards = torch.arange(len(result)).flip(0)
    return result.copy_(backwards.roll(-math.floor(share * len(result))))


def _count(share: float, result: Tensor, args: Any, named: Any) -> Tensor:
    rate = by_name(("input",), args, named)["input"]
    return result.copy_((_FEW * share * rate).floor())


def _trials(share: float, result: Tensor, _args: Any, _named: Any) -> Tensor:
    return result.fill_(1 + math.floor(_FEW * share))


def _successes(share: float, result: Tensor, args: Any, named: Any) -> Tensor:
    given = by_name(("count", "prob"), args, named)
    most = share * (given["count"] + 1)
    return result.copy_((most * (given["prob"] > 0)).floor())


def _of_shapes(share: float, result: Tensor, args: Any, _named: Any) -> Tensor:
    """Of Gamma and Dirichlet distributions, by their parameters."""
    return result.copy_(2 * share * args[0])


_EACH: dict[str, Callable[[float, Tensor, Any, Any], Tensor]] = {
    "bernoulli": _chance,
    "bernoulli_": _chance_into,
    "randint": _whole,
    "randint_like": _whole_into,
    "random_": _whole_into,
    "multinomial": _of_weights,
    "randperm": _order,
    "poisson": _count,
    "_standard_gamma": _of_shapes,
    "_sample_dirichlet": _of_shapes,
    "geometric_": _trials,
    "binomial": _successes,
}
