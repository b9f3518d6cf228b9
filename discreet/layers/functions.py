"""PyTorch's functions as a `TorchFunctionMode` sees them, and their properties by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch


def words(names: str) -> frozenset[str]:
    """The words of a text."""
    return frozenset(names.split())


# Functions that reveal nothing about values.
_FACTS = words(
    "shape size numel nelement dim ndimension is_floating_point is_complex is_contiguous stride "
    "element_size get_device is_signed storage_offset data_ptr is_inference is_tensor type "
    "has_names repr format hash device dtype"
)
_VIEWS = words("T mT H mH data real imag")  # attributes that are tensors
_BANNED = words(
    "register_hook register_post_accumulate_grad_hook backward grad retain_grad grad_fn set_ "
    "resize_ __set__"
)
READS = words("__bool__ __int__ __float__ __complex__ __index__ item tolist is_nonzero")
READ_ALIKE = READS | {"data"}  # of a parameter, which is the same for all examples
INDEXING = words("getitem setitem masked_select")  # the result's size may depend on a mask
COUNTING = words("nonzero argwhere where")  # with one argument the same holds
FILLED = words("zeros ones full empty new_zeros new_ones new_full new_empty")
MADE = FILLED | words("zeros_like ones_like full_like empty_like eye clone tensor arange linspace")
_DROPS = words("dropout alpha_dropout feature_dropout feature_alpha_dropout")
DROPPING = _DROPS | {f"{name}_" for name in _DROPS}
_DRAWN = (
    "bernoulli",
    "rand",
    "randn",
    "rand_like",
    "randn_like",
    "uniform",
    "normal",
    "exponential",
    "cauchy",
    "log_normal",
    "_standard_gamma",
    "_sample_dirichlet",
)
# Functions that return random numbers.
FILLING = frozenset(name + end for name in _DRAWN for end in ("", "_"))
# Functions that return random whole numbers; those of the first kind at most as many as there are.
CHOOSING = words("multinomial randint randint_like random_ poisson binomial geometric_")
DRAWING = FILLING | CHOOSING | {"randperm"}
OF_ATTENTION = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
RECURRENT = words("lstm gru rnn_tanh rnn_relu")
ATTENTION = "scaled_dot_product_attention"
RANDOM = DRAWING | DROPPING | RECURRENT | {ATTENTION}  # functions that may draw
# What a pass looks at before it calls one of these.
_SPECIAL = (
    READ_ALIKE
    | INDEXING
    | COUNTING
    | MADE
    | words("nested_tensor_from_mask_left_aligned requires_grad squeeze view")
)
_ALIASES = {
    "radd": "add",
    "rmul": "mul",
    "iadd": "add_",
    "isub": "sub_",
    "imul": "mul_",
    "itruediv": "div_",
}
_ASKING = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
# From PyTorch 2.13 on: calls a function written in Python under the calling mode.
redispatch = getattr(torch.overrides, "redispatch_function", None)
# Functions in Python that read no values and hide no parameter: their calls need not be seen.
_PLAIN = words(
    "relu relu6 softmax log_softmax softmin silu leaky_relu elu selu celu hardtanh hardswish "
    "hardsigmoid mish tanh sigmoid max_pool1d max_pool2d max_pool3d adaptive_avg_pool2d "
    "adaptive_avg_pool3d logsigmoid softplus normalize"
)


def by_name(names: Iterable[str], args: Iterable[Any], named: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, of which some were given by position."""
    return {**dict(zip(names, args, strict=False)), **named}


def affine(args: Sequence[Any], named: dict[str, Any]) -> Iterable[Any]:
    """The weight, bias and eps of a norm."""
    default = {"weight": None, "bias": None, "eps": 1e-5}
    return (default | by_name(default, args, named)).values()


def with_rate(args: tuple[Any, ...], rate: Callable[[float], float]) -> tuple[Any, ...]:
    """The arguments of a recurrent function with another rate of dropout between layers. Those of
    packed sequences have one more argument before it."""
    at = 6 if isinstance(args[3], list | tuple) else 5
    return (*args[:at], rate(args[at]), *args[at + 1 :])


@dataclass(frozen=True, slots=True)
class Function:
    """A function of PyTorch.

    Attributes:
      name: without the underscore of an in-place function.
      full: with it.
      writes: True if it changes its first argument.
      is_python: True if it is written in Python, so that its calls can be seen.
      is_plain: True if its calls need not be seen.
      is_fact: True if it reveals nothing about values.
      is_ordinary: True if a pass calls it as it is, unless it is given a parameter.
    """

    name: str
    full: str
    writes: bool
    is_python: bool
    is_plain: bool
    is_banned: bool
    is_fact: bool
    is_ordinary: bool


@lru_cache(maxsize=4096)
def function_of(func: Any) -> Function:
    """The properties of a function."""
    full = _name_of(func)
    if full.startswith("__"):
        name = full
    else:
        name = full.rstrip("_")
    is_fact = name in _FACTS or (getattr(func, "__name__", "") == "__get__" and name not in _VIEWS)
    writes = full != name or name == "setitem"
    is_python = type(func) is FunctionType
    is_ordinary = not writes and name not in _SPECIAL and full not in DRAWING
    return Function(
        name, full, writes, is_python, name in _PLAIN, full in _BANNED, is_fact, is_ordinary
    )


def _name_of(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        return str(func.__self__.__name__)
    if name == "__set__" or name in READS:
        return name
    bare = name.strip("_") + ("_" if name.endswith("_") and not name.startswith("__") else "")
    return _ALIASES.get(bare, bare)


def called_inside(
    mode: Any, func: Any, types: Any, args: tuple[Any, ...], named: dict[str, Any]
) -> Any:
    """Calls a function of PyTorch that is written in Python, with a mode on for its inner calls.
    During the call `mode.inner` is the function, so that the mode does not enter it again if it
    calls itself."""
    before = mode.inner
    mode.inner = func
    try:
        with mode:
            if redispatch is None:
                return undispatched(func)(*args, **named)
            return redispatch(func, types, args, named)
    finally:
        mode.inner = before


@lru_cache(maxsize=4096)
def undispatched(func: FunctionType) -> FunctionType:
    """A copy of a function of PyTorch that does not dispatch to a mode itself; its inner calls
    still do."""
    names = {**func.__globals__, **dict.fromkeys(_ASKING, _no)}
    copied = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    copied.__kwdefaults__ = func.__kwdefaults__
    return copied


def _no(*values: object) -> bool:
    return False
