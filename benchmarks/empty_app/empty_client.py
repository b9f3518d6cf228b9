"""The floor: a ClientApp that sends back what it was sent, and imports nothing but Flower."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    """An update of the size of the parameters, without any work."""
    parameters = message.content.array_records["parameters"]["parameters"]
    numbers: dict[str, int | float | list[int] | list[float]] = {
        "round": int(message.metadata.group_id),
        "below": 1,
        "epsilon_example": 0.0,
        "epsilon_local": 0.0,
        "epsilon_local_pure": 0.0,
    }
    content = RecordDict({"update": ArrayRecord({"update": parameters}), "reply": MetricRecord(numbers)})
    return Message(content, reply_to=message)
