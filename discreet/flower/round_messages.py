"""What a server asks of clients in a round, as Flower's messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from flwr.app import RecordDict
from torch import Tensor

from discreet.protocol.messages import TrainRequest, VirtualClient


@dataclass(frozen=True)
class RoundMessages:
    """The messages of a round, of Flower's type `kind`, and the decoder of their replies, which
    hold `reply_size` values, at least 1. `request` makes a message, in a simulation for a virtual
    client; `reply` decodes one or raises MalformedMessage."""

    kind: str
    reply_size: int
    request: Callable[[VirtualClient | None], RecordDict]
    reply: Callable[[RecordDict], Any]


# Makes the messages of a round with parameters: Discreet's own, or those of another Flower app.
Messages = Callable[[TrainRequest, Tensor], RoundMessages]
