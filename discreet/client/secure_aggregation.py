"""A node's part in a round under secure aggregation: it answers masking requests, and sends no update in the clear.

What it signs, shares and masks is `discreet.masking`'s matter. Here the node trains, noises its own vector, and charges
its own ledger, by its own count of what the sum costs, before the masked vector leaves: from then on the others can
open the sum without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from discreet.client.account import Refused
from discreet.client.membership import Membership, membership_of
from discreet.client.policy import check_sums, node_policy
from discreet.federated.masked_messages import WHO, asked_bytes, member_content, read_masking, reply_content
from discreet.masking.agreement import MaskingRefused
from discreet.masking.wire import Contents, MalformedBytes, Stage, contents

if TYPE_CHECKING:
    from discreet.client.masked_work import MaskedWork

logger = logging.getLogger("discreet.client")


def answer_masking(
    content: RecordDict, node_config: Mapping[str, object], *, work: Callable[[], MaskedWork]
) -> RecordDict:
    """The reply to a masking request: who this node is, its part of one or two stages, or its masked vector.

    `work` reads what a masked vector is made of. It is called only if one is asked for: the other stages cost no model
    and no data.

    Raises:
      Refused: the owner has not set the node up for it, a policy or a budget forbids the work, or the request is not
        one that this node answers, by the rules of `discreet.masking.node`.
      MalformedMessage: the message can't be read.
    """
    request, virtual = read_masking(content)
    membership = membership_of(virtual, node_config)
    if request == WHO:
        return member_content(membership.member)
    asked = _contents(request)
    if Stage.KEYS in {stage for stage, _ in asked.stages}:
        # A node gives no keys for a sum that its owner does not allow.
        policy, terms = node_policy(node_config), asked.terms
        check_sums(policy, colluding=terms.colluding, summands=terms.summands)
        membership.forget(but=asked.terms.run)
    return reply_content(_answer(request, asked, membership, work=work))


def _contents(request: bytes) -> Contents:
    try:
        return contents(request)
    except MalformedBytes as error:
        raise Refused(f"malformed: {error}") from error


def _answer(request: bytes, asked: Contents, membership: Membership, *, work: Callable[[], MaskedWork]) -> bytes:
    try:
        if Stage.MASKED not in {stage for stage, _ in asked.stages}:
            # These terms are the server's. With its keys a node signs them, and no later stage may have others: not
            # that of the masked vector either, whose terms are the node's own.
            return membership.node(asked.terms).answer(request, _no_vector, _no_release)
        masked = work()
        node = membership.node(masked.terms(asked.terms.run))
        reply = node.answer(request, masked.vector, masked.release, asked=asked_bytes(masked.request))
    except MaskingRefused as refusal:
        raise Refused(str(refusal)) from refusal
    masked.report(len(reply))
    return reply


def _no_vector() -> NDArray[np.int64]:
    raise MaskingRefused("a masked vector is asked for without the work")


def _no_release() -> None:
    raise MaskingRefused("a masked vector is asked for without the work")
