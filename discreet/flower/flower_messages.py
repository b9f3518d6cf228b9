"""The messages to clients of somebody else's Flower app: arrays and a config go out, arrays come back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from flwr.app import ArrayRecord, ConfigRecord, MessageType, MetricRecord, RecordDict
from torch import Tensor

from discreet.flower.array_layout import ArrayLayout
from discreet.privacy.clipping import row_norms
from discreet.protocol.masked_messages import ASKED, FROZEN
from discreet.protocol.messages import (
    TRAIN,
    MalformedMessage,
    TrainReply,
    TrainRequest,
    VirtualClient,
    Work,
    request_items,
)
from discreet.settings.client_settings import ClientSettings
from discreet.settings.rules import ConfigError

ROUND = "server-round"  # as Flower's own strategies say it to clients


@dataclass(frozen=True, eq=False)
class FlowerMessages:
    """Messages to the clients of a Flower app, as `flwr.serverapp.strategy.FedAvg` sends them.

    Attributes:
      layout: of the app's arrays.
      config: sent to every client in every round, with the number of the round beside it; or a function that gives it
        for the number of a round.
      arrays_key, config_key: of the records.
      metric: the name of the accuracy among what clients say of a model, if they are to rate any.
      masked: under secure aggregation what the run asks of clients, and the patterns of frozen arrays: the mod of
        `discreet.flower.secure_sum_mod` reads it, and takes it out.
    """

    layout: ArrayLayout
    config: ConfigRecord | Callable[[int], ConfigRecord]
    arrays_key: str = "arrays"
    config_key: str = "config"
    metric: str = "accuracy"
    masked: tuple[ClientSettings, tuple[str, ...]] | None = None

    def of_round(self, number: int, params: Tensor, clip_norm: float, work: Work = TRAIN) -> FlowerRound | FlowerRating:
        """The messages of one round."""
        arrays = self.layout.record(params)
        # What was sent, and not `params`: an array of float16 holds less.
        sent = self.layout.vector(arrays)
        given = self.config if isinstance(self.config, ConfigRecord) else self.config(number)
        if not isinstance(given, ConfigRecord):
            raise ConfigError(f"train_config must give a ConfigRecord for each round (got {given!r} for {number})")
        config = ConfigRecord({**given, ROUND: number})
        content = RecordDict({self.arrays_key: arrays, self.config_key: config})
        if self.masked is not None:
            run, frozen = self.masked
            content[ASKED] = ConfigRecord({**request_items(TrainRequest(number, clip_norm, run)), FROZEN: list(frozen)})
        if not work.trains:
            return FlowerRating(number, content, self.metric)
        return FlowerRound(number, content, self.layout, sent, clip_norm)


@dataclass(frozen=True, eq=False)
class FlowerRound:
    """The messages of one round. `content` goes to everybody, `sent` (num_params,) is what it says of the parameters,
    and `clip_norm` stays here: it decides the bits."""

    number: int
    content: RecordDict
    layout: ArrayLayout
    sent: Tensor
    clip_norm: float

    @property
    def reply_size(self) -> int:
        """The number of values in a reply."""
        return self.layout.num_values

    @property
    def kind(self) -> str:
        """Flower's type of the messages."""
        return MessageType.TRAIN

    def request(self, client: VirtualClient | None) -> RecordDict:
        """The content of the message to a client."""
        return self.content

    def reply(self, content: RecordDict) -> TrainReply:
        """The difference of what came back to what was sent, and its bit.

        Metrics, the number of examples and every further record are not looked at: they are not private.

        Raises:
          MalformedMessage: not exactly one record of arrays, or one that does not fit the layout.
        """
        records = [record for record in content.values() if isinstance(record, ArrayRecord)]
        if len(records) != 1:
            raise MalformedMessage(f"the reply must hold one record of arrays (got {len(records)})")
        update = self.layout.difference(records[0], self.sent.numpy())
        # The norm before any clipping: the bit says whether this client would have been clipped.
        below = float(row_norms(update.unsqueeze(0))[0]) <= self.clip_norm
        return TrainReply(self.number, update, below)


@dataclass(frozen=True, eq=False)
class FlowerRating:
    """The messages to a cohort that rates a model: Flower's evaluate messages, answered with metrics."""

    number: int
    content: RecordDict
    metric: str

    @property
    def reply_size(self) -> int:
        """The number of values in a reply."""
        return 1

    @property
    def kind(self) -> str:
        """Flower's type of the messages."""
        return MessageType.EVALUATE

    def request(self, client: VirtualClient | None) -> RecordDict:
        """The content of the message to a client."""
        return self.content

    def reply(self, content: RecordDict) -> TrainReply:
        """The answer of a client with this accuracy. All else that it says is not looked at.

        Raises:
          MalformedMessage: the metric is missing or is no finite number.
        """
        records = [record for record in content.values() if isinstance(record, MetricRecord)]
        value = next((record[self.metric] for record in records if self.metric in record), None)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise MalformedMessage(f"the reply must hold the metric {self.metric}, a finite number (got {value})")
        return TrainReply(self.number, torch.zeros(0), False, answer=torch.tensor([2 * float(value) - 1]))
