"""A model's parameters as one vector, and which models may be trained that way."""

from __future__ import annotations

import torch
from torch import nn

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def check_model(model: nn.Module) -> None:
    """Raise ValueError with the reason where `model` cannot be trained with per-example clipping.

    Refused: BatchNorm, which mixes the examples of a batch, so that no gradient of a single example exists;
    any other buffer that is saved with the model, since it would leave a client outside the clipped update;
    no trainable parameters; parameters that are NaN or infinite from the start; frozen parameters, since they are
    part of the vector that travels; parameters that are not floats.
    """
    for name, module in model.named_modules():
        if isinstance(module, _BATCH_NORMS):
            raise ValueError(
                f"{name or 'the model'} is a {type(module).__name__}, which mixes the examples of a batch: "
                "no gradient of a single example exists to be clipped. Use GroupNorm or LayerNorm"
            )
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    saved = [name for name in model.state_dict(keep_vars=True) if name not in tied]
    if saved:
        raise ValueError(f"the model saves the buffer {saved[0]}, which would leave a client without being clipped")
    if not any(parameter.numel() for parameter in model.parameters()):
        raise ValueError("the model has no trainable parameters")
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point():
            raise ValueError(f"the parameter {name} is {parameter.dtype}; only floating-point parameters can be noised")
        if not torch.isfinite(parameter).all():
            raise ValueError(f"the parameter {name} holds NaN or infinity before any training: mend its initial values")
        if not parameter.requires_grad:
            raise ValueError(
                f"the parameter {name} is frozen, and noise would be added to it all the same. Train it, or "
                "compute the frozen part once as features of the data"
            )


def flatten_parameters(model: nn.Module) -> torch.Tensor:
    """All parameters as one float32 vector (num_params,), a detached copy in the order of model.parameters().

    Tied parameters are counted once. A model without parameters gives an empty vector.
    """
    parts = [parameter.detach().reshape(-1).to(torch.float32) for parameter in model.parameters()]
    return torch.cat([torch.empty(0), *parts])


def load_parameters(model: nn.Module, vector: torch.Tensor) -> None:
    """Write `vector`, (num_params,) as from `flatten_parameters`, into the model's parameters, in place.

    Values are converted to each parameter's type and device; NaN and infinities are written as they are.
    Raises ValueError where the length is not exactly the number of parameters; the model is then unchanged.
    """
    with torch.no_grad():
        for parameter, part in zip(model.parameters(), _split(model, vector), strict=True):
            parameter.copy_(part)


def named_parameters_of(model: nn.Module, vector: torch.Tensor) -> dict[str, torch.Tensor]:
    """`vector` cut into copies named and shaped like the model's parameters, tied ones once."""
    names = (name for name, _ in model.named_parameters())
    return {name: part.clone() for name, part in zip(names, _split(model, vector), strict=True)}


def _split(model: nn.Module, vector: torch.Tensor) -> list[torch.Tensor]:
    parameters = list(model.parameters())
    expected = sum(parameter.numel() for parameter in parameters)
    if vector.shape != (expected,):
        raise ValueError(f"the model has {expected} parameters; a vector of shape {tuple(vector.shape)} does not fit")
    parts = torch.split(vector, [parameter.numel() for parameter in parameters])
    return [part.view(parameter.shape) for part, parameter in zip(parts, parameters, strict=True)]
