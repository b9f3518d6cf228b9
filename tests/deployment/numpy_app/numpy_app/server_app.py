"""Federated averaging of NumPyClients by Flower's own strategy."""

from __future__ import annotations

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from numpy_app.client_app import network

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = FedAvg(
        fraction_evaluate=0.0,
        arrayrecord_key="fitins.parameters",
        configrecord_key="fitins.config",
        weighted_by_key="num_examples",
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(network().state_dict()),
        num_rounds=int(context.run_config["num-server-rounds"]),
        timeout=float(context.run_config["timeout"]),
        train_config=ConfigRecord({"lr": 0.01}),
    )
    print("trained", sorted(result.arrays))
