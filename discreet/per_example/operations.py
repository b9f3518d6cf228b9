"""Operations of PyTorch, each with the names of its dimensions, from which the layout of the result follows.

A dimension has the same name in two tensors if an entry of the result reads the same place along it in both. The
examples then have to lie along one name, which must be in the result; and what does not follow from the examples must
look the same to all of them. An operation that is not in the table is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import prod
from typing import Any

import torch
from torch import Tensor

from discreet.per_example.calls import Call, Names
from discreet.per_example.layouts import BY_PLACE, Count, Layout, Mixed, Tag, Unserved, leaves

Check = Callable[[Call], Tag]


def _own(value: Tensor, wide: int | None = None) -> list[object]:
    """Names for the dimensions of a tensor, as broadcasting to `wide` of them gives them."""
    wide = value.dim() if wide is None else wide
    return list(range(wide - value.dim(), wide))


def elementwise(call: Call) -> Tag:
    wide = (call.result if isinstance(call.result, Tensor) else call.result[0]).dim()
    if len(call.tensors) == 1 and call.tensors[0].dim() == wide:
        return call.tags[0]
    return call.follows([(value, _own(value, wide)) for value in call.tensors], list(range(wide)))


def _working(call: Call, tensors: Sequence[Tensor], dims: Sequence[int], *, keeps: bool | None) -> Tag:
    """The layout of a result for which these dimensions are worked on as a whole. `keeps`: whether it has them still;
    None: if it has as many dimensions as the tensors."""
    wide = max(value.dim() for value in tensors)
    result = call.result if isinstance(call.result, Tensor) else call.result[0]
    kept = result.dim() == wide if keeps is None else keeps
    names = [(dim, "works") if dim in dims else dim for dim in range(wide) if kept or dim not in dims]
    return call.follows([(value, _own(value, wide)) for value in tensors], names)


def along(place: int, default: Any = None, *, keeps: bool | None = None) -> Check:
    """Along dimensions that stand at this place of the arguments."""

    def check(call: Call) -> Tag:
        value, _ = call.one
        if call.argument(place, "dim", "dims", "axis", default=default) is None:
            return call.mixes("works on all examples together")
        dims = call.dims(value.dim(), place, "dim", "dims", "axis", default=default)
        found = _working(call, [value], dims, keeps=keeps)
        if isinstance(found, Mixed) and call.name in ("unbind", "select"):
            return Mixed(f"{call.name} takes examples apart")
        return found

    return check


def over_last(dims: int | Callable[[Call], int], least: int = 0) -> Check:
    """Over the last dimensions; the examples are before them, and before `least` more."""

    def check(call: Call) -> Tag:
        value, layout = call.one
        last = dims if isinstance(dims, int) else dims(call)
        return layout if layout.dim < value.dim() - last - least else call.mixes()

    return check


def _padded_dims(call: Call) -> int:
    """Of pad: two numbers for each dimension, the last one first; of zeros nothing is added."""
    return max((place // 2 + 1 for place, side in enumerate(call.argument(1, "pad")) if side), default=0)


def rows(call: Call) -> Tag:
    """Of tensors that have the examples, and nothing else, in the first dimension."""
    names = [(value, ["rows", *((place, id(value)) for place in range(1, value.dim()))]) for value in call.tensors]
    return call.follows(names, ["rows"])


def shaped(call: Call) -> Tag:
    """The same numbers in their order with other dimensions."""
    value, layout = call.one
    new, count = call.result.shape, call.count
    outer, inner = prod(value.shape[: layout.dim]) * layout.before, layout.after * prod(value.shape[layout.dim + 1 :])
    for dim, size in enumerate(new):
        left, right = prod(new[:dim]), prod(new[dim + 1 :])
        if left and right and outer % left == 0 == inner % right and outer // left * count * (inner // right) == size:
            return Layout(dim, outer // left, inner // right)
    return call.mixes("tears examples apart")


def permuted(call: Call) -> Tag:
    """Dimensions in another order."""
    value, layout = call.one
    named = {name: given for name, given in call.named.items() if name not in ("input", "self")}
    given = (tuple(each) if isinstance(each, list) else each for each in (*call.args[1:], *named.values()))
    return layout.at(_order(call.name, value.dim(), tuple(given), tuple(named)).index(layout.dim))


@lru_cache(maxsize=1024)
def _order(name: str, wide: int, given: tuple[Any, ...], names: tuple[str, ...]) -> list[int]:
    """The dimensions of a tensor of `wide` of them in their new order: sizes that tell them apart show it."""
    probe, more = torch.empty(list(range(2, 2 + wide)), device="meta"), given[len(given) - len(names) :]
    method = getattr(Tensor, name, None)
    args = given[: len(given) - len(names)]
    moved = method(probe, *args, **dict(zip(names, more, strict=True))) if callable(method) else getattr(probe, name)
    return [size - 2 for size in moved.shape]


def repeated(call: Call) -> Tag:
    """expand, repeat and tile: more of the same, but not as much as there are examples."""
    value, layout = call.one
    given = [size for size in leaves((call.args[1:], tuple(call.named.values()))) if not isinstance(size, Tensor)]
    more = call.result.dim() - value.dim()
    if any(isinstance(size, Count) and (place != layout.dim + more or len(given) != call.result.dim())
           for place, size in enumerate(given)):  # fmt: skip
        return call.mixes("makes a copy for each example")
    times = call.result.shape[layout.dim + more] // value.shape[layout.dim]
    return Layout(layout.dim + more, times * layout.before, layout.after)


def interleaved(call: Call) -> Tag:
    value, layout = call.one
    times, dims = call.argument(1, "repeats"), call.dims(value.dim(), 2)
    if not isinstance(times, int):
        return Mixed("repeat_interleave by numbers of the data")
    return layout if dims != [layout.dim] else Layout(layout.dim, layout.before, layout.after * times)


def joined(call: Call) -> Tag:
    """cat and stack. Batches one behind the other along the examples are one batch with more before each example."""
    parts = [part for part in call.tensors if part.shape != (0,)]  # which cat leaves out
    (dim,) = call.dims(call.result.dim(), 1, "dim", "axis", default=0)
    layouts = [layout for part in parts if (layout := call.layout(part)) is not None]
    if len(layouts) < len(parts):
        return call.mixes(BY_PLACE)
    after = layouts[0].after
    if call.name == "cat" and {(layout.dim, layout.after) for layout in layouts} == {(dim, after)}:
        return Layout(dim, sum(layout.before for layout in layouts), after)
    names = _own(parts[0])
    result = [*names[:dim], "new", *names[dim:]] if call.name == "stack" else names
    return call.follows([(part, names) for part in parts], result)


def cut(call: Call) -> Tag:
    """Parts of a tensor, one behind the other, along one dimension: chunk, split, narrow."""
    value, layout = call.one
    single = isinstance(call.result, Tensor)
    parts = [call.result] if single else list(call.result)
    (dim,) = call.dims(value.dim(), 1 if call.name == "narrow" else 2, default=0)
    block, start, found = call.count * layout.after, int(call.argument(2, "start", default=0)) * single, list[Tag]()
    for part in parts:
        whole = dim != layout.dim or (start % block == 0 == part.shape[dim] % block)
        before = layout.before if dim != layout.dim else part.shape[dim] // block
        found.append(Layout(layout.dim, before, layout.after) if whole else call.mixes("tears examples apart"))
        start += part.shape[dim]
    return found[0] if single else found


def padded(call: Call) -> Tag:
    """Packed sequences of equal lengths, (T * n, ...), as (n, T, ...) or (T, n, ...), and their lengths."""
    _, layout = call.one
    if layout != Layout(0, layout.before):
        raise Unserved(f"{call.name} of examples in another dimension")
    return [Layout(0 if call.args[2] else 1), Layout(0)]


def one_hot(call: Call) -> Tag:
    _, layout = call.one
    return layout if call.argument(1, "num_classes", default=-1) > 0 else Mixed("one_hot without num_classes")


def matrix_names(left: int, right: int) -> tuple[str, str, str]:
    """The letters of a matrix product of tensors of so many dimensions."""
    batch = "abcdefgh"[: max(left, right, 2) - 2]
    first, second = (batch[len(batch) - max(dims - 2, 0) :] for dims in (left, right))
    return first + "mk"[left == 1 :], second + "kp"[: min(right, 2)], batch + "m" * (left > 1) + "p" * (right > 1)


def matmul(call: Call) -> Tag:
    *extra, left, right = call.tensors  # addmm and baddbmm have a summand first
    one, other, result = matrix_names(left.dim(), right.dim())
    sums = [(value, result[len(result) - value.dim() :]) for value in extra]
    return call.follows([(left, one), (right, other), *sums], result)


def einsum_names(equation: str) -> tuple[list[str], str]:
    """The letters of each tensor and of the result. Unserved without an arrow, or with dots."""
    if "->" not in equation or "." in equation:
        raise Unserved("einsum without an arrow or with dots")
    given, result = equation.replace(" ", "").split("->")
    return given.split(","), result


def einsum(call: Call) -> Tag:
    names, result = einsum_names(call.args[0])
    return call.follows(list(zip(call.tensors, names, strict=True)), result)


def attention(call: Call) -> Tag:
    wide = call.result.dim()
    ends = {"query": "le", "key": "se", "value": "sf", "attn_mask": "ls"}
    given = [(call.argument(place, name), end) for place, (name, end) in enumerate(ends.items())]
    parts = [(value, [*_own(value, wide)[:-2], *end]) for value, end in given if isinstance(value, Tensor)]
    return call.follows(parts, [*range(wide - 2), *"lf"])


def pairs(place: int | None, default: int) -> Check:
    """A number for each pair of vectors along one dimension, which is named at this place."""

    def check(call: Call) -> Tag:
        wide = max(value.dim() for value in call.tensors)
        dims = [default % wide] if place is None else call.dims(wide, place, default=default)
        return _working(call, call.tensors, dims, keeps=None)

    return check


def gathered(call: Call) -> Tag:
    """gather, scatter and take_along_dim: places within each example."""
    first = call.tensors[0]
    dims = call.dims(first.dim(), 2 if call.name == "take_along_dim" else 1)
    if any(value.dim() != first.dim() for value in call.tensors):
        raise Unserved(f"{call.name} of tensors of other dimensions")
    if any(call.layout(value) is None for value in call.tensors):
        return call.mixes(BY_PLACE)
    return _working(call, call.tensors, dims, keeps=True)


# The place of the reduction among the arguments, if it is not 2.
_REDUCTION_AT = {
    name: place
    for place, names in (
        (3, "cross_entropy_loss nll_loss nll_loss_nd binary_cross_entropy hinge_embedding_loss"),
        (4, "binary_cross_entropy_with_logits cosine_embedding_loss margin_ranking_loss"),
        (5, "poisson_nll_loss multi_margin_loss"),
        (7, "triplet_margin_loss"),
    )
    for name in names.split()
}
_OF_ROWS = "multi_margin_loss cosine_embedding_loss margin_ranking_loss hinge_embedding_loss triplet_margin_loss"
# Losses whose arguments may differ in their dimensions; those of others would be broadcast against each other.
_OF_SEVERAL = "cross_entropy_loss nll_loss nll_loss_nd multi_margin_loss cosine_embedding_loss"


def loss(call: Call) -> Tag:
    """A loss of torch.nn without a reduction, of rows (n, classes, ...) or of equal shapes, or of pairs of rows."""
    at = _REDUCTION_AT.get(call.name, 2)
    if call.argument(at, "reduction", default=1) not in (0, "none"):
        return call.mixes("reduces over examples")
    wide = {value.dim() for value in call.tensors}
    if len(wide) > 1 and call.name not in _OF_SEVERAL.split():
        return call.mixes("pairs examples with each other")
    if call.name in _OF_ROWS.split():
        return rows(call)
    given, wanted, *others = call.args[:at]
    own = _own(given) if wanted.dim() == given.dim() else [0, *_own(given)[2:]]
    parts = [(given, _own(given)), (wanted, own)]
    if call.name.startswith("binary"):  # its weights are those of elements, and not of classes
        parts += [(each, _own(each, given.dim())) for each in others if isinstance(each, Tensor)]
    return call.follows(parts, own if call.result.dim() == len(own) else _own(given))


def ctc(call: Call) -> Tag:
    """The CTC loss of log probabilities (T, n, classes), targets (n, S), and the lengths of both."""
    if call.argument(5, "reduction", default=1) != 0:
        return call.mixes("reduces over examples")
    values, targets, *lengths = call.args[:4]
    if targets.dim() != 2 or not all(isinstance(each, Tensor) for each in lengths):
        raise Unserved(f"{call.name} of targets one behind the other")
    return call.follows([(values, "tnc"), (targets, "ns"), *((each, "n") for each in lengths)], "n")


def picked(call: Call) -> Tag:
    """Part of a tensor by an index, in which there may be the numbers of the examples."""
    value, index = call.args[0], _whole_index(*call.args)
    layout, spots = call.layout(value), [place for place, part in enumerate(index) if isinstance(part, Tensor)]
    is_apart = spots and (spots[-1] - spots[0] >= len(spots) or any(isinstance(part, int) for part in index))
    if is_apart or not all(part is None or type(part) in (int, slice) or isinstance(part, Tensor) for part in index):
        return Mixed("an index of an unusual form")
    if any(isinstance(part, Tensor) and part.dtype is torch.bool for part in index):
        return Mixed("a mask picks entries")
    wide = max((index[place].dim() for place in spots), default=0)
    names, result, parts = list[object](), list[object](), list[tuple[Tensor, Names]]()
    for place, part in enumerate(index):
        dim = len(names)
        if isinstance(part, Tensor):
            own = [("index", each) for each in range(wide - part.dim(), wide)]
            result += [("index", each) for each in range(wide)] if place == spots[0] else []
            # With its own number for each example the dimension of the examples is that of the numbers.
            names.append(own[0] if id(part) in call.places and layout == Layout(dim) else dim)
            parts += [(part, own)] if id(part) not in call.places else []
        elif part is None:
            result.append(("new", place))
        else:
            names.append(dim)
            if layout is not None and layout.dim == dim and part != slice(None):
                return _sliced(call, layout, part, len(result))
            if any(isinstance(each, Count) for each in leaves(part)):
                return call.mixes("counts examples")
            result += [dim if part == slice(None) else (dim, "part")] if isinstance(part, slice) else []
    if any(id(index[place]) in call.places for place in spots) and not any(isinstance(name, tuple) for name in names):
        return call.mixes(BY_PLACE)
    return call.follows([(value, names), *parts], result)


def _whole_index(value: Tensor, index: Any) -> list[Any]:
    """An index with a part for each dimension, lists as tensors."""
    given = index if isinstance(index, tuple) else (index,)
    missing = value.dim() - sum(part is not None and part is not ... for part in given)
    given = given if any(part is ... for part in given) else (*given, ...)
    parts = [each for part in given for each in ([slice(None)] * missing if part is ... else [part])]
    return [torch.as_tensor(part) if isinstance(part, list) else part for part in parts]


def _sliced(call: Call, layout: Layout, part: Any, place: int) -> Tag:
    """A part along the dimension of the examples, that is a whole number of batches: a half of two joined ones, say."""
    block = call.count * layout.after
    if isinstance(part, slice):
        start, stop, step = part.indices(call.args[0].shape[layout.dim])
        after = (each for each in _whole_index(*call.args)[layout.dim + 1 :] if each != slice(None))
        if step == 1 and start % block == 0 == stop % block and not any(isinstance(each, Tensor) for each in after):
            return Layout(place, (stop - start) // block, layout.after)
    return Mixed("an index picks some examples")


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
    "requires_grad alias data real positive zeros_like ones_like full_like empty_like rand_like randn_like bernoulli "
    "fill zero normal uniform exponential dropout alpha_dropout copy broadcast_tensors"
)
_BY_NAMES: list[tuple[str, Check]] = [
    (_ELEMENTWISE, elementwise),
    ("view reshape flatten unflatten squeeze unsqueeze ravel view_as reshape_as unsafe_view atleast_2d", shaped),
    ("transpose permute movedim moveaxis swapaxes swapdims t T mT adjoint H mH", permuted),
    ("expand expand_as broadcast_to repeat tile", repeated),
    ("repeat_interleave", interleaved),
    ("cat concat concatenate stack", joined),
    ("chunk split split_with_sizes tensor_split narrow", cut),
    ("mean sum nansum amax amin prod var std logsumexp all any median max min argmax argmin count_nonzero", along(1)),
    ("softmax log_softmax cumsum cumprod cummax cummin logcumsumexp flip", along(1, keeps=True)),
    ("sort argsort glu", along(1, -1, keeps=True)),
    ("topk kthvalue", along(2, -1, keeps=True)),
    ("norm roll linalg_vector_norm", along(2)),
    ("unbind select", along(1, 0, keeps=False)),
    ("pad_packed_sequence", padded),
    ("one_hot", one_hot),
    ("tril triu", over_last(2)),
    ("max_pool1d avg_pool1d adaptive_avg_pool1d adaptive_max_pool1d max_pool1d_with_indices upsample_nearest1d "
     "upsample_linear1d", over_last(1, least=1)),
    ("max_pool2d avg_pool2d adaptive_avg_pool2d adaptive_max_pool2d max_pool2d_with_indices upsample_nearest2d "
     "upsample_bilinear2d upsample_bicubic2d pixel_shuffle pixel_unshuffle", over_last(2, least=1)),
    ("max_pool3d avg_pool3d adaptive_avg_pool3d adaptive_max_pool3d max_pool3d_with_indices upsample_nearest3d "
     "upsample_trilinear3d", over_last(3, least=1)),
    ("pad", over_last(_padded_dims)),
    ("layer_norm rms_norm", over_last(lambda call: len(call.argument(1, "normalized_shape")))),
    ("unfold index_select", along(1, keeps=True)),
    ("im2col col2im channel_shuffle feature_dropout feature_alpha_dropout max_unpool2d max_unpool3d "
     "fractional_max_pool2d fractional_max_pool3d", rows),
    ("matmul mm bmm mv dot addmm addmv baddbmm", matmul),
    ("einsum", einsum),
    ("getitem", picked),
    ("scaled_dot_product_attention", attention),
    ("cosine_similarity", pairs(2, 1)),
    ("pairwise_distance", pairs(None, -1)),
    ("gather scatter scatter_add take_along_dim", gathered),
    ("cross_entropy_loss nll_loss nll_loss_nd mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy "
     "binary_cross_entropy_with_logits kl_div poisson_nll_loss soft_margin_loss", loss),
    (_OF_ROWS, loss),
    ("ctc_loss", ctc),
]  # fmt: skip
CHECKS: dict[str, Check] = {name: check for names, check in _BY_NAMES for name in names.split()}
