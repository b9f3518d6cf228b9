"""The baseline: a ClientApp that returns the received arrays, and imports only Flower."""

from __future__ import annotations

import random

from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """An update of the size of the parameters, without any work."""
    return Message(answer_to(message), reply_to=message)


def answer_to(message: Message) -> RecordDict:
    """The received values in another order, as a SuperLink stores equal content only once."""
    sent = message.content.array_records["parameters"]["parameters"]
    head, values = sent.data[: -4 * sent.shape[0]], sent.data[-4 * sent.shape[0] :]
    first = 4 * random.randrange(1, sent.shape[0])
    update = Array(sent.dtype, sent.shape, sent.stype, head + values[first:] + values[:first])
    numbers: dict[str, int | float | list[int] | list[float]] = {
        "round": int(message.metadata.group_id),
        "below": 1,
        "epsilon_example": 0.0,
        "epsilon_local": 0.0,
        "epsilon_local_pure": 0.0,
    }
    return RecordDict({"update": ArrayRecord({"update": update}), "reply": MetricRecord(numbers)})
