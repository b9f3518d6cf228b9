"""Hints for argument names of other libraries: their counterparts in `DPSGD`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from dataclasses import fields
from functools import wraps
from typing import ParamSpec, TypeVar

from discreet.dpsgd.loop_plan import LoopPrivacy
from discreet.settings.rules import did_you_mean

Given = ParamSpec("Given")
Made = TypeVar("Made")
ELSEWHERE = {each.name: f"privacy=LoopPrivacy({each.name}=...)" for each in fields(LoopPrivacy)}
MEANT = {
    **dict.fromkeys(("max_grad_norm", "l2_norm_clip", "clip", "max_norm"), "clip_norm"),
    **dict.fromkeys(("epsilon", "eps"), "target_epsilon"),
    **dict.fromkeys(
        ("data_loader", "dataloader", "loader", "train_loader", "train_dataloader", "data"),
        "dataset",
    ),
    **dict.fromkeys(("criterion", "loss_fn", "loss_function"), "loss"),
    **dict.fromkeys(("noise", "sigma", "noise_scale"), ELSEWHERE["noise_multiplier"]),
    **dict.fromkeys(("max_physical_batch_size", "microbatches"), ELSEWHERE["max_physical_batch"]),
    "target_delta": "delta",
    "num_epochs": "epochs",
    "num_steps": "steps",
    "max_steps": "steps",
    **ELSEWHERE,
}


def names_meant(init: Callable[Given, Made]) -> Callable[Given, Made]:
    """A constructor, or a function, whose TypeError about an unknown argument names the one that is
    probably meant."""
    known = inspect.signature(init).parameters

    @wraps(init)
    def checked(*args: Given.args, **given: Given.kwargs) -> Made:
        for name in given:
            if name not in known:
                made = init.__qualname__.removesuffix(".__init__")
                raise TypeError(f"{made} has no argument {name}{_hint(name, known)}")
        return init(*args, **given)

    return checked


def _hint(name: str, known: Collection[str]) -> str:
    meant, _, _ = MEANT.get(name, "").partition("=")
    if meant in known:
        return f"; did you mean {MEANT[name]}?"
    return did_you_mean(name, known)
