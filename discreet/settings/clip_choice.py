"""The clip norm of a mechanism as code specifies it, in `DPFedAvg` and `DPSGD`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from discreet.settings.privacy import ClipConfig
from discreet.settings.rules import plain

# Used if no clip norm is given. A norm that is far too large brings noise that undoes what was
# learned; one that is too small costs a round. The first steps multiply the norm by at most exp(5 /
# 2) = 12, then 3.5, 1.9, ...
SEARCH = {"norm": 0.1, "max": 10.0, "search_rate": 5.0}


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
