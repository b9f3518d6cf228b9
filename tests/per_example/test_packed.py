"""Recurrent layers on packed sequences: examples of equal lengths are run together, and each has its own gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from discreet.per_example.objective import cross_entropy
from discreet.per_example.per_example import clipped_gradient_sum
from tests.per_example.test_per_example_choice import seeded

LENGTHS, SORTED = [3, 7, 2, 5, 2, 5], [7, 5, 5, 3, 2, 2]


class Reader(nn.Module):
    """Tokens (n, 7) with their lengths, packed, to three logits from the last state or from the padded outputs."""

    def __init__(self, kind: type[nn.RNNBase], *, layers: int, pads: bool, first: bool, is_sorted: bool) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(11, 6), nn.Linear(10, 3)
        self.layer = kind(6, 5, layers, batch_first=first, bidirectional=True)
        self.pads, self.first, self.is_sorted = pads, first, is_sorted

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        inner = self.tokens(tokens) if self.first else self.tokens(tokens).transpose(0, 1)
        packed = pack_padded_sequence(inner, lengths, batch_first=self.first, enforce_sorted=self.is_sorted)
        outputs, state = self.layer(packed)
        if self.pads:
            padded, _ = pad_packed_sequence(outputs, batch_first=self.first, total_length=7)
            return self.head(padded.sum(1 if self.first else 0))  # type: ignore[no-any-return]
        hidden = state[0] if isinstance(state, tuple) else state
        return self.head(torch.cat([hidden[-2], hidden[-1]], 1))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(("pads", "first"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize(("layers", "is_sorted"), [(1, False), (2, True)])
def test_packed_sequences_are_watched_by_their_lengths(
    kind: type[nn.RNNBase], layers: int, pads: bool, first: bool, is_sorted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("discreet.per_example.per_example.built_terms", None)  # the slow way is an error
    model = seeded(lambda: Reader(kind, layers=layers, pads=pads, first=first, is_sorted=is_sorted))
    tokens = torch.randint(0, 11, (6, 7), generator=torch.Generator().manual_seed(7127))
    lengths, targets = torch.tensor(SORTED if is_sorted else LENGTHS), torch.tensor([0, 1, 2, 0, 1, 2])
    alone = []
    for row in range(6):
        one = slice(row, row + 1)
        loss = cross_entropy(model(tokens[one], lengths[one]), targets[one]).sum()
        alone.append(torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, list(model.parameters()))]))
    gradients = torch.stack(alone)
    norms = gradients.norm(dim=1)
    clip = float(norms.median())
    total, found = clipped_gradient_sum(model, (tokens, lengths), targets=targets, clip_norm=clip)
    torch.testing.assert_close(found, norms, rtol=1e-4, atol=0)
    torch.testing.assert_close(total, (clip / norms).clamp(max=1) @ gradients, rtol=1e-3, atol=1e-5)
