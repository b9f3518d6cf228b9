"""Federated averaging of NumPyClients, made private."""

from __future__ import annotations

from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp

from discreet import CentralGaussian, DPFedAvg
from numpy_app.client_app import network

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    strategy = DPFedAvg(
        arrayrecord_key="fitins.parameters",
        configrecord_key="fitins.config",
        population_size=20,
        mechanism=CentralGaussian(noise_multiplier=1.0, delta=1e-3),
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(network().state_dict()),
        num_rounds=int(context.run_config["num-server-rounds"]),
        timeout=float(context.run_config["timeout"]),
        train_config=ConfigRecord({"lr": 0.01}),
    )
    print("trained", sorted(result.arrays))
