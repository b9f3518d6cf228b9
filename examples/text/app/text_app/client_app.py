"""The client: it trains on the texts of its node, and knows nothing of privacy."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from text_app import task

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Trains the received matrices and head on local texts, and sends them back."""
    run, node = context.run_config, context.node_config
    model = task.build(run["weights"])
    task.load_learned(model, msg.content["arrays"].to_torch_state_dict())
    places = node["partition-id"], node["num-partitions"]
    data = task.load_data(run["texts"], run["weights"], "train.csv", *places)

    task.train(model, data)

    metrics = MetricRecord({"num-examples": len(data)})
    content = RecordDict({"arrays": ArrayRecord(task.learned(model)), "metrics": metrics})
    return Message(content=content, reply_to=msg)
