"""A table whose owners are clients: one owner more, wherever its name comes in the order of all
names, changes nothing about the others."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from discreet import ConfigError, simulate
from tests.tables.made_tables import write_hospital

OWNERS, CLIP, PLACES = 30, 0.05, 35
ONCE = (
    "experiment=table",
    f"sampling={{kind: everyone, population_size: {PLACES}}}",
    "sampling.probability=1",
    "rounds=1",
    "server.learning_rate=1",
    "server.momentum=0",
    f"privacy.user.clip.norm={CLIP}",
    "privacy.user.noise_multiplier=1",
    "privacy.delta=1e-3",
    "evaluation.kind=private",
    "evaluation.noise_multiplier=5",
    "evaluation.share=0.5",
    "seed=5",
)


def table(folder: Path, owners: list[str]) -> list[str]:
    """The settings for a table in which the visits of an owner differ."""
    visits = [
        f"{owner},{20 + 7 * int(owner[1:]) % 60 + 3 * visit},{('no', 'yes')[visit % 2]}"
        for owner in owners
        for visit in range(6)
    ]
    tables = {"train": ["pid,age,returned", *visits]}
    tables["test"] = ["pid,age,returned", "T1,40,no", "T2,80,yes"]
    write_hospital(folder, "age = [0, 110]\n", tables)
    return [f"data.path={folder}", f"data.num_clients={len(owners)}"]


def trained(folder: Path, owners: list[str], *words: str) -> torch.Tensor:
    folder.mkdir(exist_ok=True)
    run = simulate(*ONCE, *words, *table(folder / "data", owners), f"output_dir={folder / 'run'}")
    model = load_file(run / "model.safetensors")
    return torch.cat([model[name].flatten().double() for name in sorted(model)])


@pytest.mark.parametrize("engine", ["batched", "sequential"])
@pytest.mark.parametrize("more", ["A900", "P015", "Z900"])
def test_one_owner_more_moves_the_sum_by_at_most_the_clip_norm(
    more: str, engine: str, tmp_path: Path
) -> None:
    owners = [f"P{number:03d}" for number in range(100, 100 + OWNERS)]
    words = (f"engine={engine}",)
    without, with_more = (
        trained(tmp_path / name, names, *words)
        for name, names in (("without", owners), ("with", [*owners, more]))
    )
    moved = float((with_more - without).norm()) * PLACES
    assert moved <= CLIP * (1 + 1e-4)


def test_turns_that_would_follow_from_the_other_owners_are_refused(tmp_path: Path) -> None:
    owners = [f"P{number:03d}" for number in range(100, 100 + OWNERS)]
    with pytest.raises(ConfigError, match=r"data\.partition=natural changes with each new client"):
        trained(tmp_path, owners, "sampling={kind: cyclic, groups: 3}", "evaluation.kind=none")
