"""The server: it starts the rounds, and evaluates the model on its own texts."""

from __future__ import annotations

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

from text_app import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Fine-tunes the model, and writes the folder `adapter`, which peft loads."""
    run = context.run_config
    model = task.build(run["weights"])
    texts = task.load_data(run["texts"], run["weights"], "test.csv")

    def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
        task.load_learned(model, arrays.to_torch_state_dict())
        loss, accuracy = task.test(model, texts)
        return MetricRecord({"loss": loss, "accuracy": accuracy})

    strategy = FedAvg(fraction_train=float(run["fraction-train"]), fraction_evaluate=0.0)

    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(task.learned(model)),
        num_rounds=int(run["num-server-rounds"]),
        evaluate_fn=evaluate,
    )
    task.load_learned(model, result.arrays.to_torch_state_dict())
    model.save_pretrained("adapter")
