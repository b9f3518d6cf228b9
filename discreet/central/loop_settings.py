"""What decides sampling, clip, noise and price of a loop."""

from __future__ import annotations

from dataclasses import dataclass, replace

from discreet.privacy.clipping import check_clip
from discreet.privacy.mechanisms import Gaussian
from discreet.settings.privacy import PRIVACY_DRAWS
from discreet.training.local_training import ExamplePrivacy


@dataclass(frozen=True)
class LoopSettings:
    """The settings of a loop that its steps and its account go by: `local_training.Stepping`.

    Raises:
      ValueError: one is out of range; the message names it.
    """

    epochs: int
    batch_size: int
    example: ExamplePrivacy

    def __post_init__(self) -> None:
        check_whole("epochs", self.epochs)
        check_whole("batch_size", self.batch_size)
        if self.example.public_num_examples is not None:
            check_whole("public_num_examples", self.example.public_num_examples)
            if self.example.public_num_examples < self.batch_size:
                raise ValueError(f"public_num_examples must be at least batch_size, {self.batch_size}")
        check_clip(self.example.l2_norm_clip, "l2_norm_clip")
        Gaussian(self.example.noise_multiplier, draws=self.example.draws)  # checks itself

    def with_noise(self, noise_multiplier: float) -> LoopSettings:
        """The same with another noise multiplier."""
        return replace(self, example=replace(self.example, noise_multiplier=noise_multiplier))


def check_whole(name: str, value: int) -> None:
    """Raises ValueError unless `value` is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")


def draws_of(noise: str) -> int:
    """How many draws make a value of noise.

    Raises:
      ValueError: an unknown kind of noise.
    """
    if noise not in PRIVACY_DRAWS:
        raise ValueError(f"noise must be one of {', '.join(PRIVACY_DRAWS)}, not {noise!r}")
    return PRIVACY_DRAWS[noise]
