"""What a client puts into a masked sum: its clipped update, its bit and its answer on the grid, or its step at example
level, and its own noise."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from discreet.federated.messages import TrainRequest
from discreet.privacy.randomness import RandomSource
from discreet.privacy.secure_grid import SecureSum


@dataclass(frozen=True, eq=False)
class Values:
    """What a client has worked out, exactly. It has no form that travels: it goes into `noised_vector` if the run is
    under secure aggregation, and into a `TrainReply` otherwise.

    Attributes:
      update, below, answer: as `TrainReply` has them.
    """

    update: Tensor
    below: bool = False
    answer: Tensor | None = None


def noised_vector(vector: SecureSum, values: Values, request: TrainRequest, source: RandomSource) -> Tensor:
    """The vector of a client, int64 (length,), noise included: what is masked is this and nothing else.

    The noise is the client's share: the shares of `vector.summands` clients are what the release is accounted with, and
    no client's share is enough by itself.

    Args:
      values: before they are put on the grid.
      source: the client's own, of this round.
    """
    if vector.largest_sum:
        encoded = vector.encode_gradients(values.update, request.run.step_norm)
        return encoded + vector.noise(source.child("secure", "step"))
    trains, query = request.work.trains, request.work.query
    encoded = vector.encode(
        values.update if trains else None,
        request.clip_norm,
        below=values.below if trains and vector.bit_steps else None,
        answer=values.answer if query else None,
    )
    return encoded + vector.noise(source.child("secure", "update" if trains else query))
