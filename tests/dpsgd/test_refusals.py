"""Settings that a loop cannot serve are refused by their names."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD

from discreet import AdaptiveClipping
from tests.dpsgd.loops import PAIRS, private, sgd
from tests.node.clients import linear

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"loss": nn.CrossEntropyLoss()}, r'reduction=.mean.*reduction="none"'),
    ({"made": lambda values: SGD([*values, nn.Parameter(torch.zeros(2))], lr=0.1)}, "not the model's"),
    ({"made": lambda values: [SGD([next(values)], lr=0.1)]}, "does not hold all trainable"),
    ({"made": lambda values: [SGD(list(values), lr=0.1)] * 2}, "two of them hold the same parameter"),
    ({"made": lambda values: LBFGS(list(values))}, "LBFGS is not served"),
    ({"batch_size": 0}, "batch_size must be a whole number of at least 1"),
    ({"batch_size": None}, "batch_size must be a whole number of at least 1, not None"),
    ({"batch_size": 31}, "batch_size must be at most 30, the number of examples, not 31"),
    ({"public_num_examples": 7}, "batch_size must be at most 7, public_num_examples, not 8"),
    ({"epochs": 1.5}, "epochs must be a whole number"),
    ({"steps": 8, "epochs": 2}, "give epochs or steps, one of them"),
    ({"clip_norm": math.inf}, "clip_norm must be within"),
    ({"clip_norm": [1.0] * 9}, "clip_norm must have a value for each of the 8 steps, not 9"),
    ({"clip_norm": [1.0] * 7 + [0.0]}, "clip_norm must be within"),
    ({"clip_norm": AdaptiveClipping(0.0)}, "clip_norm must be within"),
    ({"clip_norm": AdaptiveClipping(1.0, maximum=0.5)}, "clipping.maximum must be within"),
    ({"clip_norm": AdaptiveClipping(1.0, count_stddev=0.3)}, "count_stddev must be > noise_multiplier / 2"),
    ({"clip_norm": AdaptiveClipping()}, "would hide a norm from search"),
    ({"delta": 1 / 30}, "delta must be above 0 and below 1 / 30"),
    ({"noise_multiplier": lambda step: step - 7.0}, "noise_multiplier must be finite and at least 0"),
    ({"noise_multiplier": 1.0, "target_epsilon": 1.0}, "give target_epsilon or privacy=LoopPrivacy"),
    ({"accountant": "gdp"}, "accountant must be one of"),
    ({"max_epsilon": 0.0}, "max_epsilon must be above 0"),
    ({"max_physical_batch": 0}, "max_physical_batch must be a whole number"),
    ({"target_epsilon": 0.0}, "target_epsilon must be finite and above 0"),
    ({"dataset": []}, "dataset must have an example"),
    ({"dataset": iter([1])}, "dataset must be map-style"),
    ({"dataset": [(1.0, 2, 3)] * 30}, "an example must be a pair"),
    ({"dataset": PAIRS, "collate_fn": lambda _: (torch.zeros(1, 5), torch.zeros(1))}, "must have as many rows"),
]


def test_settings_that_cannot_be_served_are_refused_by_their_names() -> None:
    for words, said in REFUSED:
        with pytest.raises(ValueError, match=said):
            next(iter(private(linear(), **words)))
    with pytest.raises(ValueError, match="give the module inside"):
        private(DistributedDataParallel.__new__(DistributedDataParallel), lambda _: sgd(linear().parameters()))
