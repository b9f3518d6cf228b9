"""The guide's table of layers is what trying each of them gives, and it names every class of
torch.nn."""

from __future__ import annotations

import re
from importlib import import_module

import pytest
import torch
from torch import nn

from discreet.layers.layer_rules import OTHER_FILES, RULES
from tests.per_example.layers_cases import BASES, GROUPS, LOSSES
from tests.per_example.layers_table import MARK, PAGE, losses, section, tried


@pytest.mark.parametrize("group", GROUPS)
def test_the_table_is_what_trying_the_layers_gives(group: str) -> None:
    names = {type(case.layer()).__name__ for case in GROUPS[group]}
    lines = PAGE.read_text().split(MARK)[1].splitlines(keepends=True)
    rows = [line for line in lines if line.startswith("| ")]
    told = [line for line in rows if re.split(r"[|,]", line)[1].strip() in names]
    assert section(group) == "".join(told)


def test_the_table_says_which_losses_have_one_value_an_example() -> None:
    assert PAGE.read_text().endswith(losses())


def test_the_table_names_every_class_of_torch_nn() -> None:
    kinds = {
        name
        for name, kind in vars(nn).items()
        if isinstance(kind, type) and issubclass(kind, nn.Module)
    }
    tried_ones = {type(case.layer()).__name__ for cases in GROUPS.values() for case in cases}
    assert kinds == tried_ones | {type(loss).__name__ for loss in LOSSES} | {*BASES, "DataParallel"}


def test_the_rules_of_other_files_are_those_that_these_files_have() -> None:
    for file, names in OTHER_FILES.items():
        assert {*names} == import_module(f"discreet.layers.{file}").RULES.keys()


class Mixing(nn.Module):
    """Adds the batch in reverse, which for a single example is itself."""

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs + inputs.flip(0)


def test_a_layer_that_is_not_served_as_single_examples_are_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(RULES, "flip", lambda alone, inputs, *_: alone.rows(inputs).flip(0))
    monkeypatch.setattr("discreet.per_example.agreement._tried_on", lambda *_: "")
    monkeypatch.setattr("discreet.per_example.agreement._mixed", lambda *_: False)
    model, inputs = nn.Sequential(nn.Linear(4, 4), Mixing(), nn.Linear(4, 3)), torch.randn(5, 4)
    with pytest.raises(AssertionError):
        tried(model, inputs, torch.tensor([0, 1, 2, 0, 1]))
