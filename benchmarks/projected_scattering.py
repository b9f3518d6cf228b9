"""A linear model on 1000 fixed features: random projections of scattering features, for runs whose
noise grows with the number of parameters (`model.name=benchmarks.projected_scattering:build`).

The runs mnist_shared and mnist_own of docs/results/guarded.csv (own: 3.162 times the noise
multiplier, the root of the number of sites, as one sum has the noise of each):

  discreet simulate experiment=guarded data.name=mnist data.path=FOLDER data.num_clients=1000 \
    model.name=benchmarks.projected_scattering:build training.epochs=4 training.batch_size=64 \
    training.learning_rate=3.6 server.learning_rate=1.5 privacy.delta=1e-5 \
    privacy.user.clip.norm=0.3 [privacy.user.target_epsilon=null
    privacy.user.noise_multiplier=34.53]
"""

from __future__ import annotations

import torch
from torch import nn

from discreet.models.scattering import Scattering

FEATURES, SEED = 1000, 4099
# A feature vector's norm is about 2.4 with it, so that clipped updates are not mostly bias.
SCALE = 1 / 0.3


def build(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    """Maps images (n, *input_shape) to logits (n, num_classes)."""
    fixed = Scattering(input_shape)
    projection = nn.Linear(fixed.out_features, FEATURES, bias=False)
    draws = torch.Generator().manual_seed(SEED)
    projection.weight.data = torch.randn(projection.weight.shape, generator=draws)
    projection.weight.data *= SCALE / FEATURES**0.5
    projection.weight.requires_grad = False
    return nn.Sequential(fixed, projection, nn.Linear(FEATURES, num_classes))
