"""A client starts anew for every message of a real federation: it imports no more than its work needs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
# Of what is in the environment of a whole project; the data are a table, since those of scikit-learn need it.
HEAVY = ("dp_accounting", "scipy", "hydra", "omegaconf", "sklearn", "datasets", "matplotlib")

WORK = """
import sys
import torch
import client_app.client_app
from discreet.node.nodes import virtual_client
from discreet.settings.client_settings import ClientSettings, UserTerms
from discreet.settings.data import DataConfig
from discreet.protocol.messages import TrainRequest, VirtualClient
data = DataConfig("folder", num_clients=300, partition="natural")
run = ClientSettings(5, 1e-3, "pld", "grid", data, user=UserTerms(True, 1.0, population_size=300))
request = TrainRequest(1, 0.3, run, VirtualClient(3, "", data_path="examples/own"))
client = virtual_client(request)
reply = client.answer(request, torch.zeros(sum(parameter.numel() for parameter in client.model.parameters())))
assert float(reply.update.norm()) > 0
print(",".join(sys.modules))
"""


def test_a_client_without_an_account_imports_no_accounting_and_no_configuration_language() -> None:
    command = [sys.executable, "-c", WORK]
    loaded = set(
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip().split(",")
    )
    assert {"torch", "flwr"} <= loaded
    of_the_server = {"discreet.settings.compose", "discreet.settings.settings", "discreet.server.plan"}
    assert sorted(loaded & {*HEAVY, *of_the_server}) == []
