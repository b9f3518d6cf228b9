"""The parameters and buffers of a model, which no pass may change."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn


def memory_of(value: Tensor) -> int:
    """Where a tensor has its values; one that is sparse is known by its identity."""
    if value.layout == torch.strided:
        return value.untyped_storage().data_ptr()
    return id(value)


def state_of(modules: Iterable[nn.Module]) -> list[tuple[Tensor, int]]:
    """The parameters and buffers of modules, each with its number of writes."""
    groups = [group for part in modules for group in (part._parameters, part._buffers) if group]
    return [
        (value, value._version) for group in groups for value in group.values() if value is not None
    ]


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a model by all their names."""
    return dict(
        [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
    )


def writes(name: str) -> str:
    """The message that refuses a model whose forward changes `name`."""
    return (
        f"the model's forward changes {name}: what examples leave there would be neither clipped "
        "nor noised. Take out what writes it (max_norm, running statistics, observers), or the "
        "layer, or put it in eval mode"
    )
