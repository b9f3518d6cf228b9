"""Models by name, ours or one's own. None mixes the examples of a batch: every example has a gradient of its own."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from discreet.tasks.examples import Task
from discreet.tasks.parameters import check_model, flatten_parameters, load_parameters, named_parameters_of
from discreet.tasks.recurrent_model import character_lstm
from discreet.tasks.scattering import Scattering

__all__ = [
    "MODELS",
    "build_model",
    "check_fits",
    "check_model",
    "flatten_parameters",
    "load_parameters",
    "named_parameters_of",
]

Builder = Callable[[tuple[int, ...], int], nn.Module]


def _logistic_regression(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), num_classes))


def _perceptron(*hidden: int) -> Builder:
    def build(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        widths = (math.prod(input_shape), *hidden)
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise(widths):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(widths[-1], num_classes))

    return build


def _cnn(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Convolutions with tanh, whose bounded activations suit clipped gradients (Papernot et al. 2021)."""
    sizes = {(8, 8): _cnn8, (28, 28): _cnn28, (32, 32): _cnn32}
    if len(input_shape) != 3 or input_shape[1:] not in sizes:
        known = ", ".join(f"{height}x{width}" for height, width in sizes)
        raise ValueError(f"model.name: cnn reads images (channels, height, width) of {known}, not {input_shape}")
    return sizes[input_shape[1:]](input_shape[0], num_classes)


def _cnn8(channels: int, num_classes: int) -> nn.Module:
    blocks: list[nn.Module] = []
    for before, after in ((channels, 16), (16, 32)):
        blocks += [nn.Conv2d(before, after, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(128, 32), nn.Tanh(), nn.Linear(32, num_classes))


def _cnn28(channels: int, num_classes: int) -> nn.Module:
    """The MNIST network of Papernot et al. 2021 and Tramer and Boneh 2021: 26 010 parameters."""
    return nn.Sequential(
        nn.Conv2d(channels, 16, 8, stride=2, padding=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, stride=1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, num_classes),
    )


def _cnn32(channels: int, num_classes: int) -> nn.Module:
    """The CIFAR-10 network of Papernot et al. 2021 and Tramer and Boneh 2021: 550 570 parameters."""
    blocks: list[nn.Module] = []
    for before, after in ((channels, 32), (32, 64), (64, 128)):
        blocks += [nn.Conv2d(before, after, 3, padding=1), nn.Tanh()]
        blocks += [nn.Conv2d(after, after, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(2048, 128), nn.Tanh(), nn.Linear(128, num_classes))


def _lstm(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    if len(input_shape) != 1 or input_shape[0] < 1:
        raise ValueError(f"model.name: lstm reads token ids of shape (steps,), not {input_shape}")
    return character_lstm(num_classes)


def _scattering(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A linear model on scattering features, as of Tramer and Boneh 2021."""
    try:
        fixed = Scattering(input_shape)
    except ValueError as error:
        raise ValueError(f"model.name: {error}") from error
    return nn.Sequential(fixed, nn.Linear(fixed.out_features, num_classes))


MODELS: dict[str, Builder] = {
    "logistic_regression": _logistic_regression,
    "mlp": _perceptron(128),
    # Two layers of 200, as in TensorFlow Federated's tutorials and McMahan et al. 2017 ("2NN").
    "mlp200": _perceptron(200, 200),
    "cnn": _cnn,
    "scattering": _scattering,
    "lstm": _lstm,
}
_TEXT_MODELS = frozenset({"lstm"})
OWN = ":"  # in the name of a model of one's own, `package.module:function`
# For a model that is built only to see whether it can be.
_TRIAL_SEED = 7
_TRIAL_EXAMPLES = 3


def build_model(name: str, input_shape: tuple[int, ...], num_classes: int, *, seed: int) -> nn.Module:
    """The model `name` for inputs (n, *input_shape), giving logits (n, num_classes), on the CPU.

    `name` is one of `MODELS`, or `package.module:function` with a function like theirs: from an input shape and a
    number of classes to a module. The same `seed` gives the same initial parameters; the global random generator is
    left as it was. Raises ValueError for an unknown name, or where the model cannot take the input shape, naming both.
    """
    builder = MODELS.get(name) or _own_builder(name)
    with torch.random.fork_rng(devices=[]):
        # Only the CPU's generator, which fork_rng restores: torch.manual_seed would change the GPU's too.
        torch.default_generator.manual_seed(seed)
        try:
            model = builder(tuple(input_shape), num_classes)
        except (TypeError, RuntimeError) as error:
            raise ValueError(f"model.name: {name}({tuple(input_shape)}, {num_classes}) failed: {error}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"model.name: {name} gave a {type(model).__name__}, not a torch.nn.Module")
    return model


def _own_builder(name: str) -> Builder:
    if OWN not in name:
        known = f"{', '.join(MODELS)}, or package.module:function"
        raise ValueError(f"model.name: no model {name!r}; known are {known}")
    module, _, function = name.partition(OWN)
    here = str(Path.cwd())  # not on the path of every process that builds a model: Flower starts its own commands
    if here not in sys.path:
        sys.path.append(here)
    try:
        builder = getattr(importlib.import_module(module), function)
    except (ImportError, SyntaxError, ValueError) as error:
        raise ValueError(f"model.name: {module!r} of {name} can't be imported: {error}") from error
    except AttributeError as error:
        raise ValueError(f"model.name: {module} has no {function!r}") from error
    if not callable(builder):
        raise ValueError(f"model.name: {name} is a {type(builder).__name__}, not a function")
    found: Builder = builder
    return found


def check_fits(name: str, task: Task) -> None:
    """Raise ValueError, naming the model and the data set, where model `name` cannot learn the task.

    Shapes are tried on three examples of the public test set, and text models need token ids where the others need
    numbers, which a shape does not tell. Refused too: what `check_model` refuses, outputs that are not one row of
    logits for each example, an example that changes the outputs of another, and random numbers drawn in the model.
    """
    reads_text, is_text = name in _TEXT_MODELS, not task.train.inputs.is_floating_point()
    if name in MODELS and reads_text != is_text:
        words = {True: "text", False: "numbers"}
        raise ValueError(f"model.name: {name} reads {words[reads_text]}, but {task.name} is {words[is_text]}")
    try:
        model = build_model(name, task.input_shape, task.num_classes, seed=_TRIAL_SEED)
        check_model(model)
        _check_chain(name, model)
        _try_model(name, model, task)
    except ValueError as error:
        raise ValueError(f"{error} (data.name: {task.name})") from error


def num_params_of(name: str, task: Task) -> int:
    """How many parameters model `name` has for a task."""
    model = build_model(name, task.input_shape, task.num_classes, seed=_TRIAL_SEED)
    return sum(parameter.numel() for parameter in model.parameters())


def _check_chain(name: str, model: nn.Module) -> None:
    """The simulation trains an nn.Sequential by its layers, each with parameters of its own and nothing around it."""
    if type(model) is not nn.Sequential:
        return
    tied = sum(len(list(layer.parameters())) for layer in model) > len(list(model.parameters()))
    if tied or any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.modules()):
        raise ValueError(
            f"model.name: {name} is an nn.Sequential with shared parameters or hooks: give it a class with a forward"
        )


@torch.no_grad()
def _try_model(name: str, model: nn.Module, task: Task) -> None:
    inputs = task.test.inputs[:_TRIAL_EXAMPLES]
    model.train()
    with torch.random.fork_rng(devices=[]):
        try:
            logits, again = model(inputs), model(inputs)
            alone = [model(one) for one in torch.split(inputs, 1)]
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise ValueError(f"model.name: {name} can't read inputs of shape {task.input_shape}: {error}") from error
    wanted = (len(inputs), task.num_classes)
    if not isinstance(logits, torch.Tensor) or tuple(logits.shape) != wanted:
        given = tuple(logits.shape) if isinstance(logits, torch.Tensor) else type(logits).__name__
        raise ValueError(f"model.name: {name} gives {given} for {len(inputs)} inputs, not logits of shape {wanted}")
    if not torch.equal(logits, again):
        raise ValueError(f"model.name: {name} draws random numbers (dropout), which no seed here controls")
    if not torch.allclose(logits, torch.cat(alone), rtol=1e-3, atol=1e-4):
        raise ValueError(
            f"model.name: {name} mixes the examples of a batch: no gradient of a single example exists to be clipped"
        )
