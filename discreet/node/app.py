"""The ClientApp, and DPClient, whose `fit` it calls: Flower's interfaces to a client's work.

A message is answered under its owner's policy, and within a time: a server must not occupy a node
longer than its owner allows.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp

from discreet.ledger.charges import LedgerError
from discreet.logs import log_to
from discreet.node.account import Refused, say_spent
from discreet.node.policy import ClientPolicy, policy_from
from discreet.node.time_limit import done_within, seconds_for
from discreet.protocol.messages import (
    MASKING,
    REFUSED_CODE,
    Floats,
    MalformedMessage,
    encode_arrays,
    read_content,
    reply_numbers,
    request_of,
)
from discreet.protocol.simulated import SIMULATION_KEYS
from discreet.settings.rules import ConfigError

if TYPE_CHECKING:
    from discreet.node.masked_work import MaskedWork

LOG = "discreet.client"
logger = logging.getLogger(LOG)

FAILED_CODE = 500  # Error.code of a client that could not do the work; why stays in its own log
UNIFORM_WEIGHT = (
    1  # NumPyClient.fit must return a number of examples; the real one does not leave the client
)


@dataclass(frozen=True)
class DPClient(NumPyClient):
    """A client in Flower's sense: a node, or a virtual client of a simulation. `node_config`,
    `node_id`: as in Flower. `policy`: that of the node, if it was read already."""

    node_config: Mapping[str, object]
    node_id: int | None = None
    policy: ClientPolicy | None = None

    def fit(
        self, parameters: list[Floats], config: Mapping[str, object]
    ) -> tuple[list[Floats], int, dict[str, Any]]:
        """One round of local training, or of rating a model.

        Args:
          parameters: one array (num_params,).
          config: a train request as `messages.request_items` writes it.

        Returns:
          The clipped update (num_params,), float32, and the answer to the request's query if it has
          one; the constant 1; and the numbers of a `TrainReply`.

        Raises:
          MalformedMessage: the request can't be read.
          Refused, LedgerError, ConfigError: as `nodes.client_of` and `Client.answer`; nothing is
            computed then.
        """
        # Imported here: most messages of a masked sum need neither a model nor data, and each has
        # its own process.
        from discreet.node.nodes import client_of
        from discreet.node.work import check_names, work_of

        request = request_of(config, allowed=partial(check_names, node_config=self.node_config))
        work = work_of(request)
        if request.virtual is None and not logger.hasHandlers():
            log_to(sys.stdout, name=LOG)
        params = torch.from_numpy(np.array(parameters[0], dtype=np.float32))
        client = client_of(work, self.node_config, self.node_id, policy=self.policy)
        reply = client.answer(work, params)
        if request.virtual is None:
            say_spent(
                "update",
                "update",
                reply.round,
                example=reply.epsilon_example,
                local=reply.epsilon_local,
            )
        if reply.answer is None:
            answers = []
        else:
            answers = [reply.answer.numpy()]
        return [reply.update.numpy(), *answers], UNIFORM_WEIGHT, reply_numbers(reply)

    def evaluate(self, parameters: list[Floats], config: Mapping[str, object]) -> NoReturn:
        """Always Refused: a client's loss and accuracy are not private. The server rates models on
        its public test set."""
        raise Refused("a client's loss and accuracy are not private, so they do not leave it")


app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """One round at one client, in the clear or as a stage of a masked sum."""
    return answered(message, partial(_work, message, context), context.node_config)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    """Refused: see `DPClient.evaluate`."""
    return answered(
        message, lambda _: DPClient(context.node_config).evaluate([], {}), context.node_config
    )


def _work(message: Message, context: Context, policy: ClientPolicy) -> RecordDict:
    if MASKING in message.content:
        from discreet.node.secure_aggregation import answer_masking

        if not context.node_config.keys() <= SIMULATION_KEYS and not logger.hasHandlers():
            log_to(sys.stdout, name=LOG)

        def work() -> MaskedWork:
            from discreet.node.masked_work import MaskedWork

            return MaskedWork.read(message.content, context.node_config, policy)

        return answer_masking(message.content, context.node_config, work=work)
    config, params = read_content(message.content)
    client = DPClient(context.node_config, context.node_id, policy)
    arrays, _, numbers = client.fit([params], config)
    return encode_arrays(arrays, numbers)


def answered(
    message: Message, work: Callable[[ClientPolicy], RecordDict], node_config: Mapping[str, object]
) -> Message:
    """The reply to a message, by `work` under the node's policy. It must end within the message's
    time to live and the `max-seconds` of the policy. The server receives a refusal with its reason,
    and a failure with a fixed text; the client's log has the details of both."""
    try:
        policy = policy_from(node_config)
        seconds = seconds_for(policy.max_seconds, message.metadata.ttl)
        content = done_within(seconds, partial(work, policy))
        return Message(content, reply_to=message)
    except (Refused, MalformedMessage, ConfigError) as error:
        if (
            message.content
        ):  # a server that waits for a simulation's workers sends nothing, and is refused too
            logger.warning("refused: %s", error)
        return Message(Error(code=REFUSED_CODE, reason=str(error)), reply_to=message)
    except LedgerError as error:
        # The file name is only logged: the server receives the reason.
        logger.error("%s", error)
        return Message(
            Error(code=REFUSED_CODE, reason="the ledger of this client can't be used"),
            reply_to=message,
        )
    except Exception as error:
        # An error of an app, a model or a file may contain values of the client's data, and Flower
        # would send its text.
        logger.error("failed: %s", error, exc_info=True)
        return Message(
            Error(code=FAILED_CODE, reason="the client failed; its own log has the reason"),
            reply_to=message,
        )
