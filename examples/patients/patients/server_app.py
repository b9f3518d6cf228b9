"""The server: Flower's own averaging, and the researcher's test table."""

from __future__ import annotations

from pathlib import Path

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, FedAvgM, Strategy

from patients import task

app = ServerApp()


def strategy_of(context: Context) -> Strategy:
    """FedAvg, with server momentum if the run configures it."""
    run, nodes = context.run_config, int(context.run_config["nodes"])
    everyone = {"min_train_nodes": nodes, "min_available_nodes": nodes, "fraction_evaluate": 0.0}
    if not float(run["server-momentum"]):
        return FedAvg(**everyone)
    steps = {
        "server_learning_rate": float(run["server-lr"]),
        "server_momentum": float(run["server-momentum"]),
    }
    return FedAvgM(**everyone, **steps)


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Trains, and rates each round's model on the table `test`, if there is one."""
    run = context.run_config

    def rated(number: int, arrays: ArrayRecord) -> MetricRecord:
        net = task.Net(int(run["features"]))
        net.load_state_dict(arrays.to_torch_state_dict())
        accuracy = task.test(net, *task.load(Path(str(run["test"]))))
        print(f"round {number}: accuracy {accuracy:.4f}", flush=True)
        return MetricRecord({"accuracy": accuracy})

    first = ArrayRecord(task.Net(int(run["features"])).state_dict())
    strategy_of(context).start(
        grid=grid,
        initial_arrays=first,
        num_rounds=int(run["num-server-rounds"]),
        evaluate_fn=rated if run["test"] else None,
    )
