"""The public numbers of a loop: the sampling probability, and each step's noise, clip norm and
cost."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Self

from torch import Tensor

from discreet.accounting.events import ACCOUNTANTS, PLD, check_noise_multiplier, poisson_round_event
from discreet.privacy.clipping import check_clip
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.quantile import BIT_SENSITIVITY, default_count_stddev, split_noise_multiplier
from discreet.privacy.randomness import RandomSource
from discreet.privacy.step_draws import step_noise
from discreet.settings.clip_choice import CLIP_WORDS, AdaptiveClipping, ClipConfig
from discreet.settings.rules import ConfigError, did_you_mean
from discreet.settings.wording import in_words

if TYPE_CHECKING:
    from dp_accounting import DpEvent

# one number, or one for each step from step 0 on
Schedule = float | Sequence[float] | Callable[[int], float]
# Largest noise on the share of norms within the clip norm. The share for a clip norm that is much
# too small is 0.5 from that for a right one.
LARGEST_DOUBT = 0.2


def check_whole(name: str, value: int) -> None:
    """Raises ValueError unless a setting is a whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, not {value!r}")


def check_search(clip: ClipConfig, count_stddev: float, cohort: float, *, advice: str = "") -> None:
    """Raises ConfigError if a clip norm is to be searched for, but the noise on the bits is too
    large for that."""
    if clip.search_rate and count_stddev >= LARGEST_DOUBT * cohort:
        noise = f"noise {count_stddev / cohort:.2g} of their number, limit {LARGEST_DOUBT:g}"
        found = f"too few are drawn at a time to search for it ({noise})"
        raise ConfigError(f"clip_norm is required: {found}. Choose it from public data{advice}")


@dataclass(frozen=True)
class LoopPrivacy:
    """The choices that few loops need: `DPSGD(..., privacy=LoopPrivacy(...))`.

    Attributes:
      noise_multiplier: the noise's standard deviation over the clip norm, at least 0; 0 protects
        nobody. Give this or `target_epsilon`. It may be a schedule, a list or a function of the
        step (as `DPSGD`'s `clip_norm`); each step is then accounted for by its own noise. With
        `target_epsilon` its values are relative. Change it per epoch: with 200 different values the
        accountant "pld" takes about 10 s.
      max_epsilon: the budget; a step that would exceed it raises BudgetSpent. None:
        `target_epsilon`, if given.
      accountant: "pld" or "rdp".
      ledger: a ledger file, made by `discreet ledger create FILE`, which adds up the spending of
        several runs. None: the account is in memory.
      data_owner: the name of the data's owner, for a ledger file with several data sets.
      public_num_examples: a constant that replaces n in the sampling and the accounting, which
        makes the guarantee add-or-remove; at least batch_size, and chosen without looking at the
        data.
      seed: makes batches, dropout and noise reproducible; they then protect nobody. None: secure
        randomness.
      max_physical_batch: the largest number of examples that are read and processed at a time. The
        loop yields larger batches in pieces. None: batches are whole.
      rows_per_owner: with `DPSGD(..., owners=...)` the largest number of rows of one owner in a
        step, drawn secretly; None: 8. A larger number needs more work but no more noise.
      distributed: the loop is one of the processes of torch.distributed's default group, each of
        which works on its part of every batch. All get the same arguments; the first one keeps the
        account and draws the noise.

    Raises:
      ValueError: an attribute is out of range; the message names it.
    """

    noise_multiplier: Schedule | None = None
    max_epsilon: float | None = None
    accountant: str = PLD
    ledger: str | Path | None = None
    data_owner: str = ""
    public_num_examples: int | None = None
    seed: int | None = None
    max_physical_batch: int | None = None
    rows_per_owner: int | None = None
    distributed: bool = False

    def __new__(cls, *_: object, **given: object) -> Self:
        for name in given:
            if name not in cls.__dataclass_fields__:
                hint = did_you_mean(name, cls.__dataclass_fields__)
                raise TypeError(f"LoopPrivacy has no argument {name}{hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.max_epsilon is not None:
            check_number("max_epsilon", self.max_epsilon)
        if self.max_epsilon is not None and not self.max_epsilon > 0:
            raise ValueError(f"max_epsilon must be above 0, not {self.max_epsilon}")
        if self.accountant not in ACCOUNTANTS:
            raise ValueError(
                f"accountant must be one of {', '.join(ACCOUNTANTS)}, not {self.accountant!r}"
            )
        for name in ("public_num_examples", "max_physical_batch", "rows_per_owner"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name))


def check_number(name: str, value: object) -> None:
    """Raises ValueError unless a value is a number."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise ValueError(f"{name} must be a number, not {value!r}")


def scheduled_values(schedule: Schedule, steps: int, *, name: str) -> tuple[float, ...]:
    """The value of each step, (steps,). A function is called here for all steps, before a batch is
    drawn, so that its values can't depend on the data. Raises ValueError: a list of another
    length, or no number."""
    if callable(schedule):
        return tuple(float(schedule(step)) for step in range(steps))
    if isinstance(schedule, str) or not isinstance(schedule, Sequence):
        check_number(name, schedule)
        return (float(schedule),) * steps
    if len(schedule) != steps:
        raise ValueError(
            f"{name} must have a value for each of the {steps} steps, not {len(schedule)}"
        )
    return tuple(map(float, schedule))


def stretches(values: Sequence[float]) -> list[list[float]]:
    """Run-length encoding: each value, with the number of successive steps that have it.

    >>> stretches([2.0, 2.0, 1.0])
    [[2.0, 2], [1.0, 1]]
    """
    return [[value, sum(1 for _ in group)] for value, group in groupby(values)]


@dataclass(frozen=True)
class LoopPlan:
    """The values that decide the privacy of a loop's steps, fixed before the first one.

    Attributes:
      num_examples: n of the sampling, the data set's size or the constant in its place.
      batch_size: the expected size of a batch, by which noised sums are divided.
      noises: the noise multiplier of each step, (steps,), in units of `scale`.
      clips: the clip norm of each step, (steps,), or the settings by which it adapts.
      scale: a factor on all noise multipliers, chosen by a target epsilon.
    """

    num_examples: int
    batch_size: int
    noises: tuple[float, ...]
    clips: tuple[float, ...] | ClipConfig
    scale: float = 1.0

    def __post_init__(self) -> None:
        for noise in set(self.noises):
            check_noise_multiplier(noise)
        if isinstance(self.clips, ClipConfig):
            split_noise_multiplier(self.scale * max(self.noises), count_stddev=self.count_stddev)
            check_search(self.clips, self.count_stddev, self.batch_size)
            return
        for clip_norm in set(self.clips):
            check_clip(clip_norm, "clip_norm")

    @property
    def steps(self) -> int:
        """The number of steps."""
        return len(self.noises)

    @property
    def probability(self) -> float:
        """The probability that an example is in a batch."""
        return self.batch_size / self.num_examples

    @property
    def first_clip_norm(self) -> float:
        """The clip norm of step 0."""
        if isinstance(self.clips, ClipConfig):
            return self.clips.first
        return self.clips[0]

    @property
    def count_stddev(self) -> float:
        """For an adaptive clip norm C the standard deviation of the noise on the sum of (b - 1/2),
        b = [norm <= C]."""
        if isinstance(self.clips, ClipConfig) and self.clips.count_stddev is not None:
            return self.clips.count_stddev
        largest = self.scale * max(self.noises)
        return default_count_stddev(self.batch_size, noise_multiplier=largest)

    @property
    def epoch(self) -> int:
        """The number of steps in an epoch."""
        return math.ceil(self.num_examples / self.batch_size)

    def within(
        self, epsilon: float, spent: Sequence[tuple[DpEvent, int]], *, delta: float, accountant: str
    ) -> LoopPlan:
        """The plan with the least noise with which all steps and the earlier spending `spent` cost
        at most epsilon."""
        from discreet.accounting.calibration import noise_multiplier_for_epsilon

        scale = noise_multiplier_for_epsilon(
            epsilon,
            releases=lambda scale: (*spent, *replace(self, scale=scale).events()),
            delta=delta,
            accountant=accountant,
        )
        return replace(self, scale=scale)

    def noise_multiplier(self, step: int) -> float:
        """The noise multiplier of a step as a whole; after the last step, that of the last one."""
        return self.scale * self.noises[min(step, self.steps - 1)]

    def events(self) -> list[tuple[DpEvent, int]]:
        """The cost of each step, in order: events, each with the number of successive steps that
        cost it."""
        return [
            (poisson_round_event(self.probability, noise_multiplier=self.scale * noise), int(count))
            for noise, count in stretches(self.noises)
        ]

    def released(
        self,
        total: Tensor,
        centred_count: Tensor,
        clip_norm: float,
        *,
        step: int,
        source: RandomSource,
    ) -> tuple[Tensor, float]:
        """The noised mean of a step, with noise for the clip norm of this step, and the clip norm
        of the next step. It may take the place of `total`.

        Guarantee: with an adaptive clip norm C the sum of gradients is noised by z_sum * C, and the
        centred count, of sensitivity 1/2, by `count_stddev`: together they cost one Gaussian of the
        step's multiplier (Andrew et al. 2021, Theorem 1).
        """
        noise = self.noise_multiplier(step)
        if isinstance(self.clips, ClipConfig):
            stddev = self.count_stddev
            counting = source.child("step", step).child("count")
            below = float(
                Gaussian(stddev / BIT_SENSITIVITY).add_noise(
                    centred_count, BIT_SENSITIVITY, counting
                )
            )
            following, _ = self.clips.estimator.next_clip_norm(
                clip_norm,
                below,
                number=step,
                expected_cohort=self.batch_size,
                count_stddev=stddev,
            )
            noise = split_noise_multiplier(noise, count_stddev=stddev)
        else:
            following = self.clips[min(step + 1, self.steps - 1)]
        mechanism = Gaussian(noise, in_place=True)
        noised = mechanism.add_noise(total, clip_norm, step_noise(source, step))
        return noised.div_(self.batch_size), following

    def facts(self) -> dict[str, object]:
        """The settings that a saved state must share, as JSON values: all but the scale."""
        clips = asdict(self.clips) if isinstance(self.clips, ClipConfig) else stretches(self.clips)
        return {
            "num_examples": self.num_examples,
            "batch_size": self.batch_size,
            "steps": self.steps,
            "noise_multiplier": stretches(self.noises),
            "clip_norm": clips,
        }


def planned_loop(
    privacy: LoopPrivacy,
    num_examples: int,
    *,
    batch_size: int,
    clip_norm: Schedule | AdaptiveClipping,
    **amount: int | None,
) -> LoopPlan:
    """The plan of a loop over `num_examples` examples, before a target scales its noise. `amount`:
    epochs or steps. Raises ValueError: a setting is out of range."""
    n = num_examples
    counted = "the number of examples"
    if privacy.public_num_examples is not None:
        n = privacy.public_num_examples
        counted = "public_num_examples"
    check_whole("batch_size", batch_size)
    if batch_size > n:
        raise ValueError(f"batch_size must be at most {n}, {counted}, not {batch_size}")
    given = {name: value for name, value in amount.items() if value is not None}
    if len(given) != 1:
        raise ValueError("give either epochs or steps")
    ((name, steps),) = given.items()
    check_whole(name, steps)
    if name == "epochs":
        steps *= math.ceil(n / batch_size)
    noise = 1.0 if privacy.noise_multiplier is None else privacy.noise_multiplier
    noises = scheduled_values(noise, steps, name="noise_multiplier")
    if isinstance(clip_norm, AdaptiveClipping):
        try:
            clips = clip_norm.section()
        except ConfigError as error:
            raise ConfigError(in_words(error, CLIP_WORDS)) from error
        return LoopPlan(n, batch_size, noises, clips)
    return LoopPlan(n, batch_size, noises, scheduled_values(clip_norm, steps, name="clip_norm"))
