"""Many models of any architecture: the model's own forward, for all clients at once
(`torch.func.vmap`).

If vmap can't follow the model, or the model is so large that the overhead of calls is small,
clients are trained one after the other: the speed of a cohort then grows with the number of
processes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from discreet.layers.recurrent import LSTMLayer
from discreet.models.models import dropout_layers, to_train
from discreet.per_example.objective import LOSS_SCALE, Loss, trainable
from discreet.privacy.randomness import RandomSource
from discreet.simulation.layer_sequence import Batch, ParameterLayout, Params, clip_scale

# Dropout whose mask has a number for each number of an example, or for each of its channels.
_BY_NUMBER = (nn.Dropout, functional.dropout)
_BY_CHANNEL = (
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    functional.dropout1d,
    functional.dropout2d,
    functional.dropout3d,
)


class Masks(TorchFunctionMode):
    """A context in which dropout draws a client's masks as if it were alone, from the client's own
    generator: for `counts` of the `width` rows of each client. Of all rows of all clients, those
    numbered `rows` go through the model."""

    def __init__(self, seeds: Iterable[int]) -> None:
        super().__init__()
        self.generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        self.counts = list[int]()
        self.width = 0
        self.rows = torch.zeros(0)

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        masks = function in (*_BY_NUMBER, *_BY_CHANNEL)
        if masks:
            return self._masked(function, *args, **kwargs or {})
        return function(*args, **kwargs or {})

    def _masked(
        self, function: Any, inputs: Tensor, p: float = 0.5, training: bool = True, **_: Any
    ) -> Tensor:
        if not training or p == 0:
            return inputs
        if len(inputs) != len(self.rows):
            raise ValueError("dropout reads something else than one example after the other")
        kept = (
            inputs.shape[1:]
            if function in _BY_NUMBER
            else (inputs.shape[1], *[1] * (inputs.dim() - 2))
        )
        masks = torch.ones(len(self.counts), self.width, *kept)
        for mask, count, generator in zip(masks, self.counts, self.generators, strict=False):
            mask[:count].bernoulli_(1 - p, generator=generator).div_(1 - p)
        return inputs * masks.flatten(0, 1).index_select(0, self.rows)


@dataclass(frozen=True, eq=False)
class MappedModel:
    """The models of k clients, whose trainable parameters are a list of tensors (k, ...). They
    share frozen values. Unless `together`, the clients are trained one after the other. `masks` is
    None without dropout."""

    model: nn.Module
    layout: ParameterLayout
    loss: Loss
    together: bool = True
    masks: Masks | None = None

    def drawing(self, sources: Iterable[RandomSource]) -> MappedModel:
        """The same model, with dropout masks from the sources of its clients."""
        if not dropout_layers(self.model):
            return self
        return replace(
            self, masks=Masks(int(source.child("dropout").words(1)[0]) for source in sources)
        )

    def accumulate(
        self, params: Params, batch: Batch, into: Params, *, keep: float, rate: float
    ) -> None:
        """See `LayerSequence.accumulate`."""
        leaves = [values.detach().requires_grad_() for values in params]
        with torch.enable_grad(), self._drawing(batch) as rows:
            outputs = vmap(self._outputs, randomness="same")(leaves, batch.inputs, rows)
            losses = self.loss(outputs.flatten(0, 1), batch.targets.flatten(0, 1))
        weights = batch.weights.flatten()
        gradients = torch.autograd.grad(
            losses, leaves, weights, allow_unused=True, materialize_grads=True
        )
        for values, gradient in zip(into, gradients, strict=True):
            values.mul_(keep).add_(gradient, alpha=rate)

    def clipped_sums(self, params: Params, batch: Batch, clip_norm: float) -> Tensor:
        """See `LayerSequence.clipped_sums`. Every gradient is built, of a model without dropout."""

        def loss(values: Params, example: Tensor, target: Tensor) -> Tensor:
            outputs = self._outputs(values, example.unsqueeze(0))
            return LOSS_SCALE * self.loss(outputs, target.unsqueeze(0)).sum()

        of_examples = vmap(grad(loss), (None, 0, 0), randomness="same")
        with torch.enable_grad(), self._drawing(batch):
            found = vmap(of_examples, randomness="same")(params, batch.inputs, batch.targets)
        gradients = [values.detach().flatten(2) for values in found]
        norms = torch.stack([torch.linalg.vector_norm(values, dim=2) for values in gradients]).norm(
            dim=0
        )
        weights = batch.weights.double() / LOSS_SCALE
        scale = clip_scale(norms.double() * weights, clip_norm).mul_(weights)
        if not bool(norms.sum().isfinite()):  # 0 * inf would spoil the products
            lost = ~norms.isfinite().unsqueeze(2)
            gradients = [values.masked_fill(lost, 0.0) for values in gradients]
        scale = scale.to(gradients[0].dtype).unsqueeze(1)
        return torch.cat([torch.bmm(scale, values).squeeze(1) for values in gradients], 1)

    def _outputs(self, values: Params, inputs: Tensor, rows: Tensor | None = None) -> Tensor:
        if self.masks is not None and rows is not None:
            self.masks.rows = rows
        outputs: Tensor = functional_call(
            self.model, dict(zip(self.names, values, strict=True)), (inputs,)
        )
        return outputs

    @cached_property
    def names(self) -> list[str]:
        """The names of the trainable parameters."""
        return [name for name, value in self.model.named_parameters() if value.requires_grad]

    @contextmanager
    def _drawing(self, batch: Batch) -> Iterator[Tensor]:
        """A context that yields the numbers of the batch's rows, (k, width), by which masks are
        drawn."""
        clients, width = batch.weights.shape
        with warnings.catch_warnings(), self.masks or nullcontext():
            # PyTorch warns that an operation without a batching rule is slower.
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            if self.masks is not None:
                self.masks.counts = (batch.weights > 0).sum(1).tolist()
                self.masks.width = width
            yield torch.arange(clients * width, device=batch.weights.device).view(clients, width)


def mapped_model(model: nn.Module, loss: Loss, *, by_example: bool = False) -> MappedModel:
    """A model for many clients, in training mode; `by_example`: for gradients of each example. One
    with dropout is then trained by one client after the other, as each example's masks follow from
    a key of its client."""
    to_train(model)
    shapes = [tuple(value.shape) for value in trainable(model)]
    layout = ParameterLayout(tuple((shape, tuple(range(len(shape)))) for shape in shapes))
    shared = len(list(model.named_parameters(remove_duplicate=False))) > len(
        list(model.parameters())
    )
    draws_otherwise = any(
        type(layer) not in (*_BY_NUMBER, *_BY_CHANNEL) for layer in dropout_layers(model)
    )
    draws_otherwise |= by_example and bool(dropout_layers(model))
    # PyTorch has one call for all steps of RNNBase; for LSTMLayer a gradient would be built for
    # each step.
    slower = (nn.RNNBase, LSTMLayer) if by_example else nn.RNNBase
    recurrent = any(isinstance(layer, slower) for layer in model.modules())
    return MappedModel(model, layout, loss, together=not (shared or draws_otherwise or recurrent))
