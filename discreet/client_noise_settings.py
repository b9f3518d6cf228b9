"""The guarantees whose noise clients draw themselves: what they hide, and how much of it there is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from discreet.secure_settings import AGGREGATION, PLAIN, SECURE
from discreet.setting_checks import NOISE_OR_TARGET, check, require, require_one, setting
from discreet.value_rules import NOT_NEGATIVE, POSITIVE, Rule, list_of, one_of

SCHEDULES = ("uniform", "geometric")


_SHARES = list_of(POSITIVE, "round")
SCHEDULE = Rule(
    f"uniform, geometric, or {_SHARES.words}", lambda value: value in SCHEDULES or _SHARES.holds(value), SCHEDULES
)


@dataclass(frozen=True)
class ExamplePrivacyConfig:
    """Example-level privacy, for one example of a client: DP-SGD inside each client, or with `aggregation=secure` one
    step a round over all examples of all clients, who share its noise."""

    enabled: bool = False
    aggregation: str = setting(PLAIN, AGGREGATION)
    noise_multiplier: float | None = setting(None, NOT_NEGATIVE)
    l2_norm_clip: float = setting(1.0, POSITIVE)
    target_epsilon: float | None = setting(None, POSITIVE)
    max_epsilon: float | None = setting(None, POSITIVE)

    def __post_init__(self) -> None:
        check(self, "privacy.example.")
        if self.enabled:
            require_one(self, "privacy.example.", NOISE_OR_TARGET)
        rule = f"{PLAIN} with privacy.example.enabled=false"
        require(self.enabled or self.aggregation == PLAIN, "privacy.example.aggregation", rule, self.aggregation)

    @property
    def secure(self) -> bool:
        """Whether the server reads nothing but masked sums of gradients, which clients noise together."""
        return self.enabled and self.aggregation == SECURE


@dataclass(frozen=True)
class LocalPrivacyConfig:
    """Local privacy: each client noises its own update, for an untrusted server."""

    kind: str = setting("none", one_of("none", "gaussian", "laplace", "laplace_step"))
    epsilon: float | None = setting(None, POSITIVE)
    noise_multiplier: float | None = setting(None, POSITIVE)
    norm_clip: float = setting(1.0, POSITIVE)
    schedule: Any = field(default="uniform", metadata={"rule": SCHEDULE})
    max_epsilon: float | None = setting(None, POSITIVE)

    def __post_init__(self) -> None:
        check(self, "privacy.local.")
        if self.kind != "none":
            advice = (
                f" with privacy.local.kind={self.kind}: give one, for instance privacy.local.epsilon=8, the total over "
                "all rounds; privacy.user.enabled must be false"
            )
            require_one(self, "privacy.local.", ("epsilon", "noise_multiplier"), advice)
