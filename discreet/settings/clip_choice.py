"""The clip norm of a mechanism as code gives it: of `DPFedAvg` and `DPSGD`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from discreet.settings.privacy import ClipConfig
from discreet.settings.rules import plain

# If no clip norm is given: noise for one that is far too long undoes what was learned, one that is
# too short costs a round. Their steps multiply the norm by at most exp(5 / 2) = 12, then 3.5, 1.9,
# ...
SEARCH = {"norm": 0.1, "max": 10.0, "search_rate": 5.0}


@dataclass(frozen=True)
class AdaptiveClipping:
    """A clip norm that tracks a quantile of the norms of the differences, of `DPSGD` of the
    gradients: Andrew et al. 2021 (arXiv 1905.03871).

    Attributes:
      norm: the first one. None: the first rounds or steps search for it from 0.1 on, up to 10, by
        the noised bits that are paid for anyway.
      maximum: what it never passes; None is ten times `norm`, or 10 without it.
      target_quantile: of the norms, within (0, 1).
      learning_rate: of the steps by which it moves.
      count_stddev: noise on the count of norms within it; None is a small share of what the round
        costs.
    """

    norm: float | None = None
    maximum: float | None = None
    target_quantile: float = 0.5
    learning_rate: float = 0.2
    count_stddev: float | None = None

    def section(self) -> ClipConfig:
        """The settings `privacy.user.clip` that say the same. Raises ConfigError, which has the
        keys of these: `CLIP_WORDS` are those of this class."""
        given = {name: plain(value) for name, value in asdict(self).items() if value is not None}
        if "maximum" in given:
            given["max"] = given.pop("maximum")
        if self.norm is None:
            given = SEARCH | given
        return ClipConfig(**given)


@dataclass(frozen=True)
class FixedClipping:
    """One clip norm in all rounds."""

    norm: float

    def section(self) -> ClipConfig:
        """The settings `privacy.user.clip` that say the same."""
        return ClipConfig("fixed", self.norm)


# What arguments call the settings of a clip norm.
CLIP_WORDS = {
    **{f"privacy.user.clip.{each.name}": f"clipping.{each.name}" for each in fields(ClipConfig)},
    "privacy.user.clip.norm": "clip_norm",
    "privacy.user.clip.max": "clipping.maximum",
    "privacy.user.clip.kind": "clipping",
}
