"""Plain attributes of modules: what a pass leaves there is taken away again, so that it reaches no
other pass.

A clipped sum bounds what an example changes in the gradients, and nothing else. A running maximum,
a queue or a kept mean would carry an example into steps in which it is absent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

_CONTAINERS = (list, dict, set, deque)
_OF_MODULES = frozenset(nn.Module().__dict__)


def _items(container: Any) -> list[Any]:
    if isinstance(container, dict):
        return [*container.keys(), *container.values()]
    return list(container)


def _look(value: Any, copies: bool) -> Callable[[], bool] | None:
    """Tells later whether an object still holds what it holds now; None for one that can't be
    written into."""
    if isinstance(value, Tensor):
        return _look_at_tensor(value, copies)
    if isinstance(value, _CONTAINERS):
        held: Any = value
        before = _items(held)
        inner = [_look_at_tensor(each, copies) for each in before if isinstance(each, Tensor)]
        return lambda: _are_same(_items(held), before) and all(look() for look in inner)
    return None


def _look_at_tensor(value: Tensor, copies: bool) -> Callable[[], bool]:
    version = value._version
    if not copies:
        return lambda: value._version == version
    copy = value.detach().clone()
    return lambda: value._version == version and torch.equal(value.nan_to_num(), copy.nan_to_num())


def _are_same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now, before))


class Attributes:
    """The plain attributes of modules as they were when this was made. `copies`: the values of
    their tensors too, which `tensor.data` changes without a trace."""

    def __init__(self, modules: Iterable[nn.Module], *, copies: bool = False) -> None:
        self._held: list[tuple[nn.Module, dict[str, Any]]] = []
        self._looks: list[tuple[nn.Module, str, Callable[[], bool]]] = []
        for module in modules:
            own = dict(module.__dict__)
            self._held.append((module, own))
            if len(own) == len(_OF_MODULES):
                continue
            for name, value in own.items():
                if name in _OF_MODULES:
                    look = None
                else:
                    look = _look(value, copies)
                if look is not None:
                    self._looks.append((module, name, look))

    def moved(self) -> list[str]:
        """The names of the attributes that are other objects now, or are new, or gone."""
        found = set[str]()
        for module, before in self._held:
            now = module.__dict__
            if _is_same(now, before):
                continue
            names = now.keys() | before.keys()
            found |= {name for name in names if now.get(name, _held) is not before.get(name, _held)}
        return sorted(found)

    def put_back(self) -> None:
        """Gives each module the attributes that it had.

        Raises:
          ValueError: an object that an attribute holds was written into. That can't be put back.
        """
        for module, before in self._held:
            if not _is_same(module.__dict__, before):
                module.__dict__.clear()
                module.__dict__.update(before)
        for module, name, look in self._looks:
            if not look():
                raise ValueError(keeps(f"{type(module).__name__}.{name}"))


_held = object()


def _is_same(now: dict[str, Any], before: dict[str, Any]) -> bool:
    return len(now) == len(before) and all(map(is_, now.values(), before.values()))


@contextmanager
def put_back(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within it a forward may leave what it likes on its modules; afterwards their attributes are
    as before."""
    before = Attributes(modules)
    try:
        yield
    finally:
        with torch.no_grad():
            before.put_back()


def keeps(name: str) -> str:
    """The refusal of a model that carries something from one pass into the next."""
    return (
        f"the model's forward writes into its attribute {name}: what an example leaves there "
        "would reach steps in which it is absent, neither clipped nor noised. Take out what "
        "keeps it, or make it anew in each forward"
    )
