"""A trial of a model and a loss on made-up examples, before they see any data. It asks three
questions: does a forward keep something (here), do examples mix, or differ from plain autograd
(`agreement.py`), and does the loss mix them (`loss_trial.py`)?

A clipped sum bounds the influence of an example on the gradients, and on nothing else. So a forward
must not change its model, and its outputs must not depend on earlier inputs. Nor may it seed
PyTorch's generators: its numbers, and those of all that draw later, would be known.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, is_dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from discreet.layers.draws import generator_states, seed_draws
from discreet.layers.functions import (
    ATTENTION,
    DRAWING,
    DROPPING,
    FILLING,
    OF_ATTENTION,
    RANDOM,
    RECURRENT,
    by_name,
    called_inside,
    function_of,
    with_rate,
)
from discreet.layers.model_state import tensors_of, writes
from discreet.layers.refusals import CONFUSED, place
from discreet.per_example.attributes import Attributes, keeps
from discreet.per_example.graphs import Graphs
from discreet.per_example.objective import Objective, Tree, count_of, mapped, rows_of, with_floats

# largest difference by rounding, as a share of the largest value
_AGREEMENT = 1e-3  # between different kernels
_COARSE_AGREEMENT = 0.05  # in bfloat16, over many layers
_REPEATED = 1e-5  # between runs of the same kernels
SEED = 52183
_OTHER_SEED = 90481
ROWS = 7  # made-up examples; 7 is seldom another size in a model
KINDS = range(3)  # kinds of made-up whole numbers
UNREPEATED = (
    "the model gives different outputs for the same inputs: it keeps something of earlier inputs, "
    "or draws random numbers that torch.manual_seed does not repeat"
)
State = dict[str, tuple[Tensor, int, Tensor]]  # each tensor, how often it was written, and a copy


@dataclass(frozen=True)
class Trial:
    """A model and a loss that are new here. Of the inputs only shapes and types are used, and of
    the targets a few rows, of which none decides alone."""

    objective: Objective
    inputs: Tree
    targets: Tree

    @property
    def device(self) -> torch.device:
        return self.objective.parameters[0].device

    def examples(self, seed: int = 0, *, kind: int = 0) -> Tree:
        """`ROWS` made-up examples."""
        return made_up(self.objective.model, self.inputs, ROWS, seed, kind=kind)

    def targets_of(self, examples: Tree, *, of_one: bool = False) -> Tree:
        """Targets for made-up examples: some of those given, or, `of_one`, the first for all."""
        if self.targets is self.inputs:
            return examples
        last = 0 if of_one else count_of(self.targets) - 1
        return rows_of(self.targets, torch.linspace(0, last, ROWS).long())


def check_layers(model: nn.Module) -> None:
    """Raises ValueError for layers with batch statistics or running statistics, for an embedding
    table that a pass changes or whose gradients count rows over a batch, and if an example's values
    decide how many random numbers are drawn."""
    for name, layer in model.named_modules():
        kind = type(layer).__name__
        if name:
            named = f"layer {name!r} ({kind})"
        else:
            named = kind
        running = getattr(layer, "running_mean", None) is not None
        if isinstance(layer, _NormBase) and (
            layer.training if running else isinstance(layer, _BatchNorm)
        ):
            raise ValueError(
                f"{named} mixes examples: use GroupNorm instead (discreet.to_group_norm makes it)"
                + (
                    ", or put the layer in eval mode, so that its statistics stay as they are"
                    if running
                    else ""
                )
            )
        is_table = isinstance(layer, nn.Embedding | nn.EmbeddingBag)
        if is_table and (layer.max_norm is not None or layer.scale_grad_by_freq):
            raise ValueError(
                "an embedding with max_norm or scale_grad_by_freq mixes examples: switch both off"
            )
        if isinstance(layer, nn.RReLU) and layer.training:
            raise ValueError(
                f"{named} draws a number for each value below 0: use LeakyReLU or PReLU"
            )


@contextmanager
def same_chance(device: torch.device, seed: int = SEED) -> Iterator[None]:
    """A context with the same random numbers each time; afterwards the generators are restored."""
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        seed_draws(seed, device)
        yield


class Undrawn(TorchFunctionMode):
    """A context in which dropout keeps everything, each drawn number is one half or, if it is
    whole, 0, and a random order is the reverse."""

    inner: Any = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        named = kwargs or {}
        name = getattr(func, "__name__", "")
        if type(func) is FunctionType and func is not self.inner:
            return called_inside(self, func, types, args, named)
        if name not in RANDOM:
            return func(*args, **named)
        if name == ATTENTION:
            named = by_name(OF_ATTENTION, args, named) | {"dropout_p": 0.0}
            args = ()
        if name in RECURRENT:  # `train` stays: without it a GPU has no backward pass
            args = with_rate(args, lambda _: 0.0)
        if name in DROPPING:
            return args[0]
        result = func(*args, **named)
        return self.drawn(result, name, args, named) if name in DRAWING else result

    def drawn(self, result: Tensor, name: str, _args: Any, _named: Any) -> Tensor:
        """Writes what is drawn into the result of a function."""
        if name == "randperm":
            return result.copy_(torch.arange(len(result)).flip(0))
        return result.fill_(0.5 if name in FILLING else 0)


def _parts(kind: str) -> list[Any]:
    """What has a setting by which products of float32 may be rounded more, on a kind of device
    (PyTorch 2.9 or newer)."""
    backends = torch.backends
    library: Any = backends.mkldnn if kind == "cpu" else backends.cudnn
    found = [getattr(library, name, None) for name in ("matmul", "conv", "rnn")]
    if kind != "cpu":
        found.append(backends.cuda.matmul)
    return [each for each in found if hasattr(each, PRECISION)]


PRECISION = "fp32_precision"
FLOAT32 = "ieee"  # its value for 24 bits
PARTS = {kind: _parts(kind) for kind in ("cpu", "cuda")}


def exact_products(device: torch.device) -> AbstractContextManager[None]:
    """A context in which float32 is multiplied in float32. TF32, on a GPU the default of
    convolutions, has 11 bits, and bfloat16 (`torch.set_float32_matmul_precision("medium")`) has 8.
    A norm would be too small by more than its margin, a sum off by more than its bound, and a
    forward that mixes examples hidden."""
    parts = PARTS["cpu" if device.type == "cpu" else "cuda"]
    if not parts:
        from discreet.per_example.older_pytorch import exact_products as of_older

        return of_older()
    before = [getattr(each, PRECISION) for each in parts]
    if {*before} <= {FLOAT32, "none"}:
        return nullcontext()
    return _set_exact(parts, before)


@contextmanager
def _set_exact(parts: list[Any], before: list[str]) -> Iterator[None]:
    for each in parts:
        setattr(each, PRECISION, FLOAT32)
    try:
        yield
    finally:
        for each, was in zip(parts, before, strict=True):
            setattr(each, PRECISION, was)


def made_up(model: nn.Module, inputs: Tree, count: int, seed: int = 0, *, kind: int = 0) -> Tree:
    """Examples of the inputs' types and shapes, the same each time: floats between 0 and 1, and
    whole numbers that are embedding ids. With `kind` 1 whole numbers are 1 or 2, like lengths; with
    kind 2 they are 0 or 1, like masks."""
    draws = torch.Generator().manual_seed(40093 + seed)
    tables = [
        part.num_embeddings
        for part in model.modules()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag)
    ]
    least, end = ((0, min(tables, default=2)), (1, 3), (0, 2))[kind]

    def made(value: Any, count: int = count) -> Any:
        if isinstance(value, Graphs):
            return value.made_up(count, made, draws)
        shape = (count, *value.shape[1:])
        if value.is_floating_point():
            return torch.rand(shape, generator=draws, dtype=value.dtype).to(value.device)
        found = torch.randint(least, end, shape, generator=draws)
        found[-1:] = end - 1  # for a mask, one that hides nothing
        return found.to(value)

    return mapped(made, inputs)


class _States(TorchFunctionMode):
    """Records the states of the generators before each call that may draw, and where it is."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.seen = list[tuple[str, list[Tensor]]]()
        self.inner: Any = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        function = function_of(func)
        named = kwargs or {}
        if function.is_python and func is not self.inner:
            return called_inside(self, func, types, args, named)
        if function.name in RANDOM and named.get("generator") is None:
            self.note(place())
        return func(*args, **named)

    def note(self, where: str) -> None:
        self.seen.append((where, generator_states(self.device)))


def check_forward(trial: Trial) -> Any:
    """The outputs of a model for `ROWS` made-up examples; None if it can't be called with them.

    Raises:
      ValueError: a layer is none of `check_layers`; or the model changes its own parameters or
        buffers, its outputs depend on earlier inputs, or it sets the state of a generator.
    """
    check_layers(trial.objective.model)
    # Such as that a deviation of one example has no degree of freedom.
    with trial.objective.put_back(), warnings.catch_warnings(action="ignore"):
        outputs = _tried_out(trial)
    _check_seeds(trial)
    return outputs


def _tried_out(trial: Trial) -> Any:
    objective = trial.objective
    before = Attributes(objective.kept)
    try:
        for kind in KINDS:
            try:
                examples = [trial.examples(seed, kind=kind) for seed in (0, 1)]
                with torch.enable_grad():
                    outputs, again, moved = two_passes(objective, *examples)
                break
            except CONFUSED:
                if kind == KINDS[-1]:  # only a loop over examples may work
                    return None
        if moved:
            raise ValueError(writes(moved))
        pairs = zip(floats_in(outputs), floats_in(again), strict=True)
        if any(differ(one.detach(), other.detach(), _REPEATED) for one, other in pairs):
            if kept := before.moved():
                raise ValueError(keeps(kept[0]))
            same = trial.examples(kind=kind)
            if not all(map(is_same, tree_leaves(examples[0]), tree_leaves(same))):
                raise ValueError("the model's forward writes into its inputs: clone them first")
            raise ValueError(UNREPEATED)
        return outputs
    finally:
        before.rebind()


def _check_seeds(trial: Trial) -> None:
    """Raises ValueError if a generator has the same state in two passes that begin with different
    ones, where the forward draws or at its end."""
    for kind in KINDS:
        with suppress(*CONFUSED):
            one, other = (_seen(trial, seed, kind) for seed in (SEED, _OTHER_SEED))
            break
    else:
        return  # the model can't be called with several examples
    for (where, states), (_, others) in zip(one, other, strict=False):
        if any(map(torch.equal, states, others)):
            raise ValueError(
                f"the model's forward sets the state of PyTorch's random generator{where} "
                "(torch.manual_seed, fork_rng, set_rng_state): its numbers would be known, and so "
                "those of all that draw later. Make fixed numbers once, as a buffer, or by a "
                "torch.Generator of their own"
            )


def _seen(trial: Trial, seed: int, kind: int) -> list[tuple[str, list[Tensor]]]:
    examples = trial.examples(kind=kind)
    chance = same_chance(trial.device, seed)
    with chance, trial.objective.put_back(), _States(trial.device) as states:
        with torch.enable_grad():
            trial.objective.outputs(examples)
        states.note("")
        found: list[tuple[str, list[Tensor]]] = states.seen
    return found


def two_passes(objective: Objective, inputs: Tree, others: Tree = None) -> tuple[Any, Any, str]:
    """The outputs of two passes with the same random numbers, and the name of a parameter or buffer
    that changed, or "". Between them a pass runs on `others`, scaled up: state that it leaves,
    such as a running maximum, shows in the second pass.

    A buffer that the first pass creates, such as a table of angles, may stay.
    """
    model = objective.model
    device = objective.parameters[0].device
    before = parameters_and_buffers(model)
    with same_chance(device):
        outputs = objective.outputs(inputs)
    moved = [name for name in moved_since(model, before) if name in dict(model.named_parameters())]
    before = parameters_and_buffers(model)
    if others is not None:
        with same_chance(device):
            objective.outputs(with_floats(lambda value: 10 * value, others))
    with same_chance(device):
        again = objective.outputs(inputs)
    return outputs, again, "".join([*moved, *moved_since(model, before)][:1])


@contextmanager
def unmoved(model: nn.Module) -> Iterator[None]:
    """A context in which parameters and buffers of the model must not change.

    Raises:
      ValueError: one changed; the message names it.
    """
    before = parameters_and_buffers(model)
    yield
    if moved := moved_since(model, before):
        raise ValueError(writes(moved[0]))


def parameters_and_buffers(model: nn.Module) -> State:
    """The parameters and buffers of a model, as they are."""
    return {
        name: (value, value._version, value.detach().clone())
        for name, value in tensors_of(model).items()
    }


def moved_since(model: nn.Module, before: State) -> list[str]:
    """The names of parameters and buffers that were written, replaced, added or removed."""
    now = tensors_of(model)
    kept = {
        name
        for name, (value, version, copy) in before.items()
        if now.get(name) is value and value._version == version and is_same(value, copy)
    }
    return sorted((before.keys() | now.keys()) - kept)


def is_same(one: Tensor, other: Tensor) -> bool:
    """True if tensors have the same shape and values, NaN included."""
    if one.shape != other.shape or one.layout != other.layout:
        return False
    if one.layout != torch.strided:
        one = one.to_dense()
        other = other.to_dense()
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def floats_in(outputs: Any) -> list[Tensor]:
    """The float tensors in a model's outputs, also of dataclasses, distributions and mappings, and
    those that another object has as attributes."""
    found = list[Tensor]()
    for value in tree_leaves(outputs):
        if isinstance(value, Tensor):
            found += [value] if value.is_floating_point() else []
        elif is_dataclass(value) or isinstance(value, Distribution):
            found += floats_in(vars(value))
        elif isinstance(value, Mapping):
            found += floats_in(list(value.values()))
        elif hasattr(value, "__dict__") and not isinstance(value, nn.Module):
            held = (each for each in vars(value).values() if isinstance(each, Tensor))
            found += floats_in(list(held))
    return found


def agreement(objective: Objective) -> float:
    """The share of the largest value by which rounding may move the results of a model."""
    return _COARSE_AGREEMENT if objective.rounds else _AGREEMENT


def differ(one: Tensor, other: Tensor, part: float = _AGREEMENT) -> bool:
    """True if values differ by more than a share `part` of the largest, or one is NaN alone."""
    if one.shape != other.shape or not one.numel():
        return one.shape != other.shape
    if not torch.equal(one.isnan(), other.isnan()):
        return True
    largest = one.abs().nan_to_num(0.0).max()
    return bool(((one - other).abs() > part * largest).any())
