"""A mechanism from outside has numbers of its own: a run folder keeps them, and a resumed run has
the same."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from discreet import ConfigError, simulate
from tests.flower.flower_apps import run
from tests.mechanisms.box import Box

NAME = "privacy.user.mechanism=tests.mechanisms.box:Box"
SMALL = (NAME, "rounds=1", "seed=50053", "data.num_clients=40", "privacy.user.noise_multiplier=2")


@dataclass(frozen=True)
class Wide(Box):
    width: float = 0.5


@pytest.fixture
def widths(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The width with which each sum was released."""
    found = []
    release = Box.release

    def noted(self: Box, *given: Any) -> Any:
        found.append(self.width)
        return release(self, *given)

    monkeypatch.setattr(Box, "release", noted)
    return found


@pytest.mark.parametrize("clip_norm", [None, 1.0])
@pytest.mark.parametrize(
    ("mechanism", "width"),
    [
        (Box(noise_multiplier=2.0), 0.01),
        (Wide(noise_multiplier=2.0), 0.5),
        (Box(noise_multiplier=2.0, width=0.25), 0.25),
    ],
)
def test_a_strategy_keeps_them(
    mechanism: Box, width: float, clip_norm: float | None, widths: list[float], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    run(folder, num_rounds=2, mechanism=mechanism, delta=1e-3, clip_norm=clip_norm)
    assert widths == [width, width]
    kept = yaml.safe_load((folder / "config.yaml").read_text())["privacy"]["user"]
    assert kept["mechanism_numbers"] == {"width": width}


def test_a_resumed_run_has_the_same(widths: list[float], tmp_path: Path) -> None:
    folder = f"output_dir={tmp_path / 'run'}"
    numbers = "privacy.user.mechanism_numbers={width: 0.25}"
    simulate(*SMALL, numbers, folder)
    with pytest.raises(ConfigError, match="mechanism_numbers"):
        simulate("resume=true", "rounds=2", "privacy.user.mechanism_numbers={width: 0.5}", folder)
    simulate("resume=true", "rounds=2", folder)
    assert widths == [0.25, 0.25]


WRONG = {
    "{length: 1}": "privacy.user.mechanism_numbers must be by the names of its fields, ",
    "{width: [1, 2]}": "privacy.user.mechanism_numbers must be",
}


@pytest.mark.parametrize(("numbers", "message"), WRONG.items())
def test_what_the_class_does_not_have_is_refused(numbers: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        simulate(*SMALL, f"privacy.user.mechanism_numbers={numbers}")


def test_numbers_without_a_mechanism_and_values_that_no_folder_keeps_are_refused(
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=r"omitted without privacy\.user\.mechanism"):
        simulate("privacy.user.mechanism_numbers={width: 1}")
    odd = Box(noise_multiplier=2.0, width=torch.ones(3))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"mechanism\.width must be"):
        run(tmp_path / "run", mechanism=odd, delta=1e-3)
