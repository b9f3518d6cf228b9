"""A curious server: FedAvg, which prints all that has come."""

from __future__ import annotations

import json
from collections.abc import Iterable

import torch
from flwr.app import ArrayRecord, Context, Message
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

app = ServerApp()


def seen(reply: Message) -> dict[str, object]:
    """All that a reply says, with the largest value of each array."""
    if reply.has_error():
        return {"error": reply.error.code, "reason": reply.error.reason}
    found: dict[str, object] = {}
    for name, record in reply.content.items():
        if isinstance(record, ArrayRecord):
            found[name] = {key: float(abs(each.numpy()).max()) for key, each in record.items()}
        else:
            found[name] = dict(record)
    return found


class Curious(FedAvg):
    """FedAvg that looks."""

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> object:
        """Prints, and averages."""
        kept = list(replies)
        for reply in kept:
            print("SEEN", json.dumps(seen(reply)), flush=True)
        return super().aggregate_train(server_round, kept)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """One round."""
    nodes = int(context.run_config["nodes"])
    arrays = ArrayRecord({"weight": torch.zeros(2, 3), "bias": torch.zeros(2)})
    strategy = Curious(min_train_nodes=nodes, min_available_nodes=nodes, fraction_evaluate=0.0)
    strategy.start(grid=grid, initial_arrays=arrays, num_rounds=1)
