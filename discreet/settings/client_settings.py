"""The settings that travel to clients: sections of the run's configuration, checked again on
arrival."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import field, fields, replace
from functools import cached_property, partial
from typing import Any

from discreet.accounting.events import NONE, PLD, RDP
from discreet.settings import rules
from discreet.settings.adjacency import EXAMPLE, LOCAL, USER
from discreet.settings.data import (
    MEANS,
    SITE,
    DataConfig,
    EvaluationConfig,
    NormaliserConfig,
    StatisticsConfig,
    own_metrics,
)
from discreet.settings.own_numbers import OwnNumbers
from discreet.settings.privacy import (
    CORRELATED,
    PLAIN,
    SECURE,
    Accountant,
    Aggregation,
    CorrelationConfig,
    ExamplePrivacyConfig,
    LocalPrivacyConfig,
    Noise,
    SecureConfig,
)
from discreet.settings.rules import ConfigError, check_all, require, section
from discreet.settings.training import ModelConfig, TaskConfig, TrainingConfig
from discreet.settings.wording import Key, Phrase, Wording

# The values that a choice requires of other settings (one, or any of several), and the reason.
Needs = dict[str, tuple[object, str]]
MOST_CORRELATED = 10_000  # rounds, whose price is then computed within seconds
AT_SERVER = "public", "none"
MASKED: Needs = {
    "sampling.kind": (
        "everyone",
        "the server knows which clients it asks, so sampling gives no amplification",
    ),
    "privacy.accountant": (RDP, "its noise is accounted with Renyi divergences (RDP)"),
    "privacy.noise": ("grid", "masks are added to integers"),
}
MASKED_UPDATE: Needs = MASKED | {
    "privacy.example.enabled": (False, "a client sends nothing but its masked vector")
}
PLAIN_STEP: Needs = {
    "training.epochs": (1, "one step a round"),
    "training.optimizer": ("sgd", "a plain step"),
    "training.weight_decay": (0, "a plain step"),
}
SHARED_STEP: Needs = {
    "evaluation.kind": (AT_SERVER, "the sum has no room for answers"),
    **MASKED,
    "privacy.user.enabled": (False, "the noise of the opened sum is calibrated to one example"),
    "privacy.local.kind": ("none", "clients share the noise"),
    **PLAIN_STEP,
    "data.public_num_examples": (
        None,
        "steps are over all examples, and training.batch_size is the public constant",
    ),
}
OWNER_STEPS: Needs = {
    "data.partition": (
        ("owners", SITE),
        "when data are partitioned, all rows of an owner must go to one client",
    ),
    "evaluation.kind": (AT_SERVER, "the noise on a client's answer is calibrated to one row"),
}
NOISED_UPDATE: Needs = {
    "privacy.user.enabled": (False, "the server's clipping would also cut the noise")
}
LAPLACE_STEP: Needs = {
    "privacy.example.enabled": (False, "its noise is for the whole step"),
    **PLAIN_STEP,
    "training.epochs": (1, "its sensitivity 2 * eta * C / n holds for a single full-batch step"),
    "evaluation.kind": (AT_SERVER, "it adds noise to steps, not to answers"),
}
NOISED_ANSWER: Needs = {
    "privacy.example.enabled": (False, "one noise on an answer is charged once")
}
OF_EXAMPLES: Needs = {
    **NOISED_UPDATE,
    "data.public_num_examples": (
        None,
        "held-out rows are chosen by position, so a removed row shifts the others",
    ),
}
PAID_ANSWER: Needs = {
    "privacy.user.enabled": (True, "the noise of one guarantee pays for clients' answers")
}
OWN: Needs = {
    "privacy.user.enabled": (True, "it gives that guarantee"),
    "privacy.user.aggregation": (PLAIN, "it decides itself what the server reads"),
    "sampling.kind": (
        ("poisson", "fixed", "everyone"),
        "only Discreet's own mechanism accounts for turns",
    ),
    "evaluation.kind": (AT_SERVER, "it does not account for answers"),
    "data.normalise": (("none", "public", "spread"), "it does not account for answers"),
    "statistics.only": (False, "it does not account for answers"),
}
FIXED: Needs = {"privacy.accountant": (RDP, "no other mechanism supports such cohorts")}
POISSON: Needs = {
    "privacy.user.correlation.kind": (NONE, "its price covers only clients that take turns")
}
TURNS: Needs = {
    "privacy.noise": ("grid", "its noise must be drawn again exactly, to the last bit"),
    "evaluation.kind": (AT_SERVER, "a rating would ask clients out of turn"),
}


@section(
    "privacy.user.",
    sampling="sampling.kind",
    probability="sampling.probability",
    population_size="sampling.population_size",
    groups="sampling.groups",
)
class UserTerms:
    """User-level privacy as the server declares it. A client can check the declaration, not the
    server's actions.

    `groups`: a client has its turn once in this many rounds. `adaptive`: each client sends a bit
    for the adaptive clip norm."""

    enabled: bool = True
    noise_multiplier: rules.NotNegative | None = None
    max_epsilon: rules.Positive | None = None
    sampling: rules.Sampling = "poisson"
    probability: rules.Probability = 1.0
    population_size: rules.Count = 1
    groups: rules.Count = 1
    aggregation: Aggregation = PLAIN
    adaptive: bool = True
    count_stddev: rules.NotNegative | None = None
    mechanism: rules.Text | None = None
    mechanism_numbers: OwnNumbers | None = field(default=None, hash=False)
    correlation: CorrelationConfig = CorrelationConfig()

    @property
    def mechanism_kind(self) -> str:
        """The kind of Discreet's mechanism, decided by the aggregation and by whether clients take
        turns."""
        turns = self.sampling == "cyclic" or self.correlation.kind != NONE
        if turns and self.aggregation == PLAIN:
            return CORRELATED
        return self.aggregation

    @property
    def secure(self) -> bool:
        """True if the server reads only masked sums, to which clients add the noise."""
        return self.enabled and self.aggregation == SECURE


@section("", delta="privacy.delta", accountant="privacy.accountant", noise="privacy.noise")
class ClientSettings:
    """The settings of a run that every client receives, the same in every round, with the
    guarantees. Raises ConfigError: a setting is out of range, or two settings contradict each
    other."""

    rounds: rules.Rounds
    delta: rules.OpenShare
    accountant: Accountant
    noise: Noise
    data: DataConfig = DataConfig()
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    training: TrainingConfig = TrainingConfig()
    user: UserTerms = UserTerms()
    example: ExamplePrivacyConfig = ExamplePrivacyConfig()
    local: LocalPrivacyConfig = LocalPrivacyConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    secure: SecureConfig = SecureConfig()
    normaliser: NormaliserConfig = NormaliserConfig()
    statistics: StatisticsConfig = StatisticsConfig()

    def __post_init__(self) -> None:
        check_all(
            self._check_path,
            self._check_delta,
            self._check_declared,
            *(partial(require_each, self, by, needs) for by, needs in self._needs()),
            self._check_correlated,
            self._check_masked,
            self._check_statistics,
            self._check_schedule,
            self._check_metrics,
        )

    def _check_path(self) -> None:
        rule = "omitted: the server does not decide where data are"
        require(self.data.path is None, "data.path", rule, "a path")

    def _check_masked(self) -> None:
        if self.masked:
            self.secure.check_fits(self.user.population_size)

    def _check_statistics(self) -> None:
        if self.statistics.only:
            self.check_server_noise("statistics.only=true")
        elif self.asks_of_data:
            self.check_server_noise("data.normalise=private")

    def _check_schedule(self) -> None:
        schedule = self.local.schedule
        if self.local.kind != "none" and isinstance(schedule, list):
            rule = f"a list of {self.rounds} numbers, one per round"
            fits = len(schedule) == self.rounds
            require(fits, "privacy.local.schedule", rule, f"{len(schedule)} numbers")

    def _check_metrics(self) -> None:
        if self.evaluation.private and self.local.kind == "none" and self.example.enabled:
            metrics = self.evaluation.metrics
            wrong = [name for name in metrics if name not in (*MEANS, *own_metrics(metrics))]
            rule = (
                f"one of {', '.join(MEANS)} with privacy.example.enabled: in these, "
                "one example changes only its own share of the mean"
            )
            require(not wrong, "evaluation.metrics", rule, ", ".join(wrong))

    @property
    def _turns_by(self) -> Key | None:
        """The setting that asks for noise that depends on rounds before, if one does."""
        user = self.user
        own = user.enabled and user.mechanism is None and user.mechanism_kind == CORRELATED
        if not own or user.sampling in ("poisson", "fixed"):
            return None
        if user.sampling == "everyone":
            return Key(f"privacy.user.correlation.kind={user.correlation.kind}")
        return Key("sampling.kind=cyclic")

    def _check_correlated(self) -> None:
        """Raises ConfigError unless noise that depends on rounds before can be added and priced."""
        by = self._turns_by
        if by is None:
            return
        why = "later noise cancels earlier noise, which was made for one clip norm"
        rule = Wording(f"fixed: {why}, with ", by)
        require(not self.user.adaptive, "privacy.user.clip.kind", rule, "adaptive")
        most = Wording(
            f"at most {MOST_CORRELATED}: a round's price depends on all rounds before it, with ",
            by,
        )
        require(self.rounds <= MOST_CORRELATED, "rounds", most, self.rounds)

    def _rating_needs(self) -> tuple[Phrase, Needs]:
        """The requirements of ratings by clients: one guarantee must pay for them."""
        rated = "evaluation.kind=private"
        if self.local.kind != "none":
            return f"{rated} and privacy.local", NOISED_ANSWER
        if self.example.enabled:
            return f"{rated} and privacy.example.enabled", OF_EXAMPLES
        return rated, PAID_ANSWER

    def _needs(self) -> Iterator[tuple[Phrase, Needs]]:
        """The requirements of this run's choices, each with the name of the choice."""
        user = self.user
        local = self.local.kind
        if local != "none":
            yield (
                f"privacy.local.kind={local}",
                NOISED_UPDATE | (LAPLACE_STEP if local == "laplace_step" else {}),
            )
        if self.evaluation.private:
            yield self._rating_needs()
        if user.secure:
            yield Key("privacy.user.aggregation=secure"), MASKED_UPDATE
        if self.example.secure:
            yield "privacy.example.aggregation=secure", SHARED_STEP
        if self.example.by_owner:
            yield "privacy.example.unit=owner", OWNER_STEPS
        if user.mechanism is not None:
            yield Key("privacy.user.mechanism"), OWN
        elif user.enabled and user.sampling in ("poisson", "fixed"):
            yield f"{user.sampling} cohorts", POISSON
        elif self._turns_by is not None:
            yield self._turns_by, TURNS
        if user.enabled and user.sampling == "fixed":
            yield Key("sampling.kind=fixed"), FIXED

    def terms(self, guarantee: str) -> Any:
        """The settings of a guarantee, which an owner's policy can check."""
        return getattr(self, guarantee)

    def gives(self, guarantee: str) -> bool:
        """True if the run gives this guarantee."""
        return bool(
            self.local.kind != "none" if guarantee == LOCAL else self.terms(guarantee).enabled
        )

    def configured_noise_multiplier(self, guarantee: str) -> float | None:
        """The noise multiplier of a guarantee; None if a target chooses it that is not met yet, or
        that each client meets itself."""
        noise: float | None = self.terms(guarantee).noise_multiplier
        return noise

    def target_epsilon(self, guarantee: str) -> float | None:
        """The epsilon that chooses the noise of a guarantee; None if the noise is given."""
        return getattr(
            self.terms(guarantee), "epsilon" if guarantee == LOCAL else "target_epsilon", None
        )

    def largest_epsilon(self, guarantee: str) -> float | None:
        """The largest epsilon of a guarantee: its budget, or its target if no budget is given; None
        without either."""
        budget: float | None = self.terms(guarantee).max_epsilon
        if budget is None:
            return self.target_epsilon(guarantee)
        return budget

    def with_noise(self, guarantee: str, noise_multiplier: float) -> ClientSettings:
        """The same settings with this noise multiplier, in place of a target, for a guarantee that
        the server accounts."""
        if guarantee == USER:
            return replace(self, user=replace(self.user, noise_multiplier=noise_multiplier))
        example = replace(self.example, noise_multiplier=noise_multiplier, target_epsilon=None)
        return replace(self, example=example)

    @cached_property
    def expected_cohort(self) -> float:
        """The public denominator of sums over a cohort; for cohorts of fixed size, that size."""
        expected = self.user.probability * self.user.population_size
        if self.user.sampling == "fixed":
            return float(round(expected))
        return expected

    @cached_property
    def clients_noise_ratings(self) -> bool:
        """True if clients rate models and draw the noise on their ratings themselves."""
        by_clients = self.gives(EXAMPLE) or self.gives(LOCAL)
        return self.evaluation.private and by_clients and not self.gives(USER)

    @property
    def masked(self) -> bool:
        """True if the server reads only masked sums, to which clients add the noise."""
        return self.user.secure or self.example.secure

    @property
    def asks_of_data(self) -> bool:
        """True if clients are asked about their data before the first round."""
        return self.data.normalise == "private" or self.statistics.only

    @property
    def needs_normaliser(self) -> bool:
        """True if clients must be asked for the normaliser of inputs before the first round."""
        return self.data.normalise == "private" and not self.normaliser.means

    def check_server_noise(self, what: str) -> None:
        """Raises ConfigError unless noise at the server, for adding or removing a client, pays for
        `what`."""
        if not self.user.enabled or self.example.enabled:
            rule = (
                "privacy.user.enabled=true and privacy.example.enabled=false: noise at the server"
            )
        elif self.user.secure:
            rule = "privacy.user.aggregation=plain: the server would read each client's answer"
        elif self.user.sampling == "fixed":
            rule = (
                "sampling.kind=poisson or everyone: its price holds for adding or removing "
                "one client"
            )
        else:
            return
        raise ConfigError(f"{what} needs {rule}")

    def _check_delta(self) -> None:
        bound = 1 / self.user.population_size
        if self.user.enabled or self.local.kind in ("gaussian", "laplace"):
            proposed = 10.0 ** (math.ceil(math.log10(bound) - 1e-9) - 1)
            rule = f"below 1 / population_size = {bound:g}, for instance {proposed:g}"
            require(self.delta < bound, "privacy.delta", rule, self.delta)

    def _check_declared(self) -> None:
        least = self.training.batch_size
        declared = self.data.public_num_examples
        if self.example.enabled and declared is not None:
            rule = (
                "at least training.batch_size and below 1 / privacy.delta: within "
                f"[{least}, {1 / self.delta:g})"
            )
            require(least <= declared < 1 / self.delta, "data.public_num_examples", rule, declared)


# A placeholder for the run of a mechanism that was created outside a run.
UNBOUND = ClientSettings(1, 1e-5, PLD, "grid", user=UserTerms(enabled=False))


def values_by_key(settings: Any) -> dict[str, object]:
    """The values of a section and of its nested sections by their full keys."""
    found: dict[str, object] = {}
    for name in (each.name for each in fields(settings)):
        value = getattr(settings, name)
        if hasattr(value, "key_of"):
            found |= values_by_key(value)
        else:
            found |= {type(settings).key_of(name): value}
    return found


def require_each(settings: Any, by: Phrase, wanted: Mapping[str, tuple[object, str]]) -> None:
    """Raises ConfigError, with a line for each that differs, unless the settings with these keys
    have the value, or one of the values, that `by` requires, for the given reasons."""
    values = values_by_key(settings)
    check_all(
        *(partial(_require_value, key, values[key], by, *needed) for key, needed in wanted.items())
    )


def _require_value(key: str, value: object, by: Phrase, allowed: object, why: str) -> None:
    if isinstance(allowed, tuple):
        several = allowed
    else:
        several = (allowed,)
    names = ["omitted" if value is None else str(value).lower() for value in several]
    words = " or ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    require(value in several, key, Wording(f"{words} with ", by, f": {why}"), value)
