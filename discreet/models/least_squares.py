"""Least squares in one round: a client's update is X'X and X'y of its rows, and the sum, with its
noise, gives the model."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

LOGITS = 2.5  # per unit of a class's share, as a logistic curve rises
# The ridge, over the size of the most negative eigenvalue: X'X has none, so that is noise.
RIDGE = 2.0
LEAST_RIDGE = 1e-3


def weight_of_products(width: int) -> float:
    """The weight of X'y beside X'X, so that noise moves both alike. `width`: of a row."""
    return math.sqrt(1 + width / 5)


class LeastSquares(nn.Module):
    """A linear model whose parameters are sums over rows x with a 1 added: `squares`, the upper
    triangle of x x', and `products`, x for each class.

    In training its loss is linear in the parameters (`discreet.training.losses.least_squares`), so
    that one step of learning rate 1 from zeros adds the mean of these over a client's rows. In
    evaluation it solves the ridge regression of each class on x, for logits (n, classes).
    """

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        size = width + 1
        self.weight_of_products = weight_of_products(width)
        rows, columns = torch.triu_indices(size, size)
        self.register_buffer("rows", rows.clone(), persistent=False)
        self.register_buffer("columns", columns.clone(), persistent=False)
        # A pair stands for both of its places in x x', with the same norm.
        weights = torch.where(rows == columns, 1.0, math.sqrt(2))
        self.register_buffer("weights", weights, persistent=False)
        self.squares = nn.Parameter(torch.zeros(len(rows)))
        self.products = nn.Parameter(torch.zeros(size, classes))

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits in evaluation mode, else the numbers whose gradients are the sums."""
        flat = inputs.flatten(1)
        x = torch.cat([flat, torch.ones_like(flat[:, :1])], dim=1)
        if not self.training:
            return x @ self.solved().to(x.dtype)
        pairs = x[:, self.get_buffer("rows")] * x[:, self.get_buffer("columns")]
        squares = (pairs * self.get_buffer("weights")) @ self.squares
        return squares[:, None] + self.weight_of_products * (x @ self.products)

    def solved(self) -> Tensor:
        """The weights (inputs + 1, classes) for logits."""
        size = len(self.products)
        upper = torch.zeros(size, size, dtype=torch.float64)
        weights = self.get_buffer("weights")
        halves = self.squares.double() / torch.where(weights == 1, 2.0, weights)
        upper = upper.index_put((self.get_buffer("rows"), self.get_buffer("columns")), halves)
        matrix = upper + upper.T
        noise = torch.linalg.eigvalsh(matrix)[0].clamp(max=0).neg()
        ridge = RIDGE * noise + LEAST_RIDGE
        products = self.products.double() / self.weight_of_products
        kept = matrix + ridge * torch.eye(size, dtype=torch.float64)
        solved: Tensor = torch.linalg.solve(kept, products)
        return LOGITS * solved


def least_squares_model(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """The model for rows of this shape."""
    return LeastSquares(math.prod(input_shape), num_classes)
