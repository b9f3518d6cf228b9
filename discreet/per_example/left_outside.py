"""A check that a forward and a loss leave nothing of their examples where a later pass finds it: in
objects that are attributes, in global names of modules, in closures, in defaults, on classes.

What passes over data leave there is undone (`memory.py`).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import torch
from torch import nn

from discreet.layers.refusals import CONFUSED
from discreet.per_example.attributes import Attributes
from discreet.per_example.memory import Memory
from discreet.per_example.trial import KINDS, Trial, same_chance


@contextmanager
def nothing_left(trial: Trial) -> Iterator[Trial]:
    """A context with a trial, all of whose passes are undone.

    Raises:
      ValueError: passes with other examples leave something else; the message says where.
    """
    memory = Memory(trial.objective.modules, trial.objective.loss)
    own = replace(trial, objective=replace(trial.objective, memory=memory))
    try:
        yield own
    finally:
        memory.restore()
    if memory.changed:
        _compare(own, memory)


def _compare(trial: Trial, memory: Memory) -> None:
    found = []
    for seed in (0, 0, 1):
        is_run = _pass(trial, seed)
        found.append(memory.said())
        memory.restore()
        if not is_run:
            return
    for one, again, other in zip(*found, strict=True):
        if one == again != other:  # not a time, which differs always
            raise ValueError(
                f"the model's forward or the loss leaves something of its examples in {one[0]}: it "
                "would reach steps in which they are absent, neither clipped nor noised. Take out "
                "what keeps it, or set it in your own loop, between steps"
            )


def _pass(trial: Trial, seed: int) -> bool:
    """Runs the model and the loss, forward and backward, on made-up examples and targets, others
    for each seed, with the same random numbers. False if they can't be run."""
    objective = trial.objective
    for kind in KINDS:
        with (
            suppress(*CONFUSED),
            warnings.catch_warnings(action="ignore"),
            torch.enable_grad(),
            same_chance(trial.device),
            _rebound(objective.kept),
        ):
            examples = trial.examples(seed, kind=kind)
            targets = trial.targets_of(examples, of_one=seed > 0)
            losses = objective.losses(objective.outputs(examples), targets)
            torch.autograd.grad(losses.sum(), objective.trainable(), allow_unused=True)
            return True
    return False


@contextmanager
def _rebound(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A context in which parameters may be trained, and attributes be given other objects; at the
    end they have those of the beginning."""
    before = Attributes(modules)
    try:
        yield
    finally:
        before.rebind()
