"""`guard.toml`: the operator's limits on what a guard releases, and how it confines the app.

    ledger = "ledger.db"            # this guard's own account, made by `discreet ledger create`
    apps = ["SHA-256 of a bundle"]  # that somebody here has read; or any = true, see below
    unit = "patient"                # or "site": all data of the site, with one block
    max-epsilon = 4.0               # of all runs together
    max-delta = 1e-5                # below 1 / the number of patients
    min-noise-multiplier = 1.0      # of 2C, the most that one unit moves a sum of clipped updates
    clip-norm = 1.0                 # C, where a run names none (guard-clip-norm)
    q = 1.0                         # with this probability the guard draws each block, each round
    block-seconds = 20              # what a block may take
    at-once = 1                     # blocks that run side by side
    reply-seconds = 0               # the least time until a reply; blocks need more often
    min-colluding = 1               # secure aggregation: how many sites may collude with the server
    min-summands = 2                # and of how many honest sites' vectors a sum must be
    enclosure = "bubblewrap"        # or "kernel", one for each block; or "landlock", in a container
    charge = "one-block"            # or "all-blocks": a round costs what blocks that talk can move
    evaluate = "refuse"             # or the table [metric]
    mock = "mock"                   # public rows, for `discreet site try`
    alert = ["/usr/local/bin/tell"]  # called with one more word: budget (80 % are spent), refused,
                                    # late or failed; a guard calls once an hour for each of these

    [blocks]
    folder = "site"                 # made by `discreet site split`
    id = "patient"
    count = 100

    [metric]                        # what an evaluation may release: one number in a public range
    name = "accuracy"
    low = 0
    high = 1
    noise-multiplier = 10

    [limits]
    memory-mb = 4096                # of a block, with all its processes
    disk-mb = 512                   # of its temporary folder
    processes = 64
    model-values = 20_000_000       # of the arrays that a server may send

Blocks that share a kernel can talk through it, and move the sum by 2C for each of them. So any =
true needs enclosure = "kernel", or charge = "all-blocks", or unit = "site". With bubblewrap and
Landlock at-once is 1. Paths are relative to the folder of the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from discreet.accounting.events import PLD, exceeds, poisson_round_event
from discreet.accounting.privacy_ledger import PrivacyLedger, epsilon_of_blocks
from discreet.node.account import Refused
from discreet.settings.foreign_files import read_toml
from discreet.settings.rules import (
    ConfigError,
    Count,
    CountOrZero,
    Finite,
    OpenShare,
    Positive,
    Probability,
    Rule,
    did_you_mean,
    hyphened,
    one_of,
    require,
    rules,
    section,
)

if TYPE_CHECKING:
    from dp_accounting import DpEvent

PATIENT = "patient"
SITE = "site"
KERNEL = "kernel"
BUBBLEWRAP = "bubblewrap"
LANDLOCK = "landlock"
ONE_BLOCK = "one-block"
ALL_BLOCKS = "all-blocks"
REFUSE = "refuse"
METRIC = "metric"
CLIP_NORM = "guard-clip-norm"
NOISE = "guard-noise-multiplier"
FROZEN = "guard-frozen"
MOST_PATTERNS = 100
MOST_PATTERN_TEXT = 10_000
HEX = frozenset("0123456789abcdef")
Digests = Annotated[
    tuple[str, ...],
    Rule(
        "a list of SHA-256 digests of bundles",
        lambda given: all(len(each) == 64 and HEX.issuperset(each) for each in given),
    ),
]
Command = Annotated[
    tuple[str, ...],
    Rule(
        "a list of texts, the first of them the absolute path of a program",
        lambda given: not given or given[0].startswith("/"),
    ),
]
Seconds = Annotated[float, Rule("at least 0", lambda value: value >= 0)]
PublicConfig = Mapping[str, object]
UNREAD = 'false, or charge = "all-blocks", unless enclosure = "kernel": blocks share the kernel'
ENDING_SECONDS = 0.25  # of a slot, after the block's own time
KERNEL_ENDING_SECONDS = 1.0  # and for each GB of memory that a kernel of a block gives back
REPLY_SECONDS = 4.0  # for all that is done before the first slot and after the last one


@section("blocks.")
class BlockSettings:
    """The folder that `discreet site split` made, and the settings of that split."""

    folder: str
    id: str = ""
    count: Count = 1


@section("metric.", **hyphened("metric.", "noise_multiplier"))
class MetricSettings:
    """The one number of an app's evaluation that leaves, as its noised mean over the blocks."""

    name: str
    low: Finite
    high: Finite
    noise_multiplier: Positive

    def __post_init__(self) -> None:
        require(self.low < self.high, "metric.high", f"above metric.low = {self.low:g}", self.high)


@section("limits.", **hyphened("limits.", "memory_mb", "disk_mb", "model_values"))
class Limits:
    """The resource limits of a block."""

    memory_mb: Count = 4096
    disk_mb: Count = 512
    processes: Count = 64
    model_values: Count = 20_000_000


@section(
    "",
    **hyphened("", "max_epsilon", "max_delta", "min_noise_multiplier", "clip_norm"),
    **hyphened("", "block_seconds", "at_once", "reply_seconds", "min_colluding", "min_summands"),
)
class GuardPolicy:
    """The settings of `guard.toml`, explained in this module's docstring."""

    ledger: str
    blocks: BlockSettings
    max_epsilon: Positive
    max_delta: OpenShare
    min_noise_multiplier: Positive
    block_seconds: Positive
    apps: Digests = ()
    any: bool = False
    unit: Annotated[str, one_of(PATIENT, SITE)] = PATIENT
    clip_norm: Positive = 1.0
    q: Probability = 1.0
    at_once: Count = 1
    reply_seconds: Seconds = 0.0
    enclosure: Annotated[str, one_of(KERNEL, BUBBLEWRAP, LANDLOCK)] = BUBBLEWRAP
    charge: Annotated[str, one_of(ONE_BLOCK, ALL_BLOCKS)] = ONE_BLOCK
    evaluate: Annotated[str, one_of(REFUSE, METRIC)] = REFUSE
    min_colluding: CountOrZero = 1
    min_summands: CountOrZero = 2
    metric: MetricSettings | None = None
    limits: Limits = Limits()
    mock: str | None = None
    alert: Command = ()

    def __post_init__(self) -> None:
        both = "a list of digests, or any = true, but not both"
        require(bool(self.apps) != self.any, "apps", both, list(self.apps))
        with_table = 'a table if evaluate = "metric", and omitted otherwise'
        require(
            (self.metric is not None) == (self.evaluate == METRIC),
            "metric",
            with_table,
            self.metric,
        )
        alone = self.at_once == 1 or self.enclosure == KERNEL
        require(alone, "at-once", f'1 with enclosure = "{self.enclosure}"', self.at_once)
        if self.unit == SITE:
            require(
                self.blocks.count == 1, "blocks.count", '1 with unit = "site"', self.blocks.count
            )
            return
        require(
            self.blocks.count > 1,
            "blocks.count",
            'above 1 with unit = "patient"',
            self.blocks.count,
        )
        require(bool(self.blocks.id), "blocks.id", "the name of the column with patient ids", "''")
        held = self.enclosure == KERNEL or self.charge == ALL_BLOCKS
        require(held or not self.any, "any", UNREAD, "true")

    @property
    def moved_blocks(self) -> int:
        """The number of blocks that one unit is charged for moving."""
        if self.charge == ALL_BLOCKS:
            return self.blocks.count
        return 1

    def event(self, noise_multiplier: float) -> DpEvent:
        """The privacy event of one round, whose noise is `noise_multiplier` times 2C. If all blocks
        are charged, a draw of blocks hides nothing: what one block told another lasts."""
        if self.moved_blocks == 1:
            return poisson_round_event(self.q, noise_multiplier=noise_multiplier)
        return poisson_round_event(1.0, noise_multiplier=noise_multiplier / self.moved_blocks)

    @property
    def round_seconds(self) -> float:
        """The seconds from a message to its reply, or a whole multiple if blocks can't be ended."""
        slots = -(-self.blocks.count // self.at_once)
        return max(self.reply_seconds, slots * self.slot_seconds + REPLY_SECONDS)

    @property
    def slot_seconds(self) -> float:
        """The seconds from the start of one block to the start of the next. If the first is still
        there, the next starts a whole multiple later."""
        ending = ENDING_SECONDS
        if self.enclosure == KERNEL:
            ending += KERNEL_ENDING_SECONDS * self.limits.memory_mb / 1024
        return self.block_seconds + ending


@dataclass(frozen=True)
class GuardTerms:
    """The privacy parameters that a run asks of a guard. Any value is safe, because the noise
    follows it.

    Attributes:
      clip_norm: C, the clip norm of one block's update.
      noise_multiplier: the noise's standard deviation over 2C.
      frozen: patterns of arrays that keep the server's values.
    """

    clip_norm: float
    noise_multiplier: float
    frozen: tuple[str, ...] = ()


def read_guard(path: Path) -> GuardPolicy:
    """The policy in a `guard.toml`, with absolute paths. ConfigError: the file is wrong; the
    message says why in one line."""
    given = read_toml(path, ConfigError, "is not valid TOML")
    sections = {"blocks": BlockSettings, "metric": MetricSettings, "limits": Limits}
    try:
        settings = _underscored(given)
        _check_names(given)
        for name, kind in sections.items():
            if name in settings:
                settings[name] = kind(**_table(settings[name], name))
        policy = GuardPolicy(**settings)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    return _with_paths(policy, path.parent.resolve())


def _table(value: object, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{name} must be a table")
    return value


def _check_names(given: dict[str, Any], group: str = "") -> None:
    """Raises ConfigError for a key that is no setting, as it is written in the file."""
    known = [name for name, _ in rules(GuardPolicy)]
    groups = {name.partition(".")[0] for name in known if "." in name}
    for key, value in given.items():
        name = group + key
        if isinstance(value, dict) and name in groups:
            _check_names(value, f"{name}.")
        elif name not in {*known, *groups}:
            raise ConfigError(f"unknown setting {name}{did_you_mean(name, known)}")


def _underscored(given: dict[str, Any]) -> dict[str, Any]:
    """The settings by their field names, with lists as tuples. ConfigError: a key has an
    underscore, which could set what another one has set."""
    found = {}
    for key, value in given.items():
        if "_" in key:
            raise ConfigError(f"{key} is written {key.replace('_', '-')}")
        if isinstance(value, dict):
            value = _underscored(value)
        elif isinstance(value, list):
            value = tuple(value)
        found[key.replace("-", "_")] = value
    return found


def _with_paths(policy: GuardPolicy, folder: Path) -> GuardPolicy:
    blocks = replace(policy.blocks, folder=str(folder / policy.blocks.folder))
    if policy.mock is None:
        mock = None
    else:
        mock = str(folder / policy.mock)
    return replace(policy, ledger=str(folder / policy.ledger), blocks=blocks, mock=mock)


def terms_of_run(policy: GuardPolicy, config: PublicConfig) -> GuardTerms:
    """The terms in a run's configuration. Refused: less noise than the policy requires, or values
    that are not numbers."""
    clip_norm = _number(config, CLIP_NORM, policy.clip_norm)
    noise = _number(config, NOISE, policy.min_noise_multiplier)
    if noise < policy.min_noise_multiplier:
        raise Refused(
            f"this site's guard requires a {NOISE} of at least {policy.min_noise_multiplier:g}; "
            f"the run has {noise:g}"
        )
    patterns = tuple(str(config.get(FROZEN, "")).split())
    check_frozen(patterns)
    return GuardTerms(clip_norm, noise, patterns)


def check_frozen(patterns: Sequence[str]) -> None:
    """Refuses patterns that would take long to compare with the names of arrays."""
    if len(patterns) > MOST_PATTERNS or sum(map(len, patterns)) > MOST_PATTERN_TEXT:
        raise Refused(
            f"{FROZEN} must be at most {MOST_PATTERNS} patterns of {MOST_PATTERN_TEXT} characters "
            "together"
        )


def _number(config: PublicConfig, key: str, default: float) -> float:
    value = config.get(key, default)
    fits = isinstance(value, int | float) and not isinstance(value, bool) and 1e-6 <= value <= 1e6
    if not fits:
        raise Refused(f"{key} must be a number within [1e-6, 1e6] (got {value!r})")
    return float(value)  # type: ignore[arg-type]


def check_app(policy: GuardPolicy, digest: str) -> None:
    """Refuses a bundle that the operator has not approved."""
    if not policy.any and digest not in policy.apps:
        raise Refused(f"this site's guard has not approved the bundle with the digest {digest}")


def check_budget(policy: GuardPolicy, spent: PrivacyLedger) -> None:
    """Refuses if `spent`, including the requested round, exceeds the operator's budget."""
    reached = epsilon_of_blocks(spent, policy.max_delta, PLD)
    if exceeds(reached, policy.max_epsilon):
        of = f"epsilon {reached:.4g} of {policy.max_epsilon:g} at delta {policy.max_delta:g}"
        raise Refused(f"the budget of this site's guard is spent: this round would reach {of}")
