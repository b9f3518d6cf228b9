"""A node's part in a round under secure aggregation: it answers masking requests, and sends no update in the clear.

What it signs, shares and masks is `discreet.masking`'s matter. Here the node trains, noises its own vector, and charges
its own ledger, by its own count of what the sum costs, before the masked vector leaves: from then on the others can
open the sum without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NoReturn

from flwr.app import RecordDict

from discreet.client.account import Refused
from discreet.client.membership import Membership, membership_of
from discreet.client.policy import check_sums, node_policy
from discreet.federated.masked_messages import WHO, asked_bytes, member_content, read_masking, reply_content
from discreet.masking.agreement import MaskingRefused, Terms
from discreet.masking.wire import MalformedBytes, Stage, read_request

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
    try:
        terms, parts = read_request(request)
    except MalformedBytes as error:
        raise Refused(f"malformed: {error}") from error
    stages = {part.stage for part in parts}
    if Stage.KEYS in stages:
        # A node gives no keys for a sum that its owner does not allow.
        check_sums(node_policy(node_config), colluding=terms.colluding, summands=terms.summands)
        membership.forget(but=terms.run)
    try:
        return reply_content(_answer(request, terms, membership, work=work if Stage.MASKED in stages else None))
    except MaskingRefused as refusal:
        raise Refused(str(refusal)) from refusal


def _answer(request: bytes, terms: Terms, membership: Membership, *, work: Callable[[], MaskedWork] | None) -> bytes:
    if work is None:
        # These terms are the server's. With its keys a node signs them, and no later stage may have others: not that of
        # the masked vector either, whose terms are the node's own.
        return membership.node(terms).answer(request, _no_work, _no_work)
    masked = work()
    node = membership.node(masked.terms(terms.run))
    reply = node.answer(request, masked.vector, masked.release, asked=asked_bytes(masked.request))
    masked.report(len(reply))
    return reply


def _no_work() -> NoReturn:
    raise MaskingRefused("a masked vector is asked for without the work")
