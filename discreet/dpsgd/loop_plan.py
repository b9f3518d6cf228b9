"""The public numbers of a loop: the chance of an example, and each step's noise, clip norm and cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from torch import Tensor

from discreet.accounting.events import check_noise_multiplier, poisson_round_event
from discreet.privacy.clipping import check_clip
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.quantile import BIT_SENSITIVITY, default_count_stddev, split_noise_multiplier
from discreet.privacy.randomness import RandomSource
from discreet.settings.privacy import ClipConfig
from discreet.settings.rules import ConfigError
from discreet.training.local_training import step_noise

if TYPE_CHECKING:
    from dp_accounting import DpEvent

Schedule = float | Sequence[float] | Callable[[int], float]  # one number, or one for each step from step 0 on
LARGEST_DOUBT = 0.2  # the share that says "much too short" is 0.5 away from the one that says "right"
# If no clip norm is given: noise for one that is far too long undoes what was learned, one that is too short costs a
# round. Their steps multiply the norm by at most exp(5 / 2) = 12, then 3.5, 1.9, ...
SEARCH = {"norm": 0.1, "max": 10.0, "search_rate": 5.0}


@dataclass(frozen=True)
class AdaptiveClipping:
    """A clip norm that tracks a quantile of the norms of the differences, of `DPSGD` of the gradients: Andrew et al.
    2021 (arXiv 1905.03871).

    Attributes:
      norm: the first one. None: the first rounds or steps search for it from 0.1 on, up to 10, by the noised bits
        that are paid for anyway.
      maximum: what it never passes; None is ten times `norm`, or 10 without it.
      target_quantile: of the norms, within (0, 1).
      learning_rate: of the steps by which it moves.
      count_stddev: noise on the count of norms within it; None is a small share of what the round costs.
    """

    norm: float | None = None
    maximum: float | None = None
    target_quantile: float = 0.5
    learning_rate: float = 0.2
    count_stddev: float | None = None

    def section(self) -> ClipConfig:
        """The settings `privacy.user.clip` that say the same. Raises ConfigError in words of this class."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        if "maximum" in given:
            given["max"] = given.pop("maximum")
        try:
            return ClipConfig(**given if self.norm is not None else SEARCH | given)
        except ConfigError as error:
            said = str(error).replace("privacy.user.clip.norm", "clip_norm").replace("clip.max ", "clip.maximum ")
            raise ConfigError(said.replace("privacy.user.clip.", "clipping.")) from error


def check_search(clip: ClipConfig, count_stddev: float, cohort: float) -> None:
    """Raises ConfigError if a clip norm is to be searched for, and noise on the bits would hide where it is."""
    if clip.search_rate and count_stddev >= LARGEST_DOUBT * cohort:
        raise ConfigError(
            "clip_norm must be given, from public data: the share of norms within it has noise of standard deviation "
            f"{count_stddev / cohort:.2g}, and {LARGEST_DOUBT:g} or more would hide a norm from search"
        )


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
        if isinstance(self.clips, AdaptiveClipping):
            split_noise_multiplier(self.scale * max(self.noises), count_stddev=self.count_stddev)
            check_search(self.clips.section(), self.count_stddev, self.batch_size)
            return
        for clip_norm in set(self.clips):
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
        return self.clips.section().norm if isinstance(self.clips, AdaptiveClipping) else self.clips[0]

    @property
    def count_stddev(self) -> float:
        """The standard deviation of the noise on the sum of (b - 1/2), b = [norm <= C], of an adaptive clip norm C."""
        given = self.clips.count_stddev if isinstance(self.clips, AdaptiveClipping) else None
        largest = self.scale * max(self.noises)
        return default_count_stddev(self.batch_size, noise_multiplier=largest) if given is None else given

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
        """The noised mean of a step, with noise for the clip norm that clipped, and the clip norm of the next step.

        Guarantee: with an adaptive clip norm C the sum of gradients is noised by z_sum * C, and the centred count, of
        sensitivity 1/2, by `count_stddev`: together they cost one Gaussian of the step's multiplier (Andrew et al.
        2021, Theorem 1).
        """
        noise = self.noise_multiplier(step)
        if isinstance(self.clips, AdaptiveClipping):
            stddev, counting = self.count_stddev, source.child("step", step).child("count")
            below = float(Gaussian(stddev / BIT_SENSITIVITY).add_noise(centred_count, BIT_SENSITIVITY, counting))
            following, _ = self.clips.section().moved(
                clip_norm, below, number=step, cohort=self.batch_size, count_stddev=stddev
            )
            noise = split_noise_multiplier(noise, count_stddev=stddev)
        else:
            following = self.clips[min(step + 1, self.steps - 1)]
        return Gaussian(noise).add_noise(total, clip_norm, step_noise(source, step)).div_(self.batch_size), following

    def facts(self) -> dict[str, object]:
        """What a state must agree with, as JSON would have it: all but the scale."""
        clips = asdict(self.clips) if isinstance(self.clips, AdaptiveClipping) else stretches(self.clips)
        sizes = {"num_examples": self.num_examples, "batch_size": self.batch_size, "steps": self.steps}
        return {**sizes, "noise_multiplier": stretches(self.noises), "clip_norm": clips}
