"""What code of one's own can write to: objects that are attributes, global names of modules,
closures, defaults, classes. What is written there is undone, so that it reaches no other pass.

Attributes of modules themselves and their registered tensors are in `attributes.py`.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache, partial
from gc import get_referents
from types import (
    BuiltinMethodType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any
from weakref import WeakKeyDictionary, ref

import numpy as np
import torch
from torch import Tensor, nn

from discreet.layers.refusals import CONFUSED
from discreet.per_example.attributes import (
    GLOBAL_HOOKS,
    HOOKS,
    MODELS,
    OF_MODULES,
    package_of,
    packages_of,
)
from discreet.per_example.held_values import (
    BYTES,
    CONTAINERS,
    LIBRARIES,
    MAPPINGS,
    PLAIN,
    SEQUENCES,
    SETS,
    attributes_of,
    contents_of,
    entries_of,
    fill,
    is_fixed,
    is_replaced,
    refill,
    said,
    set_attribute,
    take_attribute,
    within,
)
from discreet.per_example.kept_tensors import KeptTensor, gradient_of, put_back_gradient
from discreet.per_example.plain_trees import PlainTree
from discreet.per_example.process_settings import ProcessSettings

_MOST_ENTRIES = 2**13  # of a container that is looked into
_MOST_NUMBERS = 2**20  # of an array whose values are compared
_MOST_PLACES = 2**16
_MANY = 500  # places, with which a step takes milliseconds more
_DEPTH = 64
_OF_CALLS = ("__self__", "__func__", "func", "args", "keywords")  # of methods and partials
_CALLS = (MethodType, BuiltinMethodType, MethodWrapperType, partial)
_CODE = (ModuleType, FunctionType, type)
_KNOWN_CODE = LIBRARIES | {*MODELS}  # whose functions and classes are not looked into
# Objects of libraries that hold values of others: their types, and the modules of such types.
_HOLDERS = ("argparse.Namespace", "threading.Event", "_thread._local")
_HOMES = ("torch.utils.data.", "torch.distributions.", "torch.optim.")

_told = set[str]()
# Of models, those of the last memory: what has not changed need not be copied again.
_trees = WeakKeyDictionary[nn.Module, dict[int, PlainTree]]()
_log = logging.getLogger("discreet")


@dataclass(frozen=True)
class _Place:
    """Something that can be written to. `before`: what it held, a copy."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]
    before: Any

    def restore(self) -> bool:
        """Undoes a change. True if other values were there."""
        now = self.read()
        if not is_replaced(now, self.before):
            return False
        self.write(self.before)
        return said(now) != said(self.before)


@dataclass(frozen=True)
class _TensorPlace:
    """A tensor that can be written to."""

    name: str
    kept: KeptTensor

    def read(self) -> Tensor:
        return self.kept.value

    def restore(self) -> bool:
        """As `_Place.restore`."""
        has_changed = self.kept.restore()
        return self.kept.restore_numbers() or has_changed


class Memory:
    """What the functions of a model, a loss or a metric can reach and write to, as it is now, and
    settings of the process."""

    def __init__(
        self, modules: Iterable[nn.Module], function: Any = None, *, whole: bool = True
    ) -> None:
        """`modules`: those of the model, whose attributes and registered tensors have keepers of
        their own. `function`: a loss or a metric. `whole`: large tensors are copied, too, so that
        a change is undone and no error."""
        modules = tuple(modules)
        self._settings = ProcessSettings()
        self._whole = whole
        parts = [*map(type, modules), *([] if function is None else [function])]
        self._own = frozenset(package_of(getattr(part, "__module__", "")) for part in parts)
        self.changed = dict[str, None]()  # the names of what was undone
        self.too_large = ""  # the name of what is not looked through
        self._places = list[_Place | _TensorPlace | PlainTree]()
        self._known = _trees.get(modules[0], {}) if modules else {}
        self._trees = dict[int, PlainTree]()
        self._kept = {
            id(each) for module in modules for each in (module, *module._parameters.values())
        }
        self._seen = dict[int, Any]()  # holds the objects, so that no others have their identities
        self._walk("the loss", function, 0)
        for module in modules:
            name = type(module).__name__
            for key, value in module.__dict__.items():
                if key not in OF_MODULES and type(value) not in PLAIN:
                    self._walk(f"{name}.{key}", value, 0)
            for key in HOOKS:
                for hook in module.__dict__.get(key, {}).values():
                    self._walk(f"a hook of {name}", hook, 0)
            self._walk(name, type(module), 0)
            for parameter in module._parameters.values():
                self._walk(name, type(parameter), 0)
        for hooks in GLOBAL_HOOKS:
            for hook in hooks.values():
                self._walk("a hook of all modules", hook, 0)
        self._hold_model(modules)
        if modules:
            _trees[modules[0]] = self._trees

    def said(self) -> list[tuple[str, object]]:
        """The name and the values of each place."""
        return [(place.name, said(place.read())) for place in self._places]

    @torch.no_grad()
    def restore(self) -> bool:
        """Undoes all changes. True if there were some. Raises ValueError for one that can't be
        undone, when all others are."""
        self._settings.restore()
        changed = list[str]()
        failed = ""
        for place in self._places:
            try:
                if place.restore():
                    changed.append(place.name)
            except Exception as error:  # noqa: BLE001 - of an object that a site may have written
                failed = f"{place.name} ({error})"
        self.changed.update(dict.fromkeys(changed))
        if failed:
            raise ValueError(
                f"the model's forward or the loss changes {failed}, which can't be undone: what "
                "an example leaves there would reach others. Take out what changes it"
            )
        return bool(changed)

    def tell(self) -> None:
        """Logs each name of what was undone once, and that of what is too large."""
        for name in self.changed.keys() - _told:
            _log.warning("the model's forward or the loss changes %s: undone after each pass", name)
        if self.too_large and self.too_large not in _told:
            _log.warning(
                "%s, which the model's forward or the loss can write to, is too large to be looked "
                "through: what an example leaves there is not undone",
                self.too_large,
            )
        _told.update(self.changed, [self.too_large])
        if len(self._places) > _MANY:
            self._tell_what_is_slow()

    def _tell_what_is_slow(self) -> None:
        parts = Counter(place.name.partition("[")[0] for place in self._places)
        name, count = parts.most_common(1)[0]
        if name not in _told:
            _log.info(
                "%s holds %d values that the model's forward or the loss can write to: they are "
                "looked through in each step. One tensor, or plain Python values, are fast",
                name,
                count,
            )
        _told.add(name)

    def _hold(self, name: str, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        if len(self._places) >= _MOST_PLACES:
            self.too_large = name
            return
        with suppress(*CONFUSED):  # a tensor of a transform that has ended
            self._places.append(_Place(name, read, write, read()))

    def _walk(self, name: str, value: Any, depth: int) -> None:
        kind = type(value)
        if kind in PLAIN or id(value) in self._seen:
            return
        if id(value) in self._kept:
            return
        if depth > _DEPTH:
            self.too_large = name
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            with suppress(*CONFUSED):  # a tensor of a transform that has ended
                kept = KeptTensor(value, whole=self._whole)
                self._places.append(_TensorPlace(name, kept))
        elif isinstance(value, np.ndarray):
            self._hold_array(name, value)
        elif isinstance(value, (*MAPPINGS, *SEQUENCES, *SETS, *BYTES)):
            self._walk_container(name, value, depth)
        elif isinstance(value, ModuleType):
            held = vars(value)
            self._walk_names(f"{value.__name__}.", held, frozenset(held), depth)
        elif isinstance(value, _CALLS):
            for part in _OF_CALLS:
                self._walk(name, getattr(value, part, None), depth + 1)
        elif isinstance(value, FunctionType):
            self._walk_function(name, value, depth)
        elif isinstance(value, type):
            self._walk_class(name, value, depth)
        elif isinstance(value, ContextVar):
            with suppress(LookupError):  # it has no value yet
                self._hold(name, value.get, value.set)
        elif isinstance(value, ref):
            self._walk(name, value(), depth + 1)
        elif isinstance(value, memoryview):
            self._walk(name, value.obj, depth + 1)
        elif kind.__module__ == "functools" or kind is MappingProxyType:  # a cache, or its entry
            for held in get_referents(value):
                self._walk(name, held, depth + 1)
        elif isinstance(value, nn.Module) or _is_holder(kind, self._own):
            self._walk_object(name, value, depth)
        elif depth == 0 and _is_installed(package_of(kind.__module__)):
            self._hold_attributes(name, value)  # such as a configuration

    def _hold_array(self, name: str, value: np.ndarray[Any, Any]) -> None:
        def write(before: np.ndarray[Any, Any]) -> None:
            if value.shape != before.shape:
                value.resize(before.shape, refcheck=False)
            value[...] = before

        if value.dtype.hasobject:
            self._walk(name, value.ravel().tolist(), 0)
        if value.size > _MOST_NUMBERS and not self._whole:
            self.too_large = name
        else:
            self._hold(name, value.copy, write)

    def _hold_model(self, modules: tuple[nn.Module, ...]) -> None:
        """Holds the types of modules, and what their tensors have besides numbers."""
        kinds = list(map(type, modules))
        groups = (group for each in modules for group in (each._parameters, each._buffers))
        tensors = [value for group in groups for value in group.values() if value is not None]
        kept = [(gradient_of(value), dict(value.__dict__)) for value in tensors]

        def read() -> list[Any]:
            found: list[Any] = list(map(type, modules))
            for value in tensors:
                found += gradient_of(value)
                found += value.__dict__.values()
            return found

        def write(_: object) -> None:
            for module, kind in zip(modules, kinds, strict=True):
                if type(module) is not kind:
                    module.__class__ = kind
            for value, (gradient, attributes) in zip(tensors, kept, strict=True):
                put_back_gradient(value, gradient, attributes)

        self._hold("an attribute of a parameter or a buffer", read, write)

    def _walk_container(self, name: str, value: Any, depth: int) -> None:
        if type(value) not in CONTAINERS:
            self._walk_object(name, value, depth)
        with suppress(ValueError):
            self._hold_tree(name, value)
            return
        inner = list(within(value))
        if len(inner) > _MOST_ENTRIES:
            self.too_large = name
            inner.clear()
        for place, held in inner:
            self._walk(f"{name}{place}", held, depth + 1)
        if not is_fixed(value):
            self._hold(name, partial(entries_of, value), partial(refill, value))

    def _hold_tree(self, name: str, value: Any) -> None:
        tree = self._known.get(id(value))
        if tree is None or not tree.is_unchanged():
            tree = PlainTree(name, value)
        self._trees[id(value)] = tree
        if not tree.is_constant:
            self._places.append(tree)

    def _walk_function(self, name: str, function: FunctionType, depth: int) -> None:
        if all(_is_library(package, self._own) for package in packages_of(function)):
            return
        self._walk_object(name, function, depth)
        self._walk(name, function.__defaults__, depth + 1)
        self._walk(name, function.__kwdefaults__, depth + 1)
        code = function.__code__
        for variable, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._walk(variable, contents_of(cell), depth + 1)
            self._hold(variable, partial(contents_of, cell), partial(fill, cell))
        names = names_in(code)
        if "globals" in names:
            names |= function.__globals__.keys()
        for place, held in namespaces(function, names, self._own):
            self._walk_names(place, held, names, depth)

    def _walk_names(
        self, place: str, held: dict[str, Any], names: frozenset[str], depth: int
    ) -> None:
        def meant() -> dict[str, Any]:
            return {key: held[key] for key in names & held.keys()}

        new = f"a new global name of {held.get('__name__')}"
        if _is_library(held.get("__name__"), self._own):
            self._hold_new(new, meant, held.pop)
            return
        self._hold_new(new, partial(dict, held), held.pop)
        for key, value in meant().items():
            if not isinstance(value, _CODE):
                self._hold(
                    f"{place}{key}",
                    partial(held.__getitem__, key),
                    partial(held.__setitem__, key),
                )
            if not isinstance(value, ModuleType):  # `namespaces` has the names that are meant
                self._walk(f"{place}{key}", value, depth + 1)

    def _hold_new(
        self, name: str, names: Callable[[], dict[str, Any]], remove: Callable[[str], object]
    ) -> None:
        """Holds what appears under names that did not exist before."""
        known = frozenset(names())

        def new() -> dict[str, Any]:
            found = names().items()
            return {
                key: held for key, held in found if key not in known and not isinstance(held, _CODE)
            }

        def write(_: object) -> None:
            for key in new():
                remove(key)

        self._hold(name, new, write)

    def _walk_class(self, name: str, kind: type, depth: int) -> None:
        metaclass: type = type(kind)
        for base in (*kind.__mro__, *metaclass.__mro__):
            if _is_library(base.__module__, self._own):
                continue
            new = f"a new attribute of {base.__name__}"
            self._hold_new(new, partial(dict, vars(base)), partial(delattr, base))
            for key, value in vars(base).items():
                function = getattr(value, "__func__", getattr(value, "fget", value))
                if isinstance(function, FunctionType):
                    self._walk(f"{name}.{key}", function, depth + 1)
                elif not key.startswith("__"):
                    if not hasattr(value, "__get__"):
                        self._hold(
                            f"{name}.{key}",
                            partial(getattr, base, key),
                            partial(setattr, base, key),
                        )
                    self._walk(f"{name}.{key}", value, depth + 1)

    def _walk_object(self, name: str, value: Any, depth: int) -> None:
        for key, held in attributes_of(value).items():
            self._walk(f"{name}.{key}", held, depth + 1)
        self._hold_attributes(name, value)  # after the more precise places
        if not isinstance(value, FunctionType):
            self._walk(type(value).__name__, type(value), depth + 1)

    def _hold_attributes(self, name: str, value: Any) -> None:
        kind = type(value)

        def read() -> dict[str, Any]:
            return {"__class__": type(value), **attributes_of(value)}

        def write(before: dict[str, Any]) -> None:
            if type(value) is not kind:
                object.__setattr__(value, "__class__", kind)
            for key in attributes_of(value).keys() - before.keys():
                take_attribute(value, key)
            for key, held in before.items():
                if key != "__class__":
                    set_attribute(value, key, held)

        self._hold(name, read, write)


@contextmanager
def no_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """A context in which no gradients of earlier steps can be read or written to."""
    held = [(each, each.grad) for each in parameters if each.grad is not None]
    for parameter, _ in held:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, grad in held:
            parameter.grad = grad


def _is_holder(kind: type, own: frozenset[str]) -> bool:
    """True for objects whose attributes are looked at."""
    home = kind.__module__
    root = package_of(home)
    is_library = root in LIBRARIES or (root not in own and _is_installed(root))
    name = f"{home}.{kind.__qualname__}"
    return name in _HOLDERS or name.startswith(_HOMES) or not is_library


def _is_library(module: object, own: frozenset[str] = frozenset()) -> bool:
    """True for a module whose functions and classes are not looked into: it is of no package of
    one's `own`."""
    root = package_of(module)
    return root in _KNOWN_CODE or (root not in own and _is_installed(root))


@lru_cache(maxsize=1024)
def _is_installed(root: str) -> bool:
    """True for a package beside Discreet's, not for files of a project."""
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def namespaces(
    function: FunctionType, names: frozenset[str], packages: frozenset[str] = frozenset()
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The global names of a function's module, and of the modules that its code may mean by these
    `names`; before each what stands before a name of it, such as "module.". `packages`: one's
    own."""
    own = function.__globals__
    waiting = [("", own)]
    for name in names - own.keys():  # of modules that the function itself imports
        for full in (name, f"{own.get('__package__')}.{name}"):
            if full in sys.modules:
                waiting.append((f"{full}.", vars(sys.modules[full])))
    seen = set[int]()
    while waiting:
        place, held = waiting.pop()
        if id(held) in seen:
            continue
        seen.add(id(held))
        yield place, held
        if not _is_library(held.get("__name__"), packages):
            for key in names & held.keys():
                if isinstance(held[key], ModuleType):
                    waiting.append((f"{place}{key}.", vars(held[key])))


def names_in(code: CodeType) -> frozenset[str]:
    """The names in a function's code and in the functions that it makes."""
    found = frozenset(code.co_names)
    for each in code.co_consts:
        if isinstance(each, CodeType):
            found |= names_in(each)
    return found
