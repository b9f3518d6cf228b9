"""The oracle of the per-example tests: a loop of backward passes over single examples, by plain
autograd."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from discreet.per_example.objective import cross_entropy
from discreet.per_example.per_example import clipped_gradient_sum, l1_clipped_gradient_sum

Loss = Callable[[Tensor, Tensor], Tensor]


def by_position(outputs: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy for a model that gives a position's classes last."""
    return cross_entropy(outputs.movedim(-1, 1), targets)


def loss_for(targets: Tensor) -> Loss:
    """The loss of the models of these tests: of one class an example, or one at each position."""
    return cross_entropy if targets.dim() == 1 else by_position


def single_gradients(
    model: nn.Module,
    inputs: Tensor | tuple[Tensor, ...],
    targets: Tensor,
    *,
    loss: Loss | None = None,
) -> Tensor:
    """(n, num_params) of the trained ones: each row from one forward and one backward pass, zero
    without a gradient. `inputs`: a tuple for a model that takes several."""
    parts = inputs if isinstance(inputs, tuple) else (inputs,)
    rows, loss = [], loss or loss_for(targets)
    trained = [value for value in model.parameters() if value.requires_grad]
    for index in range(len(parts[0])):
        model.zero_grad()
        one = slice(index, index + 1)
        loss(model(*(part[one] for part in parts)), targets[one]).sum().backward()  # type: ignore[no-untyped-call]
        found = [torch.zeros_like(p) if p.grad is None else p.grad for p in trained]
        rows.append(torch.cat([value.flatten() for value in found]).detach().clone())
    model.zero_grad()
    return torch.stack(rows) if rows else torch.zeros(0, sum(value.numel() for value in trained))


def clipped_sum(gradients: Tensor, clip: float, *, order: int = 2) -> tuple[Tensor, Tensor]:
    """The sum of rows scaled to at most `clip`, in float64, and their norms; rows that are not
    finite count as zero."""
    rows = gradients.double()
    norms = rows.abs().sum(1) if order == 1 else rows.square().sum(1).sqrt()
    total = torch.zeros(rows.shape[1]).double()
    for row, norm in zip(rows, norms.tolist(), strict=True):
        if norm < math.inf:
            total += row * min(1.0, clip / max(norm, 1e-300))
    return total, norms


def fast_sum(
    model: nn.Module, inputs: Tensor, targets: Tensor, *, clip: float, order: int = 2
) -> tuple[Tensor, Tensor]:
    """The sum by the code under test for norms of this order."""
    loss = loss_for(targets)
    if order == 1:
        return l1_clipped_gradient_sum(model, inputs, targets=targets, clip_norm=clip, loss=loss)
    return clipped_gradient_sum(model, inputs, targets=targets, clip_norm=clip, loss=loss)


def assert_matches(
    model: nn.Module, inputs: Tensor, targets: Tensor, *, clip: float, order: int = 2
) -> None:
    """The fast sum and norms are those of the oracle, to the precision of float32."""
    total, norms = fast_sum(model, inputs, targets, clip=clip, order=order)
    wanted, wanted_norms = clipped_sum(single_gradients(model, inputs, targets), clip, order=order)
    assert total.shape == wanted.shape
    torch.testing.assert_close(norms.double(), wanted_norms, rtol=2e-4, atol=1e-6)
    # Rounding grows with the number of summands, not with their sum, which may cancel.
    scale = float(wanted_norms.clamp(max=clip).sum()) if len(norms) else 0.0
    assert float((total.double() - wanted).norm()) <= 2e-4 * scale + 1e-7


def test_the_oracle_is_the_closed_form_for_logistic_regression() -> None:
    draws = torch.Generator().manual_seed(9203)
    model, inputs = nn.Linear(3, 2), torch.randn(4, 3, generator=draws)
    targets = torch.tensor([0, 1, 1, 0])
    errors = model(inputs).softmax(1) - nn.functional.one_hot(targets, 2)
    weights = torch.einsum("np,nd->npd", errors, inputs).flatten(1)
    torch.testing.assert_close(
        single_gradients(model, inputs, targets), torch.cat([weights, errors], 1).detach()
    )


def test_the_oracle_clips_long_rows_and_leaves_short_ones() -> None:
    total, norms = clipped_sum(torch.tensor([[3.0, 4.0], [0.3, 0.4], [math.inf, 0.0]]), 1.0)
    torch.testing.assert_close(total, torch.tensor([0.9, 1.2]).double())
    assert norms.tolist()[0] == 5.0
