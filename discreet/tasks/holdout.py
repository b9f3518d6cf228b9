"""Which of its examples a client never trains on, so that it can rate models on them."""

from __future__ import annotations

import math

import numpy as np
import torch

HOLDOUT_SEED = 20743  # public, as the rule is


def held_out_rows(num_examples: int, client_id: int, *, share: float) -> torch.Tensor:
    """The rows, ascending, (m,) int64, that a client of so many examples holds out: of each run of 1 / share rows one,
    chosen by a public seed and the client's number alone.

    The values of the examples do not matter, and rows that are added at the end leave the earlier choice as it is, so
    that nothing that was trained on is ever held out. m differs from share * num_examples by less than 1; it may be 0
    for fewer than 1 / share examples.

    >>> held_out_rows(20, 7, share=0.2).tolist() == held_out_rows(23, 7, share=0.2).tolist()[:4]
    True
    """
    edges = np.floor(np.arange(math.ceil(num_examples * share) + 1) / share)
    key = np.array([HOLDOUT_SEED, client_id], dtype=np.uint64)
    places = np.random.Generator(np.random.Philox(key=key)).random(len(edges) - 1)
    rows = (edges[:-1] + np.floor(places * np.diff(edges))).astype(np.int64)
    return torch.from_numpy(rows[rows < num_examples])


def split_rows(num_examples: int, client_id: int, *, share: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that a client trains on, and those that it holds out: both ascending, together all of them."""
    held = held_out_rows(num_examples, client_id, share=share)
    trained = torch.ones(num_examples, dtype=torch.bool)
    trained[held] = False
    return trained.nonzero().flatten(), held
