"""A client starts anew for every message of a real federation: it imports no more than its work needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# Of what is in the environment of a whole project; the data are a table, since those of scikit-learn need it.
HEAVY = ("dp_accounting", "scipy", "hydra", "sklearn", "datasets", "matplotlib")

WORK = """
import sys
import torch
import client_app.client_app
from client_app.nodes import virtual_client
from discreet.config import config_from_json
from discreet.federated.messages import Order
order = Order(1, 0.3, sys.argv[1], client_id=3, state_folder="")
client = virtual_client(order, config_from_json(order.settings))
reply = client.answer(order, torch.zeros(sum(parameter.numel() for parameter in client.model.parameters())))
assert float(reply.update.norm()) > 0
print(",".join(sys.modules))
"""


def test_a_client_without_an_account_imports_no_accounting_and_no_configuration_language() -> None:
    settings = """
from discreet.config import config_to_json, load_config
words = ["data.name=folder", "data.path=examples/own", "data.partition=natural", "data.num_clients=300"]
print(config_to_json(load_config([*words, "privacy.user.noise_multiplier=1"])))
"""
    written = run(settings)
    loaded = set(run(WORK, written.strip()).strip().split(","))
    assert {"torch", "flwr"} <= loaded
    assert sorted(loaded & set(HEAVY)) == []


def run(code: str, *words: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code, *words], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
