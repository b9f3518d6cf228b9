"""A NumPyClient that trains with dropout and Adam, and one that is broken in the way that its node is told."""

from __future__ import annotations

import time

import numpy as np
import torch
from flwr.app import Context
from flwr.client import Client as FlowerClient
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from torch import nn

Arrays = list[NDArray[np.float32]]
LATE_SECONDS = 300


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 2))


class Client(NumPyClient):
    def __init__(self, number: int) -> None:
        self.net = network()
        self.inputs = torch.randn(20, 8, generator=torch.Generator().manual_seed(number))
        self.labels = (self.inputs.sum(1) > 0).long()

    def fit(self, parameters: Arrays, config: dict[str, float]) -> tuple[Arrays, int, dict[str, float]]:
        state = dict(zip(self.net.state_dict(), map(torch.tensor, parameters), strict=True))
        self.net.load_state_dict(state)
        self.net.train()
        optimizer = torch.optim.Adam(self.net.parameters(), lr=config["lr"])
        for _ in range(5):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(self.net(self.inputs), self.labels)
            loss.backward()
            optimizer.step()
        found = [values.numpy() for values in self.net.state_dict().values()]
        return found, len(self.labels), {"loss": loss.item()}


class BrokenClient(Client):
    def __init__(self, number: int, how: str) -> None:
        super().__init__(number)
        self.how = how

    def fit(self, parameters: Arrays, config: dict[str, float]) -> tuple[Arrays, int, dict[str, float]]:
        arrays, count, metrics = super().fit(parameters, config)
        if self.how == "late":
            time.sleep(LATE_SECONDS)
        if self.how == "raises":
            raise RuntimeError("this client is broken")
        wrong = {"shape": [arrays[0].T, *arrays[1:]], "fewer": arrays[1:], "words": [np.array(["no"]), *arrays[1:]]}
        return wrong.get(self.how, arrays), count, metrics


def client_fn(context: Context) -> FlowerClient:
    """The run says which clients are broken and how: `1=raises 2=shape`."""
    broken = dict(word.split("=") for word in str(context.run_config["broken"]).split())
    number = int(context.node_config["partition-id"])
    how = broken.get(str(number))
    return (Client(number) if how is None else BrokenClient(number, how)).to_client()


app = ClientApp(client_fn=client_fn)
