"""Releases of a client: an answer with noise of its own, and the vector that goes into a masked sum."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from discreet.mechanisms.masked_sums import step_norm
from discreet.privacy.randomness import RandomSource
from discreet.privacy.secure_grid import SecureSum
from discreet.protocol.messages import TrainRequest


@dataclass(frozen=True, eq=False)
class Values:
    """The exact results of a client. They have no form that travels: they go into `noised_vector` if the run is under
    secure aggregation, and into a `TrainReply`, whose fields these are, otherwise."""

    update: Tensor
    below: bool = False
    answer: Tensor | None = None


def noised_vector(vector: SecureSum, values: Values, request: TrainRequest, source: RandomSource) -> Tensor:
    """A client's vector, int64 (length,), noise included: this is masked, and nothing else.

    The noise is the client's share: the shares of `vector.summands` clients are what the release is accounted with, and
    no client's share is enough by itself.

    Args:
      values: before they are put on the grid.
      source: the client's own, of this round.
    """
    if vector.largest_sum:
        encoded = vector.encode_gradients(values.update, step_norm(request.run))
        return encoded + vector.noise(source.child("secure", "step"))
    trains, query = request.work.trains, request.work.query
    encoded = vector.encode(
        values.update if trains else None,
        request.clip_norm,
        below=values.below if trains and vector.bit_steps else None,
        answer=values.answer if query else None,
    )
    return encoded + vector.noise(source.child("secure", "update" if trains else query))
