"""Layouts: where the examples are in a tensor, and how an operation moves them.

A tensor of the examples has them along one dimension, in which example i of n stands at the places (a, i, b), for a
below `before` and b below `after`: n rows are (0, 1, 1), a batch of T steps (T, n, d) is (1, 1, 1), and the same rows
flattened, (T * n, d), are (0, T, 1). An operation is served if the entries of example i in its result follow from the
entries of example i alone. That is read from the shapes and arguments of the call that ran. What does not hold, or is
not known, is a `Mixed`, with the words for it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

FEWEST = 4  # rows that a pass has at least: smaller batches are filled up


class Unserved(Exception):
    """The computation can't be shown to treat each example alone."""


@dataclass(frozen=True, slots=True)
class Mixed:
    """A value that is not known to follow example by example. `surely`: it is known that it does not."""

    reason: str
    surely: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    """The examples along dimension `dim`, whose size is before * n * after. `drawn`: random numbers are in it."""

    dim: int
    before: int = 1
    after: int = 1
    drawn: bool = field(default=False, compare=False)

    def at(self, dim: int) -> Layout:
        return Layout(dim, self.before, self.after)

    def first(self, values: Tensor) -> Tensor:
        """The values with one row an example, (n, ...), positions in a fixed order."""
        if self == FIRST:
            return values
        shape = (*values.shape[: self.dim], self.before, -1, self.after, *values.shape[self.dim + 1 :])
        return values.reshape(shape).movedim(self.dim + 1, 0)


FIRST = Layout(0)
_HOMES = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


class Count(int):
    """`times` times the number of examples. It may say how many rows a tensor has, and no more."""

    times: int

    def __new__(cls, times: int, count: int) -> Count:
        self = super().__new__(cls, times * count)
        self.times = times
        return self

    def __mul__(self, other: object) -> Count:
        if type(other) is not int or other < 1:
            raise _counted()
        return Count(self.times * other, int(self) // self.times)

    __rmul__ = __mul__

    def __floordiv__(self, other: object) -> Any:
        if isinstance(other, Count) and self.times % other.times == 0:
            return self.times // other.times
        if type(other) is not int or self.times % other:
            raise _counted()
        return Count(self.times // other, int(self) // self.times)

    def __mod__(self, other: object) -> int:
        if not isinstance(other, int) or self.times % (other.times if isinstance(other, Count) else other):
            raise _counted()
        return 0

    def _known(self, other: object) -> tuple[int, int]:
        """Two numbers that compare as these do for every number of examples."""
        if isinstance(other, Count):
            return self.times, other.times
        if isinstance(other, int) and other < FEWEST * self.times:
            return FEWEST * self.times, other
        raise _counted()

    def __eq__(self, other: object) -> bool:
        mine, theirs = self._known(other)
        return mine == theirs

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __lt__(self, other: int) -> bool:
        mine, theirs = self._known(other)
        return mine < theirs

    def __gt__(self, other: int) -> bool:
        mine, theirs = self._known(other)
        return mine > theirs

    def __le__(self, other: int) -> bool:
        return not self > other

    def __ge__(self, other: int) -> bool:
        return not self < other

    __hash__ = int.__hash__

    def _refused(self, *_: object) -> Any:
        raise _counted()

    __add__ = __radd__ = __sub__ = __rsub__ = __truediv__ = __rtruediv__ = __rfloordiv__ = __rmod__ = _refused
    __pow__ = __rpow__ = __neg__ = __float__ = __divmod__ = __rdivmod__ = _refused


def _counted() -> Unserved:
    return Unserved(f"the number of examples is used as a number{place()}")


def place() -> str:
    """The nearest line that is neither PyTorch's nor of this folder, in words."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_HOMES):
        frame = frame.f_back  # type: ignore[assignment]
    return "" if frame is None else f" at {Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def leaves(value: Any) -> Iterator[Any]:
    """The values in nested tuples, lists, slices and dictionaries."""
    if isinstance(value, tuple | list):
        for part in value:
            yield from leaves(part)
    elif isinstance(value, dict):
        yield from leaves(tuple(value.values()))
    elif isinstance(value, slice):
        yield from leaves((value.start, value.stop, value.step))
    else:
        yield value


Tag = Any  # a Layout, a Mixed, or what watch.py knows beside


@dataclass(frozen=True, slots=True)
class Call:
    """One operation that ran on tensors of the examples.

    Attributes:
      tags: of its tensors, by identity: a Layout, or None for one that does not follow from the examples.
      count: n.
    """

    name: str
    args: tuple[Any, ...]
    named: Mapping[str, Any]
    result: Any
    tags: Mapping[int, Layout | None]
    count: int

    def argument(self, place: int, *names: str, default: Any = None) -> Any:
        """An argument by its place or by one of its names."""
        if len(self.args) > place:
            return self.args[place]
        return next((self.named[name] for name in names if name in self.named), default)

    def tensors(self) -> list[Tensor]:
        return [value for value in leaves((self.args, self.named)) if isinstance(value, Tensor)]

    def layout(self, value: Any) -> Layout | None:
        return self.tags.get(id(value)) if isinstance(value, Tensor) else None

    @property
    def one(self) -> tuple[Tensor, Layout]:
        """The first tensor, if it alone follows from the examples."""
        first, *others = self.tensors()
        layout = self.tags[id(first)]
        if layout is None or any(self.tags[id(value)] is not None for value in others):
            raise Unserved(f"{self.name} of several tensors")
        return first, layout

    def mixes(self, why: str = "works along the examples") -> Mixed:
        return Mixed(f"{self.name} {why}", surely=True)


Check = Callable[[Call], Tag]  # the tag of the result, or a list of them


def elementwise(call: Call) -> Tag:
    """Each entry from the entries at its own place; what is not of the examples looks the same to all of them."""
    wide = call.result.dim()
    found = {
        layout.at(layout.dim + wide - value.dim())
        for value in call.tensors()
        if (layout := call.tags[id(value)]) is not None
    }
    if len(found) != 1:
        return call.mixes("pairs examples with each other")
    (layout,) = found
    for value in call.tensors():
        place = layout.dim - wide + value.dim()
        if call.tags[id(value)] is None and place >= 0 and value.shape[place] != 1:
            return call.mixes("reads something by the place of an example in the batch")
    return layout if call.result.shape[layout.dim] == layout.before * call.count * layout.after else call.mixes()


def _dims(found: Any, wide: int) -> list[int] | None:
    if found is None:
        return None
    dims = list(leaves(found))
    if not all(isinstance(dim, int) and not isinstance(dim, bool) for dim in dims):
        raise Unserved("dimensions by name")
    return [dim % max(wide, 1) for dim in dims]


def along(place: int, default: int | None = None, *, keeps: bool | None = None) -> Check:
    """Along dimensions that stand at this place of the arguments, none of which is that of the examples.

    `keeps`: whether the result has these dimensions; None: if it has as many as the first tensor.
    """

    def check(call: Call) -> Tag:
        value, layout = call.one
        named = call.argument(place, "dim", "dims", "axis", default=default)
        dims = _dims(named, value.dim())
        if dims is None:
            return call.mixes("works on all examples together")
        if layout.dim in dims:
            return call.mixes() if call.name not in ("unbind", "select") else Mixed(f"{call.name} takes examples apart")
        results = [call.result] if isinstance(call.result, Tensor) else list(call.result)
        kept = keeps if keeps is not None else bool(results) and results[0].dim() == value.dim()
        after = layout if kept else layout.at(layout.dim - sum(dim < layout.dim for dim in dims))
        return after if isinstance(call.result, Tensor) else [after] * len(results)

    return check


def shaped(call: Call) -> Tag:
    """The same numbers in their order with other dimensions."""
    value, layout = call.one
    return reshaped(layout, value.shape, call.result.shape, call.count) or call.mixes("tears examples apart")


def reshaped(layout: Layout, old: Sequence[int], new: Sequence[int], count: int) -> Layout | None:
    """The layout after numbers of one shape were given another one; None if examples have no dimension there."""
    outer = prod(old[: layout.dim]) * layout.before
    inner = layout.after * prod(old[layout.dim + 1 :])
    for dim, size in enumerate(new):
        left, right = prod(new[:dim]), prod(new[dim + 1 :])
        if left and right and outer % left == 0 == inner % right and outer // left * count * (inner // right) == size:
            return Layout(dim, outer // left, inner // right)
    return None


def permuted(call: Call) -> Tag:
    """Dimensions in another order: a tensor whose sizes tell them apart shows which."""
    value, layout = call.one
    probe = torch.empty([2 + dim for dim in range(value.dim())], device="meta")
    method = getattr(Tensor, call.name, None)
    if method is None or not callable(method):
        moved = getattr(probe, call.name)  # a property such as T
    else:
        moved = method(probe, *call.args[1:], **{k: v for k, v in call.named.items() if k not in ("input", "self")})
    return layout.at(list(moved.shape).index(2 + layout.dim))


def expanded(call: Call) -> Tag:
    value, layout = call.one
    sizes = call.result.shape
    place = layout.dim + len(sizes) - value.dim()
    given = [size for size in leaves(call.args[1:]) if not isinstance(size, Tensor)]
    wide = len(given) == len(sizes)
    counted = [dim for dim, size in enumerate(given) if isinstance(size, Count)] if wide else []
    return call.mixes("makes a copy for each example") if any(dim != place for dim in counted) else layout.at(place)


def repeated(call: Call) -> Tag:
    value, layout = call.one
    times = list(leaves(call.args[1:] or tuple(call.named.values())))
    if any(isinstance(time, Count) for time in times):
        return call.mixes("makes a copy for each example")
    times = [1] * (value.dim() - len(times)) + times  # as Tensor.tile takes them
    more = len(times) - value.dim()
    return Layout(layout.dim + more, times[layout.dim + more] * layout.before, layout.after)


def interleaved(call: Call) -> Tag:
    value, layout = call.one
    times, dims = call.argument(1, "repeats"), _dims(call.argument(2, "dim"), value.dim())
    if not isinstance(times, int) or dims is None:
        return Mixed("repeat_interleave by numbers of the data")
    return layout if dims != [layout.dim] else Layout(layout.dim, layout.before, layout.after * times)


def joined(more: int) -> Check:
    """Tensors of the examples one behind the other; `more`: dimensions that the result has beyond theirs."""

    def check(call: Call) -> Tag:
        parts = [part for part in call.tensors() if part.shape != (0,)]  # which cat leaves out
        layouts = [call.tags[id(part)] for part in parts]
        (dim,) = _dims(call.argument(1, "dim", "axis", default=0), call.result.dim()) or [0]
        first = next(layout for layout in layouts if layout is not None)
        if any(layout is None for layout in layouts):
            return call.mixes("reads something by the place of an example in the batch")
        if more:
            after = first.at(first.dim + (dim <= first.dim))
            return after if all(layout == first for layout in layouts) else call.mixes("pairs examples with each other")
        if any((layout.dim, layout.after) != (first.dim, first.after) for layout in layouts if layout):
            return call.mixes("pairs examples with each other")
        befores = [layout.before for layout in layouts if layout]
        if dim == first.dim:
            return Layout(dim, sum(befores), first.after)
        return first if len(set(befores)) == 1 else call.mixes("pairs examples with each other")

    return check


def cut(call: Call) -> Tag:
    """Parts of a tensor, one behind the other, along one dimension: chunk, split, narrow."""
    value, layout = call.one
    place = 1 if call.name == "narrow" else 2
    (dim,) = _dims(call.argument(place, "dim", default=0), value.dim()) or [0]
    single = isinstance(call.result, Tensor)
    parts = [call.result] if single else list(call.result)
    if dim != layout.dim:
        return layout if single else [layout] * len(parts)
    found, block = [], call.count * layout.after
    start = int(call.argument(2, "start")) if call.name == "narrow" else 0
    for part in parts:
        if start % block or part.shape[dim] % block:
            return call.mixes("tears examples apart") if single else [call.mixes("tears examples apart")] * len(parts)
        found.append(Layout(dim, part.shape[dim] // block, layout.after))
        start += part.shape[dim]
    return found[0] if single else found


def _last(dims: int, least: int = 0) -> Check:
    """Over the last dimensions; the examples are before them, and before `least` more."""

    def check(call: Call) -> Tag:
        value = call.args[0] if call.args else call.tensors()[0]
        layout = call.layout(value)
        if layout is None or any(call.tags[id(other)] for other in call.tensors() if other is not value):
            raise Unserved(f"{call.name} of several tensors")
        if layout.dim >= value.dim() - dims - least:
            return call.mixes()
        return layout if isinstance(call.result, Tensor) else [layout] * len(call.result)

    return check


def _padded(call: Call) -> Tag:
    value, layout = call.one
    sides = list(call.argument(1, "pad"))
    return layout if layout.dim < value.dim() - len(sides) // 2 else call.mixes()


def _windows(call: Call) -> Tag:
    value, layout = call.one
    (dim,) = _dims(call.argument(1, "dimension"), value.dim()) or [0]
    return layout if dim != layout.dim else call.mixes()


def _rows_only(dims: int = 0) -> Check:
    """Of one tensor whose examples are in the first dimension, and that has so many dimensions, if that is said."""

    def check(call: Call) -> Tag:
        value, layout = call.one
        if layout.dim != 0 or (dims and value.dim() < dims):
            return call.mixes()
        return layout if isinstance(call.result, Tensor) else [layout] * len(call.result)

    return check


def _alike(call: Call) -> Tag:
    """Of tensors that all have one row an example, and nothing else."""
    tensors = call.tensors()
    if any(call.tags[id(value)] != FIRST for value in tensors):
        return call.mixes("pairs examples with each other")
    return FIRST if isinstance(call.result, Tensor) else [FIRST] * len(call.result)


def _one_hot(call: Call) -> Tag:
    _, layout = call.one
    return layout if call.argument(1, "num_classes", default=-1) > 0 else Mixed("one_hot without num_classes")


def products(call: Call, labels: Sequence[str], result: str, parts: Sequence[Tensor]) -> Tag:
    """A sum of products, each dimension named by a letter: the examples keep one letter, which nothing else has."""
    found: set[tuple[str, int, int]] = set()
    for part, names in zip(parts, labels, strict=True):
        if (layout := call.tags[id(part)]) is not None:
            found.add((names[layout.dim], layout.before, layout.after))
    if len(found) != 1:
        return call.mixes("pairs examples with each other")
    ((letter, before, after),) = found
    for part, names in zip(parts, labels, strict=True):
        if call.tags[id(part)] is None and letter in names and part.shape[names.index(letter)] != 1:
            return call.mixes("reads something by the place of an example in the batch")
    return Layout(result.index(letter), before, after) if letter in result else call.mixes("adds up examples")


def matrix_labels(left: int, right: int) -> tuple[str, str, str]:
    """The letters of a matrix product of tensors of so many dimensions."""
    batch = "abcdefgh"[: max(left, right, 2) - 2]
    first = batch[len(batch) - max(left - 2, 0) :] if left > 2 else ""
    second = batch[len(batch) - max(right - 2, 0) :] if right > 2 else ""
    row, column = ("m" if left > 1 else ""), ("p" if right > 1 else "")
    return first + row + "k", second + "k" + column, batch + row + column


def _matmul(call: Call) -> Tag:
    left, right = call.tensors()
    one, other, result = matrix_labels(left.dim(), right.dim())
    return products(call, [one, other], result, [left, right])


def _added_product(call: Call) -> Tag:
    """addmm, addmv, baddbmm: a product, and a first summand that looks the same to all or has the product's layout."""
    extra, left, right = call.tensors()
    one, other, result = matrix_labels(left.dim(), right.dim())
    found = products(call, [one, other], result, [left, right]) if call.tags[id(left)] or call.tags[id(right)] else None
    held = call.tags[id(extra)]
    if held is not None:
        held = held.at(held.dim + call.result.dim() - extra.dim())
        return held if found == held else call.mixes("pairs examples with each other")
    place = found.dim - call.result.dim() + extra.dim() if isinstance(found, Layout) else -1
    return found if place < 0 or extra.shape[place] == 1 else call.mixes("reads by the place of an example")


def einsum_labels(equation: str, parts: Sequence[Tensor]) -> tuple[list[str], str]:
    """The letters of each tensor and of the result. Unserved without an arrow, or with dots."""
    equation = equation.replace(" ", "")
    if "->" not in equation or "." in equation:
        raise Unserved("einsum without an arrow or with dots")
    given, result = equation.split("->")
    return given.split(","), result


def _einsum(call: Call) -> Tag:
    parts = call.tensors()
    labels, result = einsum_labels(call.args[0], parts)
    return products(call, labels, result, parts)


def _attention(call: Call) -> Tag:
    parts = [call.argument(place, name) for place, name in enumerate(("query", "key", "value", "attn_mask"))]
    tensors = [part for part in parts if isinstance(part, Tensor)]
    wide = call.result.dim()
    layouts = {layout.at(layout.dim + wide - t.dim()) for t in tensors if (layout := call.tags[id(t)]) is not None}
    if len(layouts) != 1:
        return call.mixes("pairs examples with each other")
    (layout,) = layouts
    for part in tensors:
        place = layout.dim - wide + part.dim()
        if call.tags[id(part)] is None and place >= 0 and part.shape[place] != 1:
            return call.mixes("reads something by the place of an example in the batch")
    return layout if layout.dim < wide - 2 else call.mixes()


def _reduced_pair(place: int | None, default: int) -> Check:
    """A number for each pair of vectors along one dimension, which is named at this place."""

    def check(call: Call) -> Tag:
        left, right = call.tensors()
        layouts = {call.tags[id(left)], call.tags[id(right)]}
        if len(layouts) != 1 or left.dim() != right.dim():
            return call.mixes("pairs examples with each other")
        (layout,) = layouts
        assert layout is not None
        (dim,) = _dims(default if place is None else call.argument(place, "dim", default=default), left.dim()) or [0]
        kept = call.result.dim() == left.dim()
        return call.mixes() if dim == layout.dim else layout.at(layout.dim - (dim < layout.dim and not kept))

    return check


def _gathered(call: Call) -> Tag:
    """gather, scatter and take_along_dim: places within each example."""
    tensors = call.tensors()
    layouts = {call.tags[id(value)] for value in tensors}
    dim = call.argument(2 if call.name == "take_along_dim" else 1, "dim")
    first = tensors[0]
    if len(layouts) != 1 or None in layouts or dim is None or len({value.dim() for value in tensors}) != 1:
        return call.mixes("reads something by the place of an example in the batch")
    (layout,) = layouts
    assert layout is not None
    return layout if dim % first.dim() != layout.dim else call.mixes()


def _index_selected(call: Call) -> Tag:
    value, index = call.tensors()
    layout = call.tags[id(value)]
    dim = call.argument(1, "dim")
    if layout is None or call.tags[id(index)] is not None:
        return Mixed("index_select by numbers of the data")
    return layout if dim % value.dim() != layout.dim else call.mixes()


def picked(call: Call, places: set[int]) -> Tag:
    """Part of a tensor by an index. `places`: the tensors in it that are the numbers of the examples, in order."""
    value = call.args[0]
    given = call.args[1] if isinstance(call.args[1], tuple) else (call.args[1],)
    used = sum(1 for part in given if part is not None and part is not ... and not isinstance(part, bool))
    index: list[Any] = []
    for part in given:
        index.extend([slice(None)] * (value.dim() - used) if part is ... else [part])
    index += [slice(None)] * (value.dim() - sum(part is not None for part in index))
    layout = call.layout(value)
    advanced = [place for place, part in enumerate(index) if isinstance(part, Tensor | list)]
    if any(isinstance(part, Tensor) and part.dtype is torch.bool for part in index):
        return Mixed("a mask of the data picks entries")
    if advanced:
        return _advanced(call, index, advanced, layout, places)
    if layout is None:
        raise Unserved(call.name)
    dim = after = 0
    for part in index:
        if part is None:
            after += 1
            continue
        if dim == layout.dim:
            if not isinstance(part, slice):
                return Mixed("an index picks one example")
            start, stop, step = part.indices(value.shape[dim])
            block = call.count * layout.after
            if step != 1 or start % block or stop % block:
                return Mixed("an index picks some examples")
            return Layout(after, (stop - start) // block, layout.after)
        if any(isinstance(part, Count) for part in leaves(part)):
            return call.mixes("counts examples")
        after += isinstance(part, slice)
        dim += 1
    raise AssertionError("the examples have a dimension")


def _advanced(call: Call, index: list[Any], advanced: list[int], layout: Layout | None, places: set[int]) -> Tag:
    """Indices that are tensors: the same ones for every example beside its dimension, or its own with its number."""
    tensors = [part if isinstance(part, Tensor) else torch.tensor(part) for part in (index[a] for a in advanced)]
    before = sum(part is None or isinstance(part, slice) for part in index[: advanced[0]])
    together = advanced == list(range(advanced[0], advanced[-1] + 1))
    start = before if together and not any(isinstance(index[a], int) for a in range(len(index))) else None
    if start is None:
        return Mixed("an index of several tensors apart")
    wide = max(part.dim() for part in tensors)
    own = [part for part in tensors if id(part) in places or call.tags.get(id(part)) is not None]
    if not own:
        if layout is None:
            raise Unserved(call.name)
        place = _place_of(index, layout.dim)
        if not isinstance(index[place], slice) or index[place] != slice(None):
            return Mixed("an index picks some examples")
        held = sum(part is None or isinstance(part, slice) for part in index[:place])
        return layout.at(held if place < advanced[0] else held + wide)
    if layout is None:  # a table that all examples read, each by numbers of its own
        found = {lay.at(lay.dim + wide - part.dim()) for part in tensors if (lay := call.tags.get(id(part)))}
        same = [part for part in tensors if call.tags.get(id(part)) is None and id(part) not in places]
        if len(found) != 1 or same or any(id(part) in places for part in tensors):
            return call.mixes("reads something by the place of an example in the batch")
        (lay,) = found
        return lay.at(lay.dim + start)
    place = _place_of(index, layout.dim)
    numbers = index[place]
    if layout.before != 1 or layout.after != 1 or not (isinstance(numbers, Tensor) and id(numbers) in places):
        return Mixed("an index picks some examples")
    lead = wide - numbers.dim()  # the numbers stand in their first dimension, (n, 1, ...)
    for part in tensors:
        own_layout = call.tags.get(id(part))
        if part is not numbers and own_layout and own_layout.at(own_layout.dim + wide - part.dim()) != Layout(lead):
            return call.mixes("pairs examples with each other")
    return Layout(start + lead)


def _place_of(index: Sequence[Any], dim: int) -> int:
    """The place in an index of the part for a dimension."""
    seen = -1
    for place, part in enumerate(index):
        seen += part is not None
        if seen == dim and part is not None:
            return place
    raise AssertionError("an index has a part for each dimension")


def _loss(call: Call) -> Tag:
    """A loss of torch.nn without a reduction, of rows (n, classes, ...) or of equal shapes."""
    reduction = call.argument(
        {"cross_entropy_loss": 3, "nll_loss_nd": 3, "nll_loss": 3, "binary_cross_entropy": 3}.get(call.name, 2),
        "reduction",
        default=1,
    )
    first, layout = call.args[0], call.layout(call.args[0])
    others = [value for value in call.tensors()[1:] if call.tags[id(value)] is not None]
    if reduction not in (0, "none"):
        return call.mixes("reduces over examples")
    if layout is None or any(call.tags[id(value)] != layout for value in others):
        return call.mixes("pairs examples with each other")
    return layout if layout.dim == 0 or call.result.shape == first.shape else call.mixes()


_ELEMENTWISE = (
    "add sub rsub mul div rdiv true_divide truediv multiply subtract divide pow rpow neg negative abs absolute exp "
    "expm1 exp2 log log1p log2 log10 sqrt rsqrt square reciprocal sin cos tan asin acos atan atan2 sinh cosh tanh "
    "sigmoid erf erfc erfinv sign sgn floor ceil round trunc frac fmod remainder clamp clamp_min clamp_max clip "
    "maximum minimum fmax fmin lerp addcmul addcdiv hypot logaddexp xlogy special_expit logit nan_to_num floor_divide "
    "eq ne lt le gt ge isnan isinf isfinite isclose logical_and logical_or logical_not logical_xor bitwise_and "
    "bitwise_or bitwise_not bitwise_xor and or xor invert where masked_fill "
    "relu relu6 gelu silu elu selu celu leaky_relu softplus softsign hardtanh hardswish hardsigmoid log_sigmoid "
    "logsigmoid mish tanhshrink softshrink hardshrink threshold heaviside prelu rrelu "
    "contiguous clone detach float double half bfloat16 type type_as to long int bool byte short cpu cuda "
    "requires_grad alias data real lift_fresh positive "
    "zeros_like ones_like full_like empty_like rand_like randn_like bernoulli fill zero normal uniform exponential "
    "dropout alpha_dropout fill_diagonal copy mse_elementwise"
)
_POOLS = {
    1: "max_pool1d avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d max_pool1d_with_indices upsample_nearest1d "
    "upsample_linear1d reflection_pad1d replication_pad1d",
    2: "max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d max_pool2d_with_indices upsample_nearest2d "
    "upsample_bilinear2d upsample_bicubic2d pixel_shuffle pixel_unshuffle",
    3: "max_pool3d avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d max_pool3d_with_indices upsample_nearest3d "
    "upsample_trilinear3d",
}
_BY_NAMES: list[tuple[str, Check]] = [
    (_ELEMENTWISE, elementwise),
    ("view reshape flatten unflatten squeeze unsqueeze ravel view_as reshape_as unsafe_view atleast_2d", shaped),
    ("transpose permute movedim moveaxis swapaxes swapdims t T mT adjoint H mH", permuted),
    ("expand expand_as broadcast_to", expanded),
    ("repeat tile", repeated),
    ("repeat_interleave", interleaved),
    ("cat concat concatenate", joined(0)),
    ("stack", joined(1)),
    ("chunk split split_with_sizes tensor_split narrow", cut),
    ("mean sum nansum amax amin prod var std logsumexp all any median max min argmax argmin count_nonzero", along(1)),
    ("softmax log_softmax cumsum cumprod cummax cummin logcumsumexp flip", along(1, keeps=True)),
    ("sort argsort", along(1, -1, keeps=True)),
    ("topk kthvalue", along(2, -1, keeps=True)),
    ("norm roll renorm", along(2)),
    ("linalg_vector_norm", along(2)),
    ("unbind select", along(1, 0, keeps=False)),
    ("glu", along(1, -1, keeps=True)),
    ("one_hot", _one_hot),
    ("tril triu", _last(2)),
    ("max_unpool2d max_unpool3d fractional_max_pool2d fractional_max_pool3d", _alike),
    *((names, _last(dims, least=1)) for dims, names in _POOLS.items()),
    ("pad", _padded),
    ("unfold", _windows),
    ("im2col col2im channel_shuffle", _rows_only(3)),
    ("feature_dropout feature_alpha_dropout", _rows_only(2)),
    ("matmul mm bmm mv dot", _matmul),
    ("addmm addmv baddbmm", _added_product),
    ("einsum", _einsum),
    ("scaled_dot_product_attention", _attention),
    ("cosine_similarity", _reduced_pair(2, 1)),
    ("pairwise_distance", _reduced_pair(None, -1)),
    ("gather scatter scatter_add take_along_dim", _gathered),
    ("index_select", _index_selected),
    (
        "cross_entropy_loss nll_loss nll_loss_nd mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
        "binary_cross_entropy_with_logits kl_div poisson_nll_loss soft_margin_loss",
        _loss,
    ),
]
CHECKS: dict[str, Check] = {name: check for names, check in _BY_NAMES for name in names.split()}
