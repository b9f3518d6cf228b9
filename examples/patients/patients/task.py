"""The model, a site's table, and a plain PyTorch loop."""

from __future__ import annotations

import csv
from pathlib import Path

import torch
from torch import Tensor, nn

TABLE, ID, TARGET = "train.csv", "patient", "disease"


class Net(nn.Module):
    """Logistic regression, which starts at zero."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, 2)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.linear(inputs)
        return logits


def load(path: Path) -> tuple[Tensor, Tensor]:
    """Features (n, features) and labels (n,) of a table."""
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    names = [name for name in (rows[0] if rows else {}) if name not in (ID, TARGET)]
    inputs = torch.tensor([[float(row[name]) for name in names] for row in rows])
    return inputs, torch.tensor([int(row[TARGET]) for row in rows])


def train(net: Net, inputs: Tensor, labels: Tensor, *, steps: int, lr: float) -> float:
    """Trains on all rows at once, and returns the last loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(inputs), labels)
        loss.backward()
        optimizer.step()
    return float(loss)


@torch.no_grad()
def test(net: Net, inputs: Tensor, labels: Tensor) -> float:
    """Accuracy."""
    return float((net(inputs).argmax(1) == labels).float().mean())
