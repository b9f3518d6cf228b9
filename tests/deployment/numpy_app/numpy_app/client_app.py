"""A NumPyClient that trains with dropout and Adam."""

from __future__ import annotations

import numpy as np
import torch
from flwr.app import Context
from flwr.client import Client as FlowerClient
from flwr.client import NumPyClient
from flwr.clientapp import ClientApp
from numpy.typing import NDArray
from torch import nn

Arrays = list[NDArray[np.float32]]


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


def client_fn(context: Context) -> FlowerClient:
    return Client(int(context.node_config["partition-id"])).to_client()


app = ClientApp(client_fn=client_fn)
