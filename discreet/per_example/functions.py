"""The names by which a `TorchFunctionMode` sees functions of PyTorch, by what they do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch


def words(names: str) -> set[str]:
    return set(names.split())


SIZES = words("shape size numel nelement")
FACTS = words(
    "dim ndimension is_floating_point is_complex is_contiguous stride element_size get_device is_signed storage_offset "
    "data_ptr is_inference is_tensor type has_names repr format hash"
)
BANNED = words(
    "register_hook register_post_accumulate_grad_hook backward grad retain_grad grad_fn set_ resize_ __set__"
)
READS = words("__bool__ __int__ __float__ __complex__ __index__ item tolist is_nonzero")
WHOLE = words("all any sum mean max min amax amin count_nonzero")
COMPARED = words("eq ne lt le gt ge logical_not logical_and logical_or and or invert not neg abs add sub mul to")
FILLED = words("zeros ones full empty new_zeros new_ones new_full new_empty rand randn")
COPYING = words("expand repeat expand_as broadcast_to tile")
LIKE = words("view_as reshape_as expand_as")  # take the shape of another tensor
VIEWS = words("T mT H mH data real")  # attributes that are tensors
SHAPING = COPYING | words("view reshape unflatten narrow split chunk")  # may be given a size that counts examples
PYTHON = {"embedding_bag", "lstm_layer"}  # functions with rules that are written in Python
_ALIASES = {"radd": "add", "rmul": "mul", "iadd": "add_", "isub": "sub_", "imul": "mul_", "itruediv": "div_"}
_DRAWN = ("bernoulli", "rand", "randn", "rand_like", "randn_like", "uniform", "normal", "exponential")
DROPPING = {"dropout", "alpha_dropout", "feature_dropout", "feature_alpha_dropout", "dropout_"}
RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
FILLING = {name + end for name in _DRAWN for end in ("", "_")}
DRAWING = FILLING | DROPPING | {"scaled_dot_product_attention"}  # functions that may draw random numbers
# Of a PyTorch that has it: calls a function that is written in Python under the mode that asks.
redispatch = getattr(torch.overrides, "redispatch_function", None)


def name_of(func: Any) -> str:
    name: str = getattr(func, "__name__", "")
    if name == "__get__":
        return str(func.__self__.__name__)
    if name == "__set__":
        return name
    if name in READS:
        return name
    bare = name.strip("_") + ("_" if name.endswith("_") and not name.startswith("__") else "")
    return _ALIASES.get(bare, bare)


@dataclass(frozen=True, slots=True)
class Function:
    """A function of PyTorch, and how it is watched.

    Attributes:
      name: without the mark of one that writes.
      writes: True if it changes its first argument.
      is_python: True if it is written in Python, so that what it calls can be watched.
      is_fact: True if it tells nothing of values.
      is_special: True if it reads values, or fills a new tensor.
      may_have_rule: False for a function in Python that calls the one that a rule is for.
    """

    name: str
    writes: bool
    is_python: bool
    is_banned: bool
    is_fact: bool
    is_special: bool
    may_have_rule: bool


@lru_cache(maxsize=4096)
def function_of(func: Any) -> Function:
    """A function of PyTorch as a `TorchFunctionMode` is given it."""
    full, is_python = name_of(func), type(func) is FunctionType
    name = full if full.startswith("__") else full.rstrip("_")
    is_fact = name in FACTS or name in SIZES or (getattr(func, "__name__", "") == "__get__" and name not in VIEWS)
    special = name in READS or name in FILLED or name in WHOLE
    writes, ruled = full != name or name == "setitem", is_python == (name in PYTHON)
    return Function(name, writes, is_python, full in BANNED, is_fact, special, ruled)


def called_inside(mode: Any, func: Any, types: Any, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    """Calls a function of PyTorch that is written in Python, with a mode on for what it calls. `mode.inner` is the
    function meanwhile, so that the mode takes it for one that is not written in Python if it calls itself."""
    assert redispatch is not None
    before, mode.inner = mode.inner, func
    try:
        with mode:
            return redispatch(func, types, args, named)
    finally:
        mode.inner = before
