"""The ClientApp: decodes a message, calls DPClient, encodes its reply. NumPyClient reads other record keys itself."""

from __future__ import annotations

import logging
import math
import sys
from typing import TYPE_CHECKING

import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from discreet.client.replies import answered
from discreet.client.secure_aggregation import answer_masking
from discreet.federated.masked_messages import MASKING
from discreet.federated.messages import REFUSED_CODE, decode_request, encode_reply
from discreet.federated.simulation_ticket import SIMULATION_KEYS
from discreet.logs import log_to

if TYPE_CHECKING:
    from discreet.client.masked_work import MaskedWork

logger = logging.getLogger("discreet.client")

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """One round at one client. A refusal goes back as an error with its reason, and into the client's log."""
    return answered(message, lambda: _work(message, context))


def _work(message: Message, context: Context) -> RecordDict:
    if MASKING in message.content:
        _log_of_node(context.node_config.keys() <= SIMULATION_KEYS)
        return answer_masking(message.content, context.node_config, work=lambda: _masked_work(message, context))
    # Here, not above: most messages of a masked sum need neither a model nor data, and each has a process of its own.
    from discreet.client.nodes import client_of

    request, params = decode_request(message.content)
    _log_of_node(request.virtual is not None)
    client = client_of(request, context.node_config)
    if request.virtual is not None:
        torch.set_num_threads(1)  # a simulation has a process for each core
        return encode_reply(client.answer(request, params))
    reply = client.answer(request, params)
    spent = {"epsilon_example": reply.epsilon_example, "epsilon_local": reply.epsilon_local}
    fields = {"event": "update", "round": request.round, **spent}
    logger.info("round %d: %s", request.round, _spent_line(spent), extra={"fields": fields})
    return encode_reply(reply)


def _masked_work(message: Message, context: Context) -> MaskedWork:
    from discreet.client.masked_work import MaskedWork

    return MaskedWork.read(message.content, context.node_config)


def _log_of_node(simulated: bool) -> None:
    if not simulated and not logger.hasHandlers():
        log_to(sys.stdout, name="discreet.client")


def _spent_line(spent: dict[str, float]) -> str:
    known = [f"{name.removeprefix('epsilon_')} {value:.4g}" for name, value in spent.items() if 0 < value < math.inf]
    return f"update sent; spent by this node's own account: epsilon {', '.join(known) or 'none'}"


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Refused: see `DPClient.evaluate`."""
    reason = "a client's loss and accuracy are not private, and do not leave it"
    return Message(Error(code=REFUSED_CODE, reason=reason), reply_to=message)
