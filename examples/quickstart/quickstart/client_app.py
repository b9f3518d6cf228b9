"""The client: it trains on its node's data, and knows nothing of privacy."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from quickstart import task

app = ClientApp()


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Trains the received model on local data, and sends it back."""
    net = task.Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    run, node = context.run_config, context.node_config
    loader, _ = task.load_data(node["partition-id"], node["num-partitions"], run["batch-size"])

    loss = task.train(net, loader, run["local-epochs"], msg.content["config"]["lr"])

    metrics = MetricRecord({"train_loss": loss, "num-examples": len(loader.dataset)})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluates the received model on local data."""
    net = task.Net()
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    run, node = context.run_config, context.node_config
    _, loader = task.load_data(node["partition-id"], node["num-partitions"], run["batch-size"])

    loss, accuracy = task.test(net, loader)

    metrics = MetricRecord(
        {"eval_loss": loss, "eval_acc": accuracy, "num-examples": len(loader.dataset)}
    )
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
