"""Clients that rate a model of one's own: what one client's examples do to its forward moves no
other client's answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from discreet import simulate
from discreet.mechanisms.sums import AnswerSum
from discreet.privacy.randomness import RandomSource
from tests.simulation.test_one_owner_more import ONCE, OWNERS
from tests.tables.made_tables import write_hospital

AGE = 0.95  # above the age of all but one owner, in the public range as -1..1


class Branching(nn.Module):
    """One old patient turns the outputs of all rows."""

    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        return -outputs if bool((inputs[:, 0] > AGE).any()) else outputs


class Keeping(Branching):
    """An old patient that is rated turns the outputs of all that come later."""

    seen = False

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layer(inputs)
        if not self.training and len(inputs):
            self.seen = self.seen or bool((inputs[:, 0] > AGE).any())
        return -outputs if self.seen else outputs


def branching(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return Branching(input_shape[0])


def keeping(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return Keeping(input_shape[0])


def answers(folder: Path, owners: list[tuple[str, int]], *words: str) -> Tensor:
    """The sums of the clients' answers, before noise."""
    rows = [
        f"{name},{age},{('no', 'yes')[visit > 0]}" for name, age in owners for visit in range(6)
    ]
    table = {"train": ["pid,age,returned", *rows]}
    table["test"] = ["pid,age,returned", "T1,40,no", "T2,80,yes"]
    folder.mkdir()
    write_hospital(folder / "data", "age = [0, 110]\n", table)
    sums = list[Tensor]()
    released = AnswerSum.released

    def noted(self: AnswerSum, source: RandomSource) -> Tensor:
        step = self.rows.grid.step if self.rows.grid else 1.0
        sums.append(self.rows.values.double() * step)
        return released(self, source)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AnswerSum, "released", noted)
        number = f"data.num_clients={len(owners)}"
        folders = f"data.path={folder / 'data'}", f"output_dir={folder / 'run'}"
        simulate(*ONCE, "rounds=2", "evaluation.every=1", *words, number, *folders)
    return torch.stack(sums)


@pytest.mark.parametrize("engine", ["batched", "sequential"])
@pytest.mark.parametrize("model", ["branching", "keeping"])
def test_one_client_more_moves_the_sum_of_answers_by_at_most_one(
    model: str, engine: str, tmp_path: Path
) -> None:
    owners = [(f"P{number:03d}", 20 + 2 * number % 60) for number in range(OWNERS)]
    words = (f"engine={engine}", f"model.name={__name__}:{model}")
    without, with_more = (
        answers(tmp_path / name, people, *words)
        for name, people in (("without", owners), ("with", [("A900", 110), *owners]))
    )
    assert len(without) == 2
    assert float((with_more - without).norm(dim=1).max()) <= 1 + 1e-6
