"""Models by name, built-in or custom, their parameters as one vector, and their dropout masks.

No model mixes the examples of a batch: every example has its own gradient.
"""

from __future__ import annotations

import fnmatch
import hashlib
import importlib
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from discreet.data.examples import TaskShape
from discreet.layers.draws import drawn_from, torch_draws_from
from discreet.layers.recurrent import ClassesSecond, LastStep, LSTMLayer
from discreet.per_example.objective import trainable
from discreet.privacy.randomness import RandomSource
from discreet.settings.later import later
from discreet.settings.training import HF, LEAST_SQUARES, ModelConfig

Builder = Callable[[tuple[int, ...], int], nn.Module]


def _perceptron(*hidden: int) -> Builder:
    def build(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        layers: list[nn.Module] = [nn.Flatten()]
        for before, after in pairwise((math.prod(input_shape), *hidden, num_classes)):
            layers += [nn.Linear(before, after), nn.ReLU()]
        return nn.Sequential(*layers[:-1])

    return build


def _cnn(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Convolutions with tanh, whose bounded activations suit clipped gradients (Papernot et al.
    2021). For 28x28 and 32x32 pixels they are the MNIST and CIFAR-10 networks of that paper and of
    Tramer and Boneh 2021: 26 010 and 550 570 parameters."""

    def same(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1), nn.Tanh()]

    channels = input_shape[0]
    size = input_shape[1:]
    layers: list[nn.Module] = []
    if size == (8, 8):
        for before, after in ((channels, 16), (16, 32)):
            layers += [*same(before, after), nn.MaxPool2d(2)]
        flat = 128
        wide = 32
    elif size == (28, 28):
        layers += [
            nn.Conv2d(channels, 16, 8, stride=2, padding=2),
            nn.Tanh(),
            nn.MaxPool2d(2, stride=1),
        ]
        layers += [nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, stride=1)]
        flat = 512
        wide = 32
    elif size == (32, 32):
        for before, after in ((channels, 32), (32, 64), (64, 128)):
            layers += [*same(before, after), *same(after, after), nn.MaxPool2d(2)]
        flat = 2048
        wide = 128
    else:
        known = "8x8, 28x28, 32x32"
        raise ValueError(
            f"model.name: cnn reads images (channels, height, width) of {known}, not {input_shape}"
        )
    return nn.Sequential(
        *layers, nn.Flatten(), nn.Linear(flat, wide), nn.Tanh(), nn.Linear(wide, num_classes)
    )


def _lstm(
    input_shape: tuple[int, ...],
    num_classes: int,
    *,
    num_tokens: int = 0,
    at_each_step: bool = False,
) -> nn.Module:
    """Logits (n, num_classes) from token ids (n, steps), int64, with at least one step; or,
    `at_each_step`, logits (n, num_classes, steps), as losses of torch.nn take sequences.

    An embedding, LSTM layers, and a linear output from the last step, or from each, after McMahan
    et al. 2017, section 3 (widths 8, 256 and 256), with narrower layers. ids outside [0,
    num_tokens) raise IndexError.
    """
    if len(input_shape) != 1 or input_shape[0] < 1:
        raise ValueError(f"model.name: lstm reads token ids of shape (steps,), not {input_shape}")
    widths = (8, 128, 128)
    layers = nn.Sequential(*(LSTMLayer(before, after) for before, after in pairwise(widths)))
    embedding = nn.Embedding(num_tokens or num_classes, widths[0])
    output = nn.Linear(widths[-1], num_classes)
    parts = OrderedDict[str, nn.Module](embedding=embedding, recurrent=layers)
    if at_each_step:
        parts |= {"output": output, "turned": ClassesSecond()}
    else:
        parts |= {"last": LastStep(), "output": output}
    return nn.Sequential(parts)


def _scattering(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """A linear model on scattering features, as in Tramer and Boneh 2021."""
    from discreet.models.scattering import Scattering

    fixed = Scattering(input_shape)
    return nn.Sequential(fixed, nn.Linear(fixed.out_features, num_classes))


MODELS: dict[str, Builder] = {
    "logistic_regression": _perceptron(),
    "mlp": _perceptron(128),
    # Two layers of 200, as in TensorFlow Federated's tutorials and McMahan et al. 2017 ("2NN").
    "mlp200": _perceptron(200, 200),
    "cnn": _cnn,
    "scattering": _scattering,
    "lstm": _lstm,
    "linear": _perceptron(),  # logistic_regression by its usual name in regression
    LEAST_SQUARES: later("discreet.models.least_squares", "least_squares_model"),
}


LSTM = "lstm"  # the model that reads tokens
BATCH = 1024  # examples of a forward

# The errors that a mistake in a custom model may raise.
MISTAKES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NameError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
)

OWN = ":"  # in the name of a custom model, `package.module:function`


def build_model(
    name: str, input_shape: tuple[int, ...], num_classes: int, *, seed: int
) -> nn.Module:
    """`model_for` with classes; `lstm` gets `num_classes` tokens too."""
    return model_for(ModelConfig(name), TaskShape(tuple(input_shape), num_classes), seed=seed)


def model_for(settings: ModelConfig, shape: TaskShape, *, seed: int) -> nn.Module:
    """The model of `settings` for inputs (n, *input_shape), giving (n, num_outputs), on the CPU:
    logits of classes or labels, or numbers; for sequences it gives (n, num_classes, length).

    Its name is one of `MODELS`, or `package.module:function` with a function like theirs: from an
    input shape and a number of outputs to a module; or `hf:FOLDER`, a pretrained transformer. The
    same `seed` gives the same initial parameters; the global random generator is not changed.
    Raises ValueError for an unknown name, or if the model cannot take the input shape, naming both.
    """
    name = settings.name
    arguments = (shape.input_shape, shape.num_outputs)
    build: Callable[[], nn.Module]
    if name.startswith(HF):
        from discreet.models.transformer import transformer

        build = partial(transformer, settings, shape)
    elif name == LSTM:
        build = partial(
            _lstm, *arguments, num_tokens=shape.num_tokens, at_each_step=shape.target.length > 0
        )
    else:
        build = partial(MODELS.get(name) or own_builder(name), *arguments)
    with torch.random.fork_rng(devices=[]):
        # Only the CPU's generator, which fork_rng restores; torch.manual_seed would change the
        # GPU's too.
        torch.default_generator.manual_seed(seed)
        try:
            model = build()
        except (*MISTAKES, OSError) as error:
            if (name in MODELS or name.startswith(HF)) and isinstance(error, ValueError):
                raise
            said = f"failed with {type(error).__name__}: {error}"
            raise ValueError(f"model.name: {name}{arguments} {said}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"model.name: {name} gave a {type(model).__name__}, not a torch.nn.Module")
    _freeze(model, settings.freeze)
    return model


def _freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Raises ValueError if a pattern matches no parameter, or if none is left to be trained."""
    named = dict(model.named_parameters())
    for pattern in patterns:
        matched = fnmatch.filter(named, pattern)
        if not matched:
            raise ValueError(
                f"model.freeze: {pattern} matches no parameter; there are {', '.join(named)}"
            )
        for name in matched:
            named[name].requires_grad_(False)
    if patterns and not trainable(model):
        raise ValueError(
            f"model.freeze: {', '.join(patterns)} leaves no parameter to train, of "
            f"{', '.join(named)}"
        )


def own_builder(name: str, *, setting: str = "model.name") -> Builder:
    """The function named `package.module:function`. Raises ValueError, in one line that names the
    setting, if there is none."""
    module, mark, function = name.partition(OWN)
    if "/" in module or module.endswith(".py"):
        known = module.removesuffix(".py").strip("./").replace("/", ".")
        raise ValueError(
            f"{setting} must name a module as Python imports it, such as "
            f"{known}:{function or 'function'} (got {name})"
        )
    if not mark and setting != "model.name":
        raise ValueError(f"{setting} must be package.module:Class (got {name})")
    if not mark:
        known = f"{', '.join(MODELS)}, package.module:function, or {HF}FOLDER"
        raise ValueError(f"{setting}: no model {name!r}; known are {known}")
    # The working folder is not on the path of processes that Flower starts by its own commands.
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.append(here)
    try:
        imported = importlib.import_module(module)
    except MISTAKES as error:
        raise ValueError(f"{setting}: {module!r} of {name} can't be imported: {error}") from error
    builder: Builder | None = getattr(imported, function, None)
    if builder is None:
        where = getattr(imported, "__file__", None) or "Python itself"
        raise ValueError(f"{setting}: {module} has no {function!r}; it is {where}")
    if not callable(builder):
        raise ValueError(f"{setting}: {name} is a {type(builder).__name__}, not a function")
    return builder


def frozen(model: nn.Module) -> dict[str, Tensor]:
    """The values that do not change in training, by name: the other parameters, and statistics of
    frozen layers."""
    values = {
        name: value.detach() for name, value in model.named_parameters() if not value.requires_grad
    }
    kept = {id(value) for layer in frozen_norms(model) for value in layer.buffers()}
    return values | {
        name: value
        for name, value in model.named_buffers(remove_duplicate=False)
        if id(value) in kept
    }


def frozen_digest(model: nn.Module) -> str:
    """SHA-256 of a model's frozen values with their names, types and shapes; an empty text if
    nothing is frozen."""
    values = frozen(model)
    digest = hashlib.sha256()
    for name, value in sorted(values.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(bytes_of(value))
    if values:
        return digest.hexdigest()
    return ""


def bytes_of(values: Tensor) -> memoryview:
    """The values of a tensor as they are in memory."""
    return values.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def frozen_norms(model: nn.Module) -> list[nn.Module]:
    """Layers with statistics such as BatchNorm, whose weights are frozen. They normalise by these
    statistics."""
    norms = [
        layer
        for layer in model.modules()
        if isinstance(layer, _NormBase) and layer.running_mean is not None
    ]
    return [
        layer
        for layer in norms
        if layer.affine and not any(value.requires_grad for value in layer.parameters())
    ]


def is_partly_fixed(model: nn.Module) -> bool:
    """True if a part of a model has no parameters to train, or says that it is fixed."""
    says_so = any(getattr(part, "is_fixed", False) for part in model.modules())
    return says_so or not all(value.requires_grad for value in model.parameters())


def to_train(model: nn.Module) -> None:
    """Training mode, in place. Layers whose parameters are all frozen stay in evaluation mode: they
    keep their statistics, and dropout in them is off."""
    model.train()
    for layer in model.modules():
        values = list(layer.parameters())
        if values and not any(value.requires_grad for value in values):
            layer.eval()


def flatten_parameters(model: nn.Module) -> Tensor:
    """The trainable parameters as one float32 vector (num_params,), a detached copy in their order.

    Tied parameters are counted once. A model without trainable parameters gives an empty vector.

    >>> model = nn.Sequential(nn.Linear(3, 2).requires_grad_(False), nn.Linear(2, 1))
    >>> flatten_parameters(model).shape
    torch.Size([3])
    """
    parts = [parameter.detach().reshape(-1).to(torch.float32) for parameter in trainable(model)]
    if parts:
        return torch.cat(parts)
    return torch.empty(0)


@torch.no_grad()
def outputs_of(
    model: nn.Module, inputs: Tensor, *, forward: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """The model's outputs, (n, k), on the CPU, in evaluation mode, without dropout. They are
    computed on the device of the parameters; the training mode is restored. `forward`: another
    way to call the model."""
    call = forward or model
    first = next(model.parameters(), None)
    if first is None:
        device = torch.device("cpu")
    else:
        device = first.device
    was_training = model.training
    model.eval()
    outputs = list[Tensor]()
    try:
        for part in torch.split(inputs, BATCH):
            outputs.append(call(part.to(device)).cpu())
    finally:
        model.train(was_training)
    return torch.cat(outputs)


def load_parameters(model: nn.Module, vector: Tensor) -> None:
    """Writes `vector`, (num_params,) as from `flatten_parameters`, into the trainable parameters,
    in place.

    Values are converted to each parameter's type and device; NaN and infinities are written as they
    are. Raises ValueError, and changes nothing, unless the length is exactly the number of
    trainable parameters."""
    write_parameters(trainable(model), vector)


@torch.no_grad()
def write_parameters(parameters: Sequence[Tensor], vector: Tensor) -> None:
    """`load_parameters` for a caller that has found the trainable parameters already."""
    for parameter, part in zip(parameters, parts_of(vector, parameters), strict=True):
        parameter.copy_(part)


def parts_of(vector: Tensor, parameters: Sequence[Tensor]) -> list[Tensor]:
    """`vector` cut into views shaped like the trainable parameters. Raises as `load_parameters`."""
    sizes = [parameter.numel() for parameter in parameters]
    if vector.shape != (sum(sizes),):
        raise ValueError(
            f"a vector of {tuple(vector.shape)} does not fit the {sum(sizes)} trainable parameters"
        )
    return list(map(Tensor.view_as, torch.split(vector, sizes), parameters))


# The only layers that may draw random numbers in training.
_DROPOUTS = {
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
    nn.MultiheadAttention,  # has its own dropout
}


def dropout_layers(model: nn.Module) -> list[nn.Module]:
    """The layers of torch.nn that draw masks in training. Derived classes are not included, as they
    may draw in another way.

    >>> dropout_layers(nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.2), nn.Dropout(0.0)))
    [Dropout(p=0.2, inplace=False)]
    """
    found = [layer for layer in model.modules() if type(layer) in _DROPOUTS]
    return [layer for layer in found if getattr(layer, "dropout", 0) or getattr(layer, "p", 0)]


def masks_from(source: RandomSource, model: nn.Module) -> AbstractContextManager[None]:
    """`torch_draws_from` for a model with dropout. For other models PyTorch's generators are not
    changed, and a clipped sum draws what a forward asks for by a key of the source."""
    if dropout_layers(model):
        return torch_draws_from(source, model)
    return drawn_from(source.child("masks").words(4).tobytes())
