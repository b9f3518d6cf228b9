"""What a client puts into a masked sum: its clipped update, its bit and its answer on the grid, or its step at example
level, and its own noise."""

from __future__ import annotations

from torch import Tensor

from discreet.federated.messages import TrainReply, TrainRequest
from discreet.privacy.randomness import RandomSource
from discreet.privacy.secure_grid import SecureSum


def noised_vector(vector: SecureSum, reply: TrainReply, request: TrainRequest, source: RandomSource) -> Tensor:
    """The vector of a client, int64 (length,), noise included: what is masked is this and nothing else.

    The noise is the client's share: the shares of `vector.summands` clients are what the release is accounted with, and
    no client's share is enough by itself.

    Args:
      reply: what the client says, before it is put on the grid.
      source: the client's own, of this round.
    """
    if vector.largest_sum:
        encoded = vector.encode_gradients(reply.update, request.run.step_norm)
        return encoded + vector.noise(source.child("secure", "step"))
    trains, query = request.work.trains, request.work.query
    encoded = vector.encode(
        reply.update if trains else None,
        request.clip_norm,
        below=reply.below if trains and vector.bit_steps else None,
        answer=reply.answer if query else None,
    )
    return encoded + vector.noise(source.child("secure", "update" if trains else query))
