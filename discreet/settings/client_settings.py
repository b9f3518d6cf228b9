"""The settings that travel to clients: sections of the run's configuration, checked again on arrival."""

from __future__ import annotations

import math
from collections.abc import Mapping

from discreet.accounting.correlation import NONE
from discreet.accounting.events import RDP
from discreet.settings.data import MEANS, DataConfig, EvaluationConfig, NormaliserConfig, StatisticsConfig
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
from discreet.settings.rules import (
    ConfigError,
    Count,
    NotNegative,
    OpenShare,
    Positive,
    Probability,
    Sampling,
    Text,
    require,
    require_each,
    section,
)
from discreet.settings.training import ModelConfig, TaskConfig, TrainingConfig

# The values that a choice needs in other settings, and why.
Needs = Mapping[str, tuple[object, str]]
MASKED: Needs = {
    "sampling.kind": ("everyone", "the server knows whom it asks, so that sampling amplifies nothing"),
    "privacy.accountant": (RDP, "its noise is accounted by Renyi divergences"),
    "privacy.noise": ("grid", "masks are added to whole numbers"),
}
PLAIN_STEP: Needs = {
    "training.epochs": (1, "one step a round"),
    "training.optimizer": ("sgd", "a plain step"),
    "training.weight_decay": (0, "a plain step"),
}
SHARED_STEP: Needs = {
    "privacy.user.enabled": (False, "the sum that is opened is noised for one example"),
    "privacy.local.kind": ("none", "clients share the noise"),
    **PLAIN_STEP,
    "data.public_num_examples": (None, "steps are over all examples, and training.batch_size is the public constant"),
}
LAPLACE_STEP: Needs = {
    "privacy.example.enabled": (False, "its noise is for the whole step"),
    **PLAIN_STEP,
    "training.epochs": (1, "its sensitivity 2 * eta * C / n holds for a single full-batch step"),
}
OF_EXAMPLES: Needs = {
    "privacy.user.enabled": (False, "the server's clip would cut the noise"),
    "data.public_num_examples": (None, "what is held out goes by rows, and a removed one moves the others"),
}


@section(
    "privacy.user.",
    sampling="sampling.kind",
    probability="sampling.probability",
    population_size="sampling.population_size",
    groups="sampling.groups",
)
class UserTerms:
    """User-level privacy as the server declares it: the client can check what is declared, not what the server does.

    `groups`: a client's turn is every so many rounds. `adaptive`: each client sends a bit, for a clip norm that adapts.
    """

    enabled: bool = True
    noise_multiplier: NotNegative | None = None
    max_epsilon: Positive | None = None
    sampling: Sampling = "poisson"
    probability: Probability = 1.0
    population_size: Count = 1
    groups: Count = 1
    aggregation: Aggregation = PLAIN
    adaptive: bool = True
    count_stddev: NotNegative | None = None
    mechanism: Text | None = None
    correlation: CorrelationConfig = CorrelationConfig()

    @property
    def law(self) -> str:
        """The one of Discreet's mechanisms that is asked for: by the aggregation, and by whether clients take turns."""
        turns = self.sampling == "cyclic" or self.correlation.kind != NONE
        return CORRELATED if turns and self.aggregation == PLAIN else self.aggregation

    @property
    def secure(self) -> bool:
        """True if the server reads nothing but masked sums, which clients noise."""
        return self.enabled and self.aggregation == SECURE


@section("", delta="privacy.delta", accountant="privacy.accountant", noise="privacy.noise")
class ClientSettings:
    """The part of a run that each client is told, the same in every round, with the guarantees. Raises ConfigError: a
    setting is out of range, or two settings contradict each other."""

    rounds: Count
    delta: OpenShare
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
        require(self.data.path is None, "data.path", "left out: where data lie is not the server's to say", "a path")
        self._check_delta()
        self._check_local()
        self._check_ratings()
        by = "privacy.user.aggregation=secure"
        if self.user.secure:
            alone = {"privacy.example.enabled": (False, "beside its masked vector a client says nothing")}
            require_each(self, by, {**MASKED, **alone})
        if self.example.secure:
            by = "privacy.example.aggregation=secure"
            require(not self.evaluation.private, "evaluation.kind", f"public or none with {by}", self.evaluation.kind)
            require_each(self, by, {**MASKED, **SHARED_STEP})
        if self.user.secure or self.example.secure:
            self.secure.check_fits(self.user.population_size)
        if self.user.mechanism is not None:
            self._check_mechanism()
        elif self.user.enabled:
            self._check_turns()
        if self.asks_of_data:
            self.check_server_noise("statistics.only=true" if self.statistics.only else "data.normalise=private")
        if self.user.sampling == "fixed" and self.user.enabled:
            rule = f"{RDP} with sampling.kind=fixed"
            require(self.accountant == RDP, "privacy.accountant", rule, self.accountant)

    def _check_mechanism(self) -> None:
        by = "privacy.user.mechanism"
        own = {
            "privacy.user.enabled": (True, "it gives that guarantee"),
            "privacy.user.aggregation": (PLAIN, "it says by itself what the server reads"),
        }
        require_each(self, by, own)
        rule = f"poisson, fixed or everyone with {by}: Discreet's own pays for turns"
        require(self.user.sampling != "cyclic", "sampling.kind", rule, "cyclic")
        rule = f"public or none with {by}, and data.normalise none or public"
        require(not (self.asks_of_data or self.evaluation.private), "evaluation.kind", rule, "private")

    @property
    def asks_of_data(self) -> bool:
        """True if clients are asked about their data before the first round."""
        return self.data.normalise == "private" or self.statistics.only

    @property
    def needs_normaliser(self) -> bool:
        """True if clients have to be asked before the first round what their inputs are normalised by."""
        return self.data.normalise == "private" and not self.normaliser.means

    def check_server_noise(self, what: str) -> None:
        """Raises ConfigError if noise at the server, for clients that are added or removed, does not pay for `what`."""
        if not self.user.enabled or self.example.enabled:
            rule = "privacy.user.enabled=true and privacy.example.enabled=false: noise at the server"
        elif self.user.secure:
            rule = "privacy.user.aggregation=plain: the server would read each client's answer"
        elif self.user.sampling == "fixed":
            rule = "sampling.kind=poisson or everyone: its price is for add or remove one client"
        else:
            return
        raise ConfigError(f"{what} needs {rule}")

    def _check_turns(self) -> None:
        """Raises ConfigError unless noise that is correlated over rounds goes with the other settings."""
        user, kind = self.user, self.user.correlation.kind
        rule = "none with poisson or fixed cohorts: its price is for clients that take turns, sampling.kind=cyclic"
        require(user.sampling in ("cyclic", "everyone") or kind == NONE, "privacy.user.correlation.kind", rule, kind)
        if user.law != CORRELATED:
            return
        by = f"privacy.user.correlation.kind={kind}" if user.sampling == "everyone" else "sampling.kind=cyclic"
        moving = "fixed: earlier noise, which later noise takes back, was made for one clip norm"
        require(not user.adaptive, "privacy.user.clip.kind", f"{moving}, with {by}", "adaptive")
        require_each(self, by, {"privacy.noise": ("grid", "noise is drawn again to the last bit")})
        plain = f"public or none with {by}: a rating would ask clients out of their turn"
        require(not self.evaluation.private, "evaluation.kind", plain, "private")

    def _check_delta(self) -> None:
        bound = 1 / self.user.population_size
        if self.user.enabled or self.local.kind in ("gaussian", "laplace"):
            proposed = 10.0 ** (math.ceil(math.log10(bound) - 1e-9) - 1)
            rule = f"below 1 / population_size = {bound:g}, for instance {proposed:g}"
            require(self.delta < bound, "privacy.delta", rule, self.delta)
        least, declared = self.training.batch_size, self.data.public_num_examples
        if self.example.enabled and declared is not None:
            rule = f"at least training.batch_size and below 1 / privacy.delta: within [{least}, {1 / self.delta:g})"
            require(least <= declared < 1 / self.delta, "data.public_num_examples", rule, declared)

    def _check_ratings(self) -> None:
        if not self.evaluation.private:
            return
        local, by = self.local.kind, "evaluation.kind=private"
        rule = f"none, gaussian or laplace with {by}: laplace_step noises steps, and no answers"
        require(local != "laplace_step", "privacy.local.kind", rule, local)
        if local != "none":
            once = {"privacy.example.enabled": (False, "one noise on an answer is charged once")}
            require_each(self, f"{by} and privacy.local", once)
        elif not self.example.enabled:
            rule = f"true with {by}, or another guarantee on: noise pays for what clients answer"
            require(self.user.enabled, "privacy.user.enabled", rule, self.user.enabled)
        else:
            require_each(self, f"{by} and privacy.example.enabled", OF_EXAMPLES)
            wrong = [name for name in self.evaluation.metrics if name not in MEANS]
            rule = f"of {', '.join(MEANS)} with privacy.example.enabled: of these one example moves only its own share"
            require(not wrong, "evaluation.metrics", rule, ", ".join(wrong))

    def _check_local(self) -> None:
        kind, schedule = self.local.kind, self.local.schedule
        if kind == "none":
            return
        by = f"privacy.local.kind={kind}"
        require_each(self, by, {"privacy.user.enabled": (False, "the server's clip would cut the noise")})
        if kind == "laplace_step":
            require_each(self, by, LAPLACE_STEP)
        if isinstance(schedule, list):
            rule = f"a list of {self.rounds} numbers, one a round"
            require(len(schedule) == self.rounds, "privacy.local.schedule", rule, f"{len(schedule)} numbers")
