"""The network, the data of each node, and a plain PyTorch loop."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

TEST = 360  # examples that no node holds


class Net(nn.Module):
    """A small convolutional network for images of 8 by 8."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3, padding=1)
        self.head = nn.Linear(8 * 4 * 4, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = nn.functional.max_pool2d(torch.relu(self.conv(images)), 2)
        logits: Tensor = self.head(features.flatten(1))
        return logits


def digits() -> TensorDataset:
    """The digits that come with scikit-learn, in a fixed order."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(42))
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    return TensorDataset(images[order], torch.tensor(data.target)[order])


def load_data(
    partition_id: int, num_partitions: int, batch_size: int
) -> tuple[DataLoader, DataLoader]:
    """The data of one node: a share of the examples, a fifth of it for validation."""
    data = digits()
    mine = list(range(TEST + partition_id, len(data), num_partitions))
    kept = max(1, len(mine) // 5)
    train, validation = (TensorDataset(*data[part]) for part in (mine[kept:], mine[:kept]))
    return DataLoader(train, batch_size=batch_size, shuffle=True), DataLoader(
        validation, batch_size=batch_size
    )


def load_test_data() -> DataLoader:
    """The data of the server."""
    return DataLoader(TensorDataset(*digits()[:TEST]), batch_size=TEST)


def train(net: Net, loader: DataLoader, epochs: int, lr: float) -> float:
    """Trains, and returns the mean loss."""
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    total = 0.0
    net.train()
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(net(images), labels)
            loss.backward()
            optimizer.step()
            total += loss.item()
    return total / (epochs * len(loader))


@torch.no_grad()
def test(net: Net, loader: DataLoader) -> tuple[float, float]:
    """Loss and accuracy."""
    net.eval()
    loss, correct, seen = 0.0, 0, 0
    for images, labels in loader:
        logits = net(images)
        loss += nn.functional.cross_entropy(logits, labels, reduction="sum").item()
        correct += int((logits.argmax(1) == labels).sum())
        seen += len(labels)
    return loss / seen, correct / seen
