"""The plain LSTM, against the one of torch."""

from __future__ import annotations

import torch
from torch import nn

from discreet.privacy.rules.recurrent import LSTMLayer
from discreet.tasks.models import character_lstm, flatten_parameters

GENERATOR = torch.Generator().manual_seed(50077)


def torch_layer(layer: LSTMLayer) -> nn.LSTM:
    hidden, width = layer.hidden_weight.shape[1], layer.input_weight.shape[1]
    theirs = nn.LSTM(width, hidden, batch_first=True)
    with torch.no_grad():
        theirs.weight_ih_l0.copy_(layer.input_weight)
        theirs.weight_hh_l0.copy_(layer.hidden_weight)
        theirs.bias_ih_l0.copy_(layer.bias)
        theirs.bias_hh_l0.zero_()
    return theirs


def test_a_layer_gives_the_outputs_of_torch() -> None:
    layer, inputs = LSTMLayer(3, 5), torch.randn(4, 7, 3, generator=GENERATOR)
    assert torch.allclose(layer(inputs), torch_layer(layer)(inputs)[0], atol=1e-6)


def test_a_layer_gives_the_gradients_of_torch() -> None:
    layer, inputs = LSTMLayer(3, 5), torch.randn(4, 7, 3, generator=GENERATOR)
    theirs = torch_layer(layer)
    layer(inputs).square().sum().backward()
    theirs(inputs)[0].square().sum().backward()
    assert torch.allclose(layer.hidden_weight.grad, theirs.weight_hh_l0.grad, atol=1e-5)
    assert torch.allclose(layer.input_weight.grad, theirs.weight_ih_l0.grad, atol=1e-5)
    assert torch.allclose(layer.bias.grad, theirs.bias_ih_l0.grad, atol=1e-5)


def test_the_size_of_the_published_model_follows_from_its_widths() -> None:
    # Embedding 8, two layers of 256 with one bias, 98 characters: 4 * 256 * (in + 256 + 1) a layer.
    model = character_lstm(98, embedding=8, hidden=256, layers=2)
    expected = 98 * 8 + 1024 * (8 + 257) + 1024 * (256 + 257) + 257 * 98
    assert len(flatten_parameters(model)) == expected


def test_the_order_of_the_characters_matters() -> None:
    model, tokens = character_lstm(98), torch.randint(0, 98, (1, 80), generator=GENERATOR)
    assert not torch.allclose(model(tokens), model(tokens.flip(1)), atol=1e-4)
