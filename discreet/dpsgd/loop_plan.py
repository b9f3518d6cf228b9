"""The public numbers of a loop: the chance of an example, and each step's noise, clip norm and cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from torch import Tensor

from discreet.accounting.events import check_noise_multiplier, poisson_round_event
from discreet.dpsgd.adaptive_norm import AdaptiveClipping, AdaptiveNorm
from discreet.privacy.clipping import check_clip
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.quantile import BIT_SENSITIVITY, split_noise_multiplier
from discreet.privacy.randomness import RandomSource
from discreet.training.local_training import step_noise

if TYPE_CHECKING:
    from dp_accounting import DpEvent

Schedule = float | Sequence[float] | Callable[[int], float]  # one number, or one for each step from step 0 on


def values_of(schedule: Schedule, steps: int, *, name: str) -> tuple[float, ...]:
    """The number of each step, (steps,). A function is called here for all steps, before a batch is drawn: what it
    gives can't follow from what the loop sees. Raises ValueError: a list of another length."""
    if callable(schedule):
        return tuple(float(schedule(step)) for step in range(steps))
    if not isinstance(schedule, Sequence):
        return (float(schedule),) * steps
    if len(schedule) != steps:
        raise ValueError(f"{name} must have a value for each of the {steps} steps, not {len(schedule)}")
    return tuple(map(float, schedule))


def stretches(values: Sequence[float]) -> list[list[float]]:
    """Each value, and how many steps on end have it.

    >>> stretches([2.0, 2.0, 1.0])
    [[2.0, 2], [1.0, 1]]
    """
    return [[value, sum(1 for _ in group)] for value, group in groupby(values)]


@dataclass(frozen=True)
class LoopPlan:
    """All that decides the privacy of a loop's steps, before the first one.

    Attributes:
      num_examples: n of the sampling, the data set's size or the constant in its place.
      batch_size: the expected size of a batch, which noised sums are divided by.
      noises: the noise multiplier of each step, (steps,), in units of `scale`.
      clips: the clip norm of each step, (steps,), or how it adapts.
    """

    num_examples: int
    batch_size: int
    noises: tuple[float, ...]
    clips: tuple[float, ...] | AdaptiveClipping
    scale: float = 1.0

    def __post_init__(self) -> None:
        for noise in set(self.noises):
            check_noise_multiplier(noise)
        for clip_norm in {self.first_clip_norm} if isinstance(self.clips, AdaptiveClipping) else set(self.clips):
            check_clip(clip_norm, "clip_norm")

    @property
    def steps(self) -> int:
        """The number of steps."""
        return len(self.noises)

    @property
    def probability(self) -> float:
        """The chance of each example to be in a batch."""
        return self.batch_size / self.num_examples

    @property
    def first_clip_norm(self) -> float:
        """The clip norm of step 0."""
        return self._adaptive(self.clips).first if isinstance(self.clips, AdaptiveClipping) else self.clips[0]

    def _adaptive(self, clipping: AdaptiveClipping) -> AdaptiveNorm:
        return AdaptiveNorm(clipping, self.batch_size, self.scale * max(self.noises))

    def noise_multiplier(self, step: int) -> float:
        """The noise of a step as a whole, over its clip norm; after the last step that of the last one."""
        return self.scale * self.noises[min(step, self.steps - 1)]

    def events(self) -> list[tuple[DpEvent, int]]:
        """What each step costs, in order: an event, and how many steps on end cost that.

        With a declared number neighbours differ by one example that is added or removed. Without it the guarantee is
        zero-out: a real removal would change everybody's probability.
        """
        return [
            (poisson_round_event(self.probability, noise_multiplier=self.scale * noise), int(count))
            for noise, count in stretches(self.noises)
        ]

    def released(
        self, total: Tensor, centred_count: Tensor, clip_norm: float, *, step: int, source: RandomSource
    ) -> tuple[Tensor, float]:
        """The noised mean of a step, with noise for the clip norm that clipped, and the clip norm of the next step."""
        noise = self.noise_multiplier(step)
        if isinstance(self.clips, AdaptiveClipping):
            norm = self._adaptive(self.clips)
            on_count = Gaussian(norm.count_stddev / BIT_SENSITIVITY)
            count = on_count.add_noise(centred_count, BIT_SENSITIVITY, source.child("step", step).child("count"))
            following = norm.after(clip_norm, step=step, centred_count=float(count))
            noise = split_noise_multiplier(noise, count_stddev=norm.count_stddev)
        else:
            following = self.clips[min(step + 1, self.steps - 1)]
        return Gaussian(noise).add_noise(total, clip_norm, step_noise(source, step)).div_(self.batch_size), following

    def facts(self) -> dict[str, object]:
        """What a state must agree with, as JSON would have it: all but the scale."""
        clips = asdict(self.clips) if isinstance(self.clips, AdaptiveClipping) else stretches(self.clips)
        sizes = {"num_examples": self.num_examples, "batch_size": self.batch_size, "steps": self.steps}
        return {**sizes, "noise_multiplier": stretches(self.noises), "clip_norm": clips}
