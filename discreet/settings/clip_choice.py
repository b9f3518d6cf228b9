"""The clip norm of a mechanism, in its settings and as code specifies it for `DPFedAvg` and
`DPSGD`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from functools import cached_property
from typing import Annotated

from discreet.privacy.quantile import LARGEST_NUMBER, QuantileEstimator
from discreet.settings import rules
from discreet.settings.rules import ConfigError, check_value, plain, section
from discreet.settings.wording import Key, Wording

# A tenfold growth of the norms does not come from learning, unless the first norm was a poor guess.
CLIP_GROWTH = 10

# Used if no clip norm is given. A norm that is far too large brings noise that undoes what was
# learned; one that is too small costs a round. The first steps multiply the norm by at most exp(5 /
# 2) = 12, then 3.5, 1.9, ...
SEARCH = {"norm": 0.1, "max": 10.0, "search_rate": 5.0}


@section("privacy.user.clip.")
class ClipConfig:
    """The clip norm of client updates: adaptive, tracking a quantile (Andrew et al. 2021), or
    fixed. None: the rule for tables chooses it when the data are known."""

    kind: Annotated[str, rules.one_of("adaptive", "fixed")] = "adaptive"
    norm: rules.Positive | None = 1.0
    max: float | None = None
    target_quantile: rules.OpenShare = 0.5
    learning_rate: rules.LearningRate = 0.2
    search_rate: Annotated[float, rules.within(0, 10_000)] = 0.0
    count_stddev: rules.NotNegative | None = None

    def __post_init__(self) -> None:
        if self.norm is not None:
            known = rules.within(self.norm, LARGEST_NUMBER)
            check_value(self.ceiling, "privacy.user.clip.max", known)

    @property
    def first(self) -> float:
        """The first clip norm. ConfigError: no rule has chosen it."""
        if self.norm is None:
            raise ConfigError(Wording(Key("privacy.user.clip.norm"), " must be given"))
        return self.norm

    @cached_property
    def ceiling(self) -> float:
        """The largest adaptive clip norm."""
        if self.max is None:
            return min(CLIP_GROWTH * self.first, LARGEST_NUMBER)
        return self.max

    @cached_property
    def estimator(self) -> QuantileEstimator:
        """The rule by which an adaptive clip norm moves, at the first norm."""
        return QuantileEstimator(
            self.first, self.target_quantile, self.learning_rate, self.ceiling, self.search_rate
        )


CLIP = ClipConfig()  # of a mechanism that is asked for its events alone


@dataclass(frozen=True)
class AdaptiveClipping:
    """A clip norm that tracks a quantile of the norms of the updates (in `DPSGD`, of the
    gradients): Andrew et al. 2021 (arXiv 1905.03871).

    Attributes:
      norm: the first clip norm. None: the first rounds or steps search for it from 0.1 up to 10,
        with the noised bits, which are accounted in any case.
      maximum: the largest clip norm; None: ten times `norm`, or 10 without `norm`.
      target_quantile: the quantile of the norms, within (0, 1).
      learning_rate: the learning rate of the clip norm.
      count_stddev: the standard deviation of the noise on the count of norms within it; None: a
        value that adds little to a round's cost.
    """

    norm: float | None = None
    maximum: float | None = None
    target_quantile: float = 0.5
    learning_rate: float = 0.2
    count_stddev: float | None = None

    def section(self) -> ClipConfig:
        """The equivalent settings `privacy.user.clip`. ConfigError: its message has the keys of
        these settings; `CLIP_WORDS` maps them to this class's fields."""
        given = {name: plain(value) for name, value in asdict(self).items() if value is not None}
        if "maximum" in given:
            given["max"] = given.pop("maximum")
        if self.norm is None:
            given = SEARCH | given
        return ClipConfig(**given)


@dataclass(frozen=True)
class FixedClipping:
    """One clip norm for all rounds."""

    norm: float

    def section(self) -> ClipConfig:
        """The equivalent settings `privacy.user.clip`."""
        return ClipConfig("fixed", self.norm)


# The arguments' names for the settings of a clip norm.
CLIP_WORDS = {
    **{f"privacy.user.clip.{each.name}": f"clipping.{each.name}" for each in fields(ClipConfig)},
    "privacy.user.clip.norm": "clip_norm",
    "privacy.user.clip.max": "clipping.maximum",
    "privacy.user.clip.kind": "clipping",
}
