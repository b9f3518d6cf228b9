"""The messages to clients of somebody else's Flower app: arrays and a config go out, arrays come back."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from flwr.app import ArrayRecord, ConfigRecord, MessageType, RecordDict
from torch import Tensor

from discreet.flower.array_layout import ArrayLayout
from discreet.flower.grid_transport import RoundMessages
from discreet.privacy.clipping import row_norms
from discreet.protocol.masked_messages import ASKED, FROZEN
from discreet.protocol.messages import (
    TRAIN,
    MalformedMessage,
    TrainReply,
    TrainRequest,
    Work,
    request_items,
)
from discreet.settings.client_settings import ClientSettings
from discreet.settings.rules import ConfigError

TrainConfig = ConfigRecord | Callable[[int], ConfigRecord]

ROUND = "server-round"  # as Flower's own strategies say it to clients


@dataclass(frozen=True, eq=False)
class FlowerMessages:
    """Messages to the clients of a Flower app, as `flwr.serverapp.strategy.FedAvg` sends them.

    Attributes:
      layout: of the app's arrays.
      config: sent to every client in every round, with the number of the round beside it; or a function that gives it
        for the number of a round.
      keys: of the two records, with the arrays and with the config.
      metric: the name of the accuracy among what clients say of a model, if they are to rate any.
      masked: under secure aggregation what the run asks of clients, and the patterns of frozen arrays: the mod of
        `discreet.flower.secure_sum_mod` reads it, and takes it out.
    """

    layout: ArrayLayout
    config: TrainConfig
    keys: tuple[str, str] = ("arrays", "config")
    metric: str = "accuracy"
    masked: tuple[ClientSettings, tuple[str, ...]] | None = None

    def of_round(self, number: int, params: Tensor, clip_norm: float, work: Work = TRAIN) -> RoundMessages:
        """The messages of one round: training, or Flower's evaluate messages, by which clients rate a model."""
        arrays = self.layout.record(params)
        # What was sent, and not `params`: an array of float16 holds less.
        sent = self.layout.vector(arrays)
        given = self.config if isinstance(self.config, ConfigRecord) else self.config(number)
        if not isinstance(given, ConfigRecord):
            raise ConfigError(f"train_config must give a ConfigRecord for each round (got {given!r} for {number})")
        # A NumPyClient reads the records of training and of evaluation by different names.
        keys = [key if work.trains else key.replace("fitins.", "evaluateins.") for key in self.keys]
        content = RecordDict(dict(zip(keys, (arrays, ConfigRecord({**given, ROUND: number})), strict=True)))
        if self.masked is not None:
            run, frozen = self.masked
            content[ASKED] = ConfigRecord({**request_items(TrainRequest(number, clip_norm, run)), FROZEN: list(frozen)})
        if not work.trains:
            return RoundMessages(MessageType.EVALUATE, 1, lambda _: content, partial(self._rating, number))
        return RoundMessages(
            MessageType.TRAIN, self.layout.num_values, lambda _: content, partial(self._update, number, sent, clip_norm)
        )

    def _update(self, number: int, sent: Tensor, clip_norm: float, content: RecordDict) -> TrainReply:
        """The difference of what came back to what was sent, and its bit.

        Metrics, the number of examples and every further record are not looked at: they are not private.
        """
        update = self.layout.difference(only_arrays(content, "the reply"), sent.numpy())
        # The norm before any clipping: the bit says whether this client would have been clipped.
        return TrainReply(number, update, float(row_norms(update.unsqueeze(0))[0]) <= clip_norm)

    def _rating(self, number: int, content: RecordDict) -> TrainReply:
        """The answer of a client with this accuracy. All else that it says is not looked at."""
        value = next((record[self.metric] for record in content.values() if self.metric in record), None)
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise MalformedMessage(f"the reply must hold the metric {self.metric}, a finite number (got {value!r})")
        return TrainReply(number, torch.zeros(0), False, answer=torch.tensor([2 * float(value) - 1]))


def only_arrays(content: RecordDict, what: str) -> ArrayRecord:
    """The one record of arrays of a content.

    Raises:
      MalformedMessage: there is another number of them.
    """
    records = [record for record in content.values() if isinstance(record, ArrayRecord)]
    if len(records) != 1:
        raise MalformedMessage(f"{what} must hold one record of arrays (got {len(records)})")
    return records[0]
