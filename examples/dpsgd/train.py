"""Handwritten digits with DP-SGD in a custom loop: python examples/dpsgd/train.py

The data set comes with scikit-learn: 1797 images of 8 x 8 pixels, of which 1500 are for training.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from discreet import DPSGD


class SmallNet(nn.Module):
    """A convolution and a residual block, with GroupNorm instead of BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm, self.pool, self.output = nn.GroupNorm(4, 16), nn.AvgPool2d(2), nn.Linear(256, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.first(images))
        inner = inner + torch.relu(self.norm(self.second(inner)))
        return self.output(self.pool(inner).flatten(1))


def main() -> None:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)

    model = SmallNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    private = DPSGD(
        model,
        optimizer,
        TensorDataset(images[:1500], labels[:1500]),
        loss=nn.CrossEntropyLoss(reduction="none"),
        batch_size=256,
        epochs=20,
        target_epsilon=3.0,
        delta=1e-4,
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=len(private))
    for inputs, targets in private:
        private.step(inputs, targets)
        scheduler.step()

    with torch.no_grad():
        right = (model(images[1500:]).argmax(1) == labels[1500:]).float().mean()
    print(private)
    print(
        f"epsilon {private.epsilon():.3f} at delta 1e-4, accuracy on {len(images) - 1500} other "
        f"images {right:.3f}"
    )


if __name__ == "__main__":
    main()
