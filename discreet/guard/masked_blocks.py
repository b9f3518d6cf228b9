"""A guarded site under secure aggregation: the mean of its blocks leaves masked, with a share of
the noise.

The server runs `DPFedAvg(mechanism=MaskedGaussian(clipping=FixedClipping(C)))` as for other nodes.
It reads only the sum of all sites' vectors. So no site has to trust the server, and one noise,
which all sites add in shares, protects every site. A block's update has a norm of at most C, and so
does their mean, as `secure_sum` expects of a node. But one patient moves the mean by only 2C / k.
The site charges for that, by its own count of the noise that honest sites are sure to add.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from dp_accounting import DpEvent
from flwr.app import Message, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from discreet.accounting.distributed_gaussian import DistributedDiscreteGaussianDpEvent
from discreet.flower.array_layout import ArrayLayout, only_arrays
from discreet.guard.block_release import BlockRelease, BlockSum, read_layout
from discreet.guard.guard_policy import GuardPolicy, GuardTerms, check_frozen
from discreet.mechanisms.masked_sums import MaskedGaussian
from discreet.node.account import Refused
from discreet.node.policy import ROUNDING, check_clipped
from discreet.privacy.blocks_grid import MOVES
from discreet.privacy.randomness import RandomSource, secure_source
from discreet.privacy.secure_grid import SecureSum
from discreet.protocol.masked_messages import split_content
from discreet.protocol.messages import TrainRequest, request_of
from discreet.settings.clip_choice import CLIP
from discreet.settings.privacy import Sizes

if TYPE_CHECKING:
    from discreet.masking.node import Release

logger = logging.getLogger("discreet.guard")

Charge = Callable[[DpEvent], None]
RunBlocks = Callable[[Message, BlockRelease, ArrayLayout], BlockSum]


@dataclass(frozen=True, eq=False)
class MaskedBlocks:
    """The work of a site for one masked sum, as `answer_masking` asks for it.

    Attributes:
      request: the server's request, with its guarantee.
      sums: the masked sum, by this site's own count.
      blocks: the clipping and addition of the blocks' updates.
      charge: writes an event to the guard's ledger, or raises Refused.
      run: runs the blocks, and returns the sum of their clipped updates.
      moved: the number of blocks that one unit is charged for.
    """

    request: TrainRequest
    sums: SecureSum
    blocks: BlockRelease
    charge: Charge
    run: Callable[[], BlockSum]
    moved: int = 1

    def vector(self, begin: Release) -> NDArray[np.int64]:
        """The site's vector (length,), with its share of noise. It is charged before a block
        starts."""
        self.charge(block_event(self.sums, self.blocks.blocks, self.moved))
        begin()
        vector: NDArray[np.int64] = site_vector(self, self.run(), secure_source()).numpy()
        return vector

    def release(self) -> None:
        """Charges nothing further: the sum was charged before any block started."""

    def report(self, size: int) -> None:
        """Logs the size in bytes of the masked vector that has left."""
        logger.info("round %d: a masked vector of %d bytes sent", self.request.round, size)


def site_vector(work: MaskedBlocks, summed: BlockSum, source: RandomSource) -> Tensor:
    """The mean of the blocks in whole steps, int64 (length,), with one share of noise."""
    sums = work.sums
    blocks = work.blocks
    mean = blocks.grid.to_float(summed.total, torch.float64) / blocks.blocks
    steps = (mean * (sums.clip_steps / blocks.terms.clip_norm)).trunc().long()
    return steps + sums.noise(source)


def block_event(sums: SecureSum, blocks: int, moved: int = 1) -> DpEvent:
    """The event of a masked sum for one patient, who moves `moved` of a site's blocks.

    Each moves the mean by at most 2C / k, which is 2R / k steps. Truncation moves each coordinate
    of the difference by less than 1, which is sqrt(length) in L2; float64 rounding is far below the
    whole step that is added to cover it.
    """
    most = MOVES * moved * sums.clip_steps / blocks + math.isqrt(sums.length - 1) + 2
    sensitivity_squared = math.ceil(most) ** 2
    return DistributedDiscreteGaussianDpEvent(
        sums.variance, sums.summands, sensitivity_squared, sums.length
    )


def read_masked(
    message: Message, policy: GuardPolicy, charge: Charge, *, run: RunBlocks
) -> MaskedBlocks:
    """The work that a message requests. Refused: a guard does not do such work. MalformedMessage:
    the message can't be read."""
    content = RecordDict(dict(message.content))
    items, frozen = split_content(content)
    check_frozen(frozen)
    request = request_of(items)
    check_clipped(request.clip_norm)
    terms = GuardTerms(request.clip_norm, policy.min_noise_multiplier, frozen)
    layout = read_layout(only_arrays(content, "the message"), policy, terms)
    sums = _sum_of(request, layout, policy)
    blocks = BlockRelease(layout.num_params, terms, 1.0, policy.blocks.count)
    message.content = content
    return MaskedBlocks(
        request,
        sums,
        blocks,
        charge,
        lambda: run(message, blocks, layout),
        moved=policy.moved_blocks,
    )


def _sum_of(request: TrainRequest, layout: ArrayLayout, policy: GuardPolicy) -> SecureSum:
    """The sum that a request asks for. Refused: it is of another kind, or has too little noise for
    one patient."""
    user = request.run.user
    sums = None
    if user.secure and user.mechanism is None and request.work.trains:  # no class of a server's
        mechanism = MaskedGaussian(request.run, CLIP, Sizes(layout.num_params))
        sums = mechanism.participation.vector
    if sums is None:
        raise Refused(
            "a guard only takes part in sums of sites' updates: the run needs MaskedGaussian"
        )
    if sums.bit_steps or sums.answer_length:
        raise Refused(
            "a guard sends no clip bits and no query answers: the run needs "
            "clipping=FixedClipping(...)"
        )
    if policy.q < 1:
        raise Refused(
            "this site's guard samples its blocks (q < 1), which the privacy account "
            "of a masked sum does not cover"
        )
    if not sums.variance:
        raise Refused("the masked sum has no noise")
    noise = block_event(sums, policy.blocks.count).renyi_noise_multiplier  # over 2C, as the key
    if noise < policy.min_noise_multiplier * (1 - ROUNDING):
        wanted = f"a noise multiplier of {policy.min_noise_multiplier:g} for one {policy.unit}"
        raise Refused(
            f"this site's guard requires {wanted}; by its own count the sum has {noise:.4g}"
        )
    return sums
