"""Replies of a ClientApp: a refusal goes to the server with its reason, a failure without a word of its own."""

from __future__ import annotations

import logging
from collections.abc import Callable

from flwr.app import Error, Message, RecordDict

from discreet.client.account import Refused
from discreet.federated.known_ledgers import LedgerError
from discreet.federated.messages import REFUSED_CODE, MalformedMessage
from discreet.settings.rules import ConfigError

logger = logging.getLogger("discreet.client")

FAILED_CODE = 500  # Error.code of a client that could not do the work; why stays in its own log


def answered(message: Message, work: Callable[[], RecordDict]) -> Message:
    """The reply to a message. A refusal goes back as an error with its reason, and into the client's log."""
    try:
        return Message(work(), reply_to=message)
    except (Refused, MalformedMessage, ConfigError) as error:
        logger.warning("refused: %s", error)
        return Message(Error(code=REFUSED_CODE, reason=str(error)), reply_to=message)
    except LedgerError as error:
        # What the file is called stays here: a reason goes to the server.
        logger.error("%s", error)
        return Message(Error(code=REFUSED_CODE, reason="the ledger of this client can't be used"), reply_to=message)
    except Exception as error:
        # Of an app, a model or a file: the words may hold a value of the client's data, and Flower would send them.
        logger.error("failed: %s", error, exc_info=True)
        return Message(Error(code=FAILED_CODE, reason="the client failed; its own log says why"), reply_to=message)
