"""The local work of a chunk of clients at once: `local_training.local_update`, row by row the same."""

from __future__ import annotations

import torch
from torch import Tensor

from discreet.training.local_training import dp_sgd, sgd
from simulation.chunk import Chunk
from simulation.span import span_sgd, spans


def stacked_updates(chunk: Chunk, start: Tensor) -> Tensor:
    """The change of the parameters of each client, (k, num_params), float32, not clipped.

    Args:
        chunk: at least one client; one without examples is treated as in `local_update`.
        start: (num_params,), where everybody starts, on the device of the chunk's data.
    """
    start, settings, sizes = start.to(torch.float32), chunk.settings[0], chunk.table.sizes.tolist()
    if spans(chunk.stack, max(sizes), settings):
        return span_sgd(chunk, start)
    params = chunk.stack.layout.stack(start, len(sizes))
    if settings.example:
        dp_sgd(chunk, params, sizes, settings)
    else:
        sgd(chunk, params, settings)
    return chunk.stack.layout.change(params, start)
