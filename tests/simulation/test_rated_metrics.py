"""A whole run whose clients rate by another number than accuracy: what its folder says beside the exact number."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score, roc_curve

from discreet.data.datasets import load_task
from discreet.data.partition import client_examples_of, held_out_rows
from discreet.models.models import build_model, load_parameters
from discreet.server.run_folder import RunFolder
from discreet.settings.compose import load_config
from discreet.simulation.in_process import simulate

CLIENTS = 30
WORDS = (
    *("evaluation.kind=private", "evaluation.every=2", "evaluation.noise_multiplier=0.05", "evaluation.metrics=[auc]"),
    *("rounds=2", "seed=90067", f"data.num_clients={CLIENTS}", "model.name=linear", "sampling.kind=everyone"),
    *(
        "training.epochs=2",
        "privacy.user.noise_multiplier=0.3",
        "privacy.user.too_noisy=warn",
        "data.name=breast_cancer",
    ),
)


def test_auc_and_its_curve_of_a_run_are_those_of_its_model_on_what_clients_hold_out(tmp_path: Path) -> None:
    """Within two standard errors, and what bins add. The seed is fixed; each client has the same weight in all."""
    simulate(load_config([*WORDS, f"output_dir={tmp_path / 'run'}"]))
    folder, task = RunFolder(tmp_path / "run"), load_task("breast_cancer")
    clients, model = client_examples_of(task, folder.read_config().data), build_model("linear", (30,), 2, seed=0)
    load_parameters(model, folder.load_checkpoint().params)
    held = [clients.examples(n)[held_out_rows(len(clients.examples(n)), n, share=0.2).numpy()] for n in range(CLIENTS)]
    examples = task.train.subset(torch.from_numpy(np.concatenate(held)))
    outputs = model(examples.inputs).detach().numpy()
    weights = np.concatenate([np.full(len(rows), 1 / len(rows)) for rows in held])
    given = {"y_true": examples.targets, "y_score": outputs[:, 1] - outputs[:, 0], "sample_weight": weights}
    row = folder.read_metrics()[-1]
    assert 0 < row["auc_error"] <= 0.02
    assert row["auc_error_by_noise"] == pytest.approx(row["auc_error"])  # everybody is asked
    assert row["auc"] == pytest.approx(roc_auc_score(**given), abs=2 * row["auc_error"] + 0.01)
    false, true, thresholds = roc_curve(**given, drop_intermediate=False)
    points = csv.DictReader((tmp_path / "run" / "roc.csv").read_text().splitlines())
    middle = next(point for point in points if point["round"] == "2" and float(point["score"]) == 0)
    place = int((thresholds >= 0).sum()) - 1  # the last threshold that is not below 0
    for name, expected in (("true_positive_rate", true[place]), ("false_positive_rate", false[place])):
        assert float(middle[name]) == pytest.approx(expected, abs=3 * float(middle[f"{name}_error"]))
