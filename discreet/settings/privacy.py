"""The three guarantees, secure aggregation, and the accountant of epsilon."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Annotated

from pydantic import AfterValidator

from discreet.accounting.events import ACCOUNTANTS, BISR, BSR, CORRELATIONS, NONE, PLD
from discreet.settings import rules
from discreet.settings.adjacency import EXAMPLE
from discreet.settings.clip_choice import ClipConfig
from discreet.settings.own_numbers import OwnNumbers
from discreet.settings.rules import check_all, require, require_one, section
from discreet.settings.wording import Key, Wording

ROW = "row"
OWNER = "owner"
PLAIN = "plain"
SECURE = "secure"
CORRELATED = "correlated"
SCHEDULES = ("uniform", "geometric")
_SHARES = rules.list_of(rules.POSITIVE, "round")
SCHEDULE = rules.Rule(
    f"uniform, geometric, or {_SHARES.words}",
    lambda value: value in SCHEDULES if isinstance(value, str) else _SHARES.holds(value),
    SCHEDULES,
)
Accountant = Annotated[str, rules.one_of(*ACCOUNTANTS)]
Noise = Annotated[str, rules.one_of("float", "grid", "secure_sum")]
Aggregation = Annotated[str, rules.one_of(PLAIN, SECURE)]
File = Annotated[
    rules.Text,
    rules.Rule("a file", lambda value: bool(value.strip()) and "\0" not in value),
    # A run that is resumed elsewhere charges the same file.
    AfterValidator(lambda path: os.path.abspath(os.path.expanduser(path))),
]


def _check_level(level: str, section: ExamplePrivacyConfig | UserPrivacyConfig) -> None:
    """Raises ConfigError unless an enabled guarantee has noise and a disabled one asks for no
    masks."""
    if section.enabled:
        names = ("noise_multiplier", "target_epsilon")
        require_one({f"privacy.{level}.{name}": getattr(section, name) for name in names})
        return
    rule = f"{PLAIN} with privacy.{level}.enabled=false"
    require(section.aggregation == PLAIN, f"privacy.{level}.aggregation", rule, section.aggregation)


@section("privacy.secure.")
class SecureConfig:
    """The number d of dropouts and c of colluding nodes that a masked sum over n nodes tolerates,
    and the number t of nodes whose shares open it."""

    dropouts: rules.CountOrZero = 1
    colluding: rules.CountOrZero = 1
    threshold: rules.Count | None = None

    def summands(self, nodes: int) -> int:
        """h = n - d - c: the least number of honest nodes whose noise is in an opened sum."""
        return nodes - self.dropouts - self.colluding

    def threshold_of(self, nodes: int) -> int:
        """t, as the class defines it."""
        if self.threshold is None:
            return (nodes + self.colluding) // 2 + 1
        return self.threshold

    def check_fits(self, nodes: int) -> None:
        """Raises ConfigError unless so many nodes are enough for the settings.

        With 2t > n + c, any two sets of t nodes share more than c nodes, so at least one of them is
        honest, and an honest node signs only one list of survivors. So the server can open at most
        one sum a round. With t <= n - d it can still open one after all allowed losses. Both need n
        > 2d + c.
        """
        rule = "within [3, 100] with secure aggregation; unless given it is data.num_clients"
        require(3 <= nodes <= 100, "sampling.population_size", rule, nodes)
        summands = self.summands(nodes)
        threshold = self.threshold_of(nodes)
        name = "privacy.secure.threshold"
        rule = (
            f"at most {nodes - 1 - self.colluding} with {nodes} nodes: at least one "
            "honest node must be left"
        )
        require(summands >= 1, "privacy.secure.dropouts", rule, self.dropouts)
        least = (nodes + self.colluding) // 2 + 1
        most = nodes - self.dropouts
        if least <= most:
            advice = ""
        else:
            advice = (
                ": this range is empty, so choose fewer dropouts or colluding nodes, or more nodes"
            )
        require(
            least <= threshold <= most,
            name,
            f"within [{least}, {most}] with {nodes} nodes{advice}",
            threshold,
        )


@dataclass(frozen=True)
class Sizes:
    """The sizes of a release: the grid and the price of a masked vector depend on them.

    Attributes:
      num_params: the number of trained parameters.
      answers, l1_norm: the length of an answer to a query, and the bound on its L1 norm.
    """

    num_params: int
    answers: int = 1
    l1_norm: float = 1.0


# for planning before the model is known: the cost agrees to about four digits
PLANNED = Sizes(2**14)


@section("privacy.example.")
class ExamplePrivacyConfig:
    """Example-level privacy: DP-SGD inside each client, or one step a round over all examples of
    all clients. Its unit is an example, which is a row, or an owner with all its rows."""

    enabled: bool = False
    unit: Annotated[str, rules.one_of(ROW, OWNER)] = ROW
    rows_per_owner: rules.Count = 8
    aggregation: Aggregation = PLAIN
    noise_multiplier: rules.NotNegative | None = None
    clip_norm: rules.Positive = 1.0
    target_epsilon: rules.Positive | None = None
    max_epsilon: rules.Positive | None = None

    def __post_init__(self) -> None:
        _check_level("example", self)

    @property
    def secure(self) -> bool:
        """True if the server reads only masked sums of gradients, to which clients together add the
        noise."""
        return self.enabled and self.aggregation == SECURE

    @property
    def by_owner(self) -> bool:
        """True if the unit is an owner."""
        return self.enabled and self.unit == OWNER

    @property
    def most_rows(self) -> int | None:
        """The largest number of an owner's rows that a step reads; None if the unit is an
        example."""
        if self.by_owner:
            return self.rows_per_owner
        return None

    @property
    def unit_name(self) -> str:
        """The unit in one word."""
        if self.by_owner:
            return OWNER
        return EXAMPLE


@section("privacy.local.")
class LocalPrivacyConfig:
    """Local privacy: each client noises its own update, for an untrusted server."""

    kind: Annotated[str, rules.one_of("none", "gaussian", "laplace", "laplace_step")] = "none"
    epsilon: rules.Positive | None = None
    noise_multiplier: rules.Positive | None = None
    clip_norm: rules.Positive = 1.0
    schedule: Annotated[str | list[float], SCHEDULE] = "uniform"
    max_epsilon: rules.Positive | None = None

    def __post_init__(self) -> None:
        if self.kind != "none":
            advice = (
                f" with privacy.local.kind={self.kind}: give one, for instance "
                "privacy.local.epsilon=8, the total of all rounds"
            )
            given = {
                "privacy.local.epsilon": self.epsilon,
                "privacy.local.noise_multiplier": self.noise_multiplier,
            }
            require_one(given, advice)


@section("privacy.user.correlation.")
class CorrelationConfig:
    """The correlation of the server's noise over rounds (`discreet.accounting.correlation`)."""

    kind: Annotated[str, rules.one_of(*CORRELATIONS)] = NONE
    bandwidth: rules.Count | None = None

    def __post_init__(self) -> None:
        banded = self.kind in (BSR, BISR)
        rule = Wording("omitted with ", Key(f"privacy.user.correlation.kind={self.kind}"))
        require(
            banded or self.bandwidth is None,
            "privacy.user.correlation.bandwidth",
            rule,
            self.bandwidth,
        )


@section("privacy.user.")
class UserPrivacyConfig:
    """User-level privacy, for all data of one client: by noise at the server, or by clients' noise
    on masked updates."""

    enabled: bool = True
    aggregation: Aggregation = PLAIN
    noise_multiplier: rules.NotNegative | None = None
    target_epsilon: rules.Positive | None = None
    max_epsilon: rules.Positive | None = None
    account: File | None = None
    mechanism: rules.Text | None = None
    mechanism_numbers: OwnNumbers | None = field(default=None, hash=False)
    too_noisy: Annotated[str, rules.one_of("refuse", "warn")] = "refuse"
    clip: ClipConfig = ClipConfig()
    correlation: CorrelationConfig = CorrelationConfig()

    def __post_init__(self) -> None:
        _check_level("user", self)
        if self.mechanism is None:
            rule = "omitted without privacy.user.mechanism"
            name = "privacy.user.mechanism_numbers"
            require(not self.mechanism_numbers, name, rule, self.mechanism_numbers)


@section("privacy.")
class PrivacyConfig:
    """The three guarantees and their accountant."""

    delta: rules.OpenShare = 1e-3
    accountant: Accountant = PLD
    noise: Noise = "grid"
    user: UserPrivacyConfig = UserPrivacyConfig(target_epsilon=8.0)
    example: ExamplePrivacyConfig = ExamplePrivacyConfig()
    local: LocalPrivacyConfig = LocalPrivacyConfig()
    secure: SecureConfig = SecureConfig()

    def __post_init__(self) -> None:
        if self.example.secure or (self.user.enabled and self.user.aggregation == SECURE):
            return
        rule = (
            "omitted without privacy.user.aggregation=secure or privacy.example.aggregation=secure"
        )
        checks = []
        for each in fields(SecureConfig):
            value = getattr(self.secure, each.name)
            given = value != each.default
            key = f"privacy.secure.{each.name}"
            checks.append(partial(require, not given, key, rule, value))
        check_all(*checks)
