"""The client: it trains on the table in its node's folder."""

from __future__ import annotations

from pathlib import Path

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from patients import task

app = ClientApp()


def held(msg: Message, context: Context) -> tuple[task.Net, tuple]:
    """The received model, and the rows of this node."""
    net = task.Net(int(context.run_config["features"]))
    net.load_state_dict(msg.content["arrays"].to_torch_state_dict())
    return net, task.load(Path(context.node_config["data"]) / task.TABLE)


@app.train()
def train(msg: Message, context: Context) -> Message:
    """Trains the received model, and sends it back."""
    net, rows = held(msg, context)
    run = context.run_config
    loss = task.train(net, *rows, steps=int(run["local-steps"]), lr=float(run["lr"]))
    metrics = MetricRecord({"train_loss": loss, "num-examples": len(rows[1])})
    content = RecordDict({"arrays": ArrayRecord(net.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=msg)


@app.evaluate()
def evaluate(msg: Message, context: Context) -> Message:
    """Evaluates the received model."""
    net, rows = held(msg, context)
    metrics = MetricRecord({"accuracy": task.test(net, *rows), "num-examples": len(rows[1])})
    return Message(content=RecordDict({"metrics": metrics}), reply_to=msg)
