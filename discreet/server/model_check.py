"""Models that cannot learn a task are refused before a run starts, where the server runs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedParameter

from discreet.data.examples import Task
from discreet.data.targets import CLASSES, LABELS, NUMBERS, SEQUENCES, SURVIVAL
from discreet.layers.model_state import writes
from discreet.models.models import (
    LSTM,
    MISTAKES,
    MODELS,
    dropout_layers,
    frozen,
    frozen_norms,
    model_for,
    to_train,
)
from discreet.per_example.left_outside import nothing_left
from discreet.per_example.objective import cross_entropy, objective_of, trainable
from discreet.per_example.trial import Trial, two_passes
from discreet.settings.training import ModelConfig

_TRIAL_SEED = 7
_OTHER_SEED = 24359
_TRIAL_EXAMPLES = 3
_OUTPUTS = {
    CLASSES: "logits",
    LABELS: "logits",
    NUMBERS: "numbers",
    SEQUENCES: "logits (inputs, classes, positions)",
    SURVIVAL: "logits of hazards",
}


def check_model(model: nn.Module) -> None:
    """Raises ValueError with the reason if `model` cannot be trained with per-example clipping.

    Refused: BatchNorm, which mixes the examples of a batch, so that there is no gradient of a
    single example, unless its weights and thereby its statistics are frozen; any other buffer that
    is saved with the model, since it would leave a client outside the clipped update; no trainable
    parameters; parameters that are NaN or infinite at the start; parameters that are not floats.
    """
    still = {id(layer) for layer in frozen_norms(model)}
    how = (
        "mixes the examples of a batch: use GroupNorm, by discreet.to_group_norm(model), or "
        "freeze its weights"
    )
    for name, module in model.named_modules():
        if isinstance(module, _BatchNorm) and id(module) not in still:
            raise ValueError(f"{name or 'the model'} is a {type(module).__name__}, which {how}")
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)} | frozen(
        model
    ).keys()
    saved = [name for name in model.state_dict(keep_vars=True) if name not in known]
    if saved:
        raise ValueError(
            f"the model saves the buffer {saved[0]}, which would leave a client without being "
            "clipped: register_buffer(..., persistent=False) keeps fixed numbers out of it"
        )
    if not any(parameter.numel() for parameter in trainable(model)):
        raise ValueError("the model has no trainable parameters")
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise ValueError(
                f"the parameter {name} is {parameter.dtype}; only floating-point parameters can "
                "be noised"
            )
        if not torch.isfinite(parameter).all():
            raise ValueError(
                f"the parameter {name} holds NaN or infinity before any training: mend its "
                "initial values"
            )


def check_fits(settings: ModelConfig, task: Task) -> int:
    """The number of trained parameters. Raises ValueError, naming the model and the data set, if
    the model of `settings` cannot learn the task.

    The model is tried on three examples of the public test set, or on zeros if there is none. Text
    models read token ids and the others numbers, which a shape does not tell. Also refused: models
    that `check_model` refuses, outputs of another shape, an example that changes the outputs of
    another, a forward that changes its own parameters or buffers or leaves something outside of
    the model, and random numbers outside dropout layers of torch.nn. So are frozen parameters that
    differ each time the model is built: they are not sent, as server and clients each build it.
    """
    name = settings.name
    reads_text = name == LSTM
    is_text = not task.train.inputs.is_floating_point()
    if name in MODELS and reads_text != is_text:
        words = {True: "text", False: "numbers"}
        raise ValueError(
            f"model.name: {name} reads {words[reads_text]}, but {task.name} is {words[is_text]}"
        )
    try:
        model = model_for(settings, task.shape, seed=_TRIAL_SEED)
        _check_sizes(name, model)
        check_model(model)
        _check_frozen(name, model, model_for(settings, task.shape, seed=_OTHER_SEED))
        _try_model(name, model, task)
    except ValueError as error:
        raise ValueError(f"{error} (data.name: {task.name})") from error
    return sum(parameter.numel() for parameter in trainable(model))


def _check_sizes(name: str, model: nn.Module) -> None:
    """Raises ValueError for a layer that has no size before its first call."""
    for parameter, value in model.named_parameters():
        if isinstance(value, UninitializedParameter):
            raise ValueError(
                f"model.name: {name} has no size for {parameter} yet: give each layer its sizes, "
                "as in nn.Linear(8, 3) instead of nn.LazyLinear(3)"
            )


def _check_frozen(name: str, model: nn.Module, again: nn.Module) -> None:
    one = frozen(model)
    other = frozen(again)
    how = (
        "other values each time it is built: load them from a file, or draw them from a seeded "
        "torch.Generator"
    )
    for parameter in sorted(one.keys() | other.keys()):
        if (
            parameter not in one
            or parameter not in other
            or not torch.equal(one[parameter], other[parameter])
        ):
            raise ValueError(f"model.name: {name} gives the frozen {parameter} {how}")


@torch.no_grad()
def _try_model(name: str, model: nn.Module, task: Task) -> None:
    inputs = task.test.inputs[:_TRIAL_EXAMPLES]
    shape = task.shape
    if len(inputs) == 0:
        inputs = task.train.inputs.new_zeros(_TRIAL_EXAMPLES, *shape.input_shape)
    to_train(model)
    for layer in dropout_layers(model):
        layer.eval()  # any remaining draw is not from dropout
    with torch.random.fork_rng(devices=[]):
        try:
            _, logits, moved = two_passes(objective_of(model, cross_entropy), inputs)
            again = model(inputs)
            alone = [model(one) for one in torch.split(inputs, 1)]
        except MISTAKES as error:
            raise ValueError(
                f"model.name: {name} can't read inputs of shape {shape.input_shape}: {error}"
            ) from error
    if moved:
        raise ValueError(f"model.name: {name}: {writes(moved)}")
    wanted = (len(inputs), *shape.output_shape)
    if not isinstance(logits, Tensor) or tuple(logits.shape) != wanted:
        given = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        what = f"{_OUTPUTS[shape.target.kind]} of shape {wanted}"
        raise ValueError(f"model.name: {name} gives {given} for {len(inputs)} inputs, not {what}")
    if not torch.equal(logits, again):
        raise ValueError(
            f"model.name: {name} draws random numbers by itself: only layers such as nn.Dropout may"
        )
    if not torch.allclose(logits, torch.cat(alone), rtol=1e-3, atol=1e-4):
        raise ValueError(
            f"model.name: {name} mixes the examples of a batch: none has a gradient of its own"
        )
    with nothing_left(Trial(objective_of(model, _sums), inputs, inputs)):
        model(inputs)
    try:
        with torch.enable_grad():
            torch.autograd.grad(model(inputs).sum(), trainable(model), allow_unused=True)
    except MISTAKES as error:
        raise ValueError(
            f"model.name: {name} has no gradient by its parameters: {error}"
        ) from error


def _sums(outputs: Tensor, _: object) -> Tensor:
    """A loss for models of any task."""
    return outputs.flatten(1).sum(1)
