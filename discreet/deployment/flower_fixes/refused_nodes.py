"""Says why a SuperLink refuses a node, whose process then ends with exit code 1.

Flower's SuperNode ends as if somebody had told it to, with 0 and no reason, when a call is answered with HTTP 401: its
clock is not the server's, or its key is not known there.
"""

from __future__ import annotations

import logging
import os
import sys
from email.utils import parsedate_to_datetime

import httpx
from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE
from flwr.supercore import date
from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

from discreet.deployment.flower_fixes import Fixes

logger = logging.getLogger("discreet.node")

AHEAD, BEHIND = SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE  # seconds that a SuperLink allows

sign = NodeAuthHttpInterceptor.intercept


def intercept(signer: NodeAuthHttpInterceptor, context: ProtobufRequestContext, call: ProtobufCall) -> httpx.Response:
    """Flower's function of this name, which signs a call and makes it; a call that is refused ends this process."""
    answer = sign(signer, context, call)
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        logger.error("discreet: %s", reason(answer.headers.get_list("date")))
        sys.stdout.flush()
        os._exit(1)
    return answer


def reason(dates: list[str]) -> str:
    """Why a call was refused, by the server's clock: the first Date of its answer, in whole seconds."""
    ahead = (date.now() - parsedate_to_datetime(dates[0])).total_seconds() if dates else 0.0
    if ahead - 1 > -BEHIND and ahead <= AHEAD:
        return "the server refused this node's signature: its key is not registered there, or no longer"
    return (
        f"the server refused this node's time: its clock is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} "
        f"the server's ({AHEAD} s ahead and {BEHIND} s behind are allowed). Set it, and start the node again"
    )


FIXES: Fixes = {"refused_nodes": ((NodeAuthHttpInterceptor, "intercept", intercept),)}
