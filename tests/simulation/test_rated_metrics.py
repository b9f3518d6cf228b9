"""Whole runs whose clients rate by other numbers than accuracy: what the run folder says beside the exact numbers,
computed in the plain way from the model of the run and what every client holds out."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from discreet.data.datasets import load_task
from discreet.data.partition import client_examples_of, held_out_rows
from discreet.models.models import build_model, load_parameters
from discreet.server.run_folder import RunFolder
from discreet.settings.compose import load_config
from discreet.simulation.in_process import simulate

CLIENTS = 30
WORDS = (
    *("evaluation.kind=private", "evaluation.every=2", "evaluation.noise_multiplier=0.05", "rounds=2", "seed=90067"),
    *(f"data.num_clients={CLIENTS}", "model.name=linear", "sampling.kind=everyone", "training.epochs=2"),
    *("privacy.user.noise_multiplier=0.3", "privacy.user.too_noisy=warn"),
)


@dataclass(frozen=True)
class HeldOut:
    """What the last model gives for what clients hold out: each client has the same weight in all."""

    outputs: np.ndarray
    targets: np.ndarray
    weights: np.ndarray
    owners: np.ndarray


def run(folder: Path, *words: str) -> tuple[dict[str, float | None], HeldOut]:
    """The last row of a run's metrics, and what they are about."""
    config = load_config([*WORDS, *words, f"output_dir={folder}"])
    simulate(config)
    task, checkpoint = load_task(config.data.name), RunFolder(folder).load_checkpoint()
    assert checkpoint is not None
    model = build_model("linear", task.shape.input_shape, task.shape.num_outputs, seed=0)
    load_parameters(model, checkpoint.params)
    clients, rows, owners = client_examples_of(task, config.data), list[int](), list[int]()
    for client in range(CLIENTS):
        own = clients.examples(client)
        held = held_out_rows(len(own), client, share=0.2).numpy()
        rows += own[held].tolist()
        owners += [client] * len(held)
    examples = task.train.subset(torch.tensor(rows))
    with torch.no_grad():
        outputs = model(examples.inputs).double().numpy()
    sizes = np.bincount(owners, minlength=CLIENTS)
    assert sizes.min() > 0
    return RunFolder(folder).read_metrics()[-1], HeldOut(
        outputs, examples.targets.double().numpy(), 1 / sizes[owners] / CLIENTS, np.array(owners)
    )


def assert_read(row: dict[str, float | None], name: str, exact: float, *, error: float, bias: float = 0.0) -> None:
    """Within two standard errors, which are at most `error`, and what bins add. The seed is fixed."""
    value, stated = row[name], row[f"{name}_error"]
    assert value is not None
    assert stated is not None
    assert 0 < stated <= error
    assert row[f"{name}_error_by_noise"] == pytest.approx(stated)  # everybody is asked
    assert abs(value - exact) <= 2 * stated + bias


def test_auc_and_its_curve(tmp_path: Path) -> None:
    from sklearn.metrics import roc_auc_score, roc_curve

    row, held = run(tmp_path / "run", "data.name=breast_cancer", "evaluation.metrics=[auc]")
    scores = held.outputs[:, 1] - held.outputs[:, 0]
    exact = roc_auc_score(held.targets, scores, sample_weight=held.weights)
    assert_read(row, "auc", exact, error=0.02, bias=0.01)
    false, true, thresholds = roc_curve(held.targets, scores, sample_weight=held.weights, drop_intermediate=False)
    points = csv.DictReader((tmp_path / "run" / "roc.csv").read_text().splitlines())
    middle = next(point for point in points if point["round"] == "2" and float(point["score"]) == 0)
    place = int((thresholds >= 0).sum()) - 1  # the last threshold that is not below 0
    for name, expected in (("true_positive_rate", true[place]), ("false_positive_rate", false[place])):
        assert float(middle[name]) == pytest.approx(expected, abs=3 * float(middle[f"{name}_error"]))


def test_r2(tmp_path: Path) -> None:
    from sklearn.metrics import r2_score

    row, held = run(tmp_path / "run", "data.name=diabetes", "evaluation.metrics=[r2]")
    exact = r2_score(held.targets, held.outputs.clip(-1, 1), sample_weight=held.weights)
    assert_read(row, "r2", exact, error=0.1)
