"""What a client needs to know of a run, and nothing else of it: these values travel, and check themselves on arrival.

The sections that a client reads are sections of the run's configuration, with the same names and ranges. What is wrong
is said in one line that names the setting. Neither Hydra nor OmegaConf is needed.
"""

from __future__ import annotations

import math
from dataclasses import field
from typing import TYPE_CHECKING

from discreet.privacy.events import RDP, fixed_size_round_event, joined_noise_multiplier, poisson_round_event
from discreet.settings.data import DataConfig, NormaliserConfig, StatisticsConfig
from discreet.settings.evaluation import MEANS, EvaluationConfig
from discreet.settings.privacy import (
    PLAIN,
    PLANNED,
    SECURE,
    Accountant,
    Aggregation,
    ExamplePrivacyConfig,
    LocalPrivacyConfig,
    Noise,
    SecureConfig,
    Sizes,
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
    section,
)
from discreet.settings.training import TaskConfig, TrainingConfig

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from discreet.privacy.secure_grid import SecureSum


def check_paid(what: str, *, at_server: bool, secure: bool, sampling: str) -> None:
    """Raises ConfigError unless `what` clients are asked is noised at the server, for add or remove one client."""
    if not at_server:
        raise ConfigError(
            f"{what} needs privacy.user.enabled=true and privacy.example.enabled=false: noise at the server"
        )
    if secure:
        raise ConfigError(f"{what} needs privacy.user.aggregation=plain: the server would read each client's answer")
    if sampling == "fixed":
        raise ConfigError(f"{what} needs sampling.kind=poisson or everyone: its price is for add or remove one client")


@section(
    "privacy.user.",
    sampling="sampling.kind",
    probability="sampling.probability",
    population_size="sampling.population_size",
)
class UserTerms:
    """User-level privacy as the server declares it: the client can check what is declared, not what the server does.

    Attributes:
      noise_multiplier: of a round; None if a target chooses it and it is not resolved yet.
      max_epsilon: the budget that ends the run, at the run's delta; None for none.
      sampling, probability, population_size: how cohorts are drawn.
      aggregation: plain: the server reads each update. secure: it reads their masked sum alone.
      adaptive: whether each client sends a bit, for a clip norm that adapts.
      count_stddev: as `privacy.user.clip.count_stddev` gives it; None for the default.
    """

    enabled: bool = True
    noise_multiplier: NotNegative | None = None
    max_epsilon: Positive | None = None
    sampling: Sampling = "poisson"
    probability: Probability = 1.0
    population_size: Count = 1
    aggregation: Aggregation = PLAIN
    adaptive: bool = True
    count_stddev: NotNegative | None = None

    @property
    def secure(self) -> bool:
        """Whether the server reads nothing but masked sums, which clients noise."""
        return self.enabled and self.aggregation == SECURE

    def event(self, noise_multiplier: float) -> DpEvent:
        """What one round costs a client, for the sampling that is declared."""
        if self.sampling == "fixed":
            size, population = round(self.probability * self.population_size), self.population_size
            return fixed_size_round_event(size, population_size=population, noise_multiplier=noise_multiplier)
        return poisson_round_event(self.probability, noise_multiplier=noise_multiplier)


@section("", delta="privacy.delta", accountant="privacy.accountant", noise="privacy.noise")
class ClientSettings:
    """What a run asks of each client, the same in every round, and the guarantees under which it asks.

    Attributes:
      model: its name.
      delta, accountant: how epsilons are computed.
      noise: how noise is drawn, one of `NOISE`.

    Raises:
      ConfigError: a setting is out of range, or two settings contradict each other.
    """

    rounds: Count
    model: Text
    delta: OpenShare
    accountant: Accountant
    noise: Noise
    data: DataConfig = field(default_factory=DataConfig)
    task: TaskConfig = field(default_factory=TaskConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    user: UserTerms = field(default_factory=UserTerms)
    example: ExamplePrivacyConfig = field(default_factory=ExamplePrivacyConfig)
    local: LocalPrivacyConfig = field(default_factory=LocalPrivacyConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    secure: SecureConfig = field(default_factory=SecureConfig)
    normaliser: NormaliserConfig = field(default_factory=NormaliserConfig)
    statistics: StatisticsConfig = field(default_factory=StatisticsConfig)

    def __post_init__(self) -> None:
        require(self.data.path is None, "data.path", "left out: where data lie is not the server's to say", "a path")
        self._check_delta()
        self._check_local()
        self._check_ratings()
        if self.user.secure:
            self._check_secure("privacy.user.aggregation=secure")
            rule = "false with privacy.user.aggregation=secure: beside its masked vector a client says nothing"
            require(not self.example.enabled, "privacy.example.enabled", rule, self.example.enabled)
        if self.example.secure:
            self._check_secure("privacy.example.aggregation=secure")
            self._check_shared_step("with privacy.example.aggregation=secure")
        if self.asks_of_data:
            self.check_server_noise("statistics.only=true" if self.statistics.only else "data.normalise=private")
        if self.user.sampling == "fixed" and self.user.enabled:
            rule = f"{RDP} with sampling.kind=fixed"
            require(self.accountant == RDP, "privacy.accountant", rule, self.accountant)

    @property
    def accounts_itself(self) -> bool:
        """Whether a guarantee is on that each client accounts in a ledger of its own."""
        return self.example.enabled or self.local.kind != "none" or self.user.secure

    @property
    def masked(self) -> bool:
        """Whether the server reads nothing but masked sums."""
        return self.user.secure or self.example.secure

    @property
    def step_norm(self) -> float:
        """What one example can add to its client's step, in L2, if clients share a step: a step is minus the learning
        rate times the sum of the clipped gradients over `batch_size`."""
        return self.training.learning_rate * self.example.l2_norm_clip / self.training.batch_size

    @property
    def rates_itself(self) -> bool:
        """Whether clients rate models by answers that each of them noises and accounts itself."""
        return self.evaluation.private and (self.example.enabled or self.local.kind != "none")

    @property
    def asks_of_data(self) -> bool:
        """Whether clients are asked what their data are like, before the first round."""
        return self.data.normalise == "private" or self.statistics.only

    def check_server_noise(self, what: str) -> None:
        """Raises ConfigError if noise at the server, for clients that are added or removed, does not pay for `what`."""
        at_server = self.user.enabled and not self.example.enabled
        check_paid(what, at_server=at_server, secure=self.user.secure, sampling=self.user.sampling)

    def secure_sum(self, sizes: Sizes, noise_multiplier: float | None = None) -> SecureSum:
        """What clients add up under secure aggregation; the same in every round of a run. A client finds its share of
        the noise by it. `noise_multiplier`: of a round; None for the one that is declared.

        Raises:
          ValueError: the noise, the clients and the model do not go together.
        """
        from discreet.privacy.quantile import default_count_stddev, split_noise_multiplier
        from discreet.privacy.secure_grid import SecureCohort, secure_sum

        if self.example.secure:
            return self._shared_step(sizes.num_params, noise_multiplier)
        noise = self.user.noise_multiplier if noise_multiplier is None else noise_multiplier
        if noise is None:
            raise ConfigError("privacy.user.noise_multiplier must be given, or resolved from its target (got null)")
        nodes, count = self.user.population_size, self.user.count_stddev
        count = default_count_stddev(nodes, noise_multiplier=noise) if count is None else count
        update_noise = split_noise_multiplier(noise, count_stddev=count) if self.user.adaptive and noise else noise
        return secure_sum(
            sizes.num_params,
            SecureCohort(nodes, self.secure.summands(nodes)),
            noise_multiplier=update_noise,
            count_stddev=(count or 1.0) if self.user.adaptive else None,
            answers=(sizes.answers, self.evaluation.noise_multiplier) if self.evaluation.private else None,
        )

    def _shared_step(self, num_params: int, noise_multiplier: float | None) -> SecureSum:
        from discreet.privacy.secure_grid import SecureCohort, example_secure_sum

        nodes, noise = self.user.population_size, noise_multiplier
        noise = self.example.noise_multiplier if noise is None else noise
        if noise is None:
            raise ConfigError("privacy.example.noise_multiplier must be given, or resolved from its target (got null)")
        cohort, largest = SecureCohort(nodes, self.secure.summands(nodes)), self.training.batch_size
        return example_secure_sum(num_params, cohort, noise_multiplier=noise, largest_sum=largest)

    def user_event(self, noise_multiplier: float, *, joined: bool = False, sizes: Sizes = PLANNED) -> DpEvent:
        """What a round with this noise multiplier costs a client at user level; `joined`: one whose cohort also rates
        the model. Update, bits and answer are then one Gaussian of the multiplier (z^-2 + z_evaluation^-2)^(-1/2)."""
        if self.user.secure:
            return self.secure_sum(sizes, noise_multiplier).event_of(trains=True, rates=joined)
        if joined:
            noise_multiplier = joined_noise_multiplier(noise_multiplier, self.evaluation.noise_multiplier)
        return self.user.event(noise_multiplier)

    def rating_event(self, noise_multiplier: float | None, *, sizes: Sizes = PLANNED) -> DpEvent:
        """What it costs a client at user level if a cohort rates the model, and is asked for nothing else.
        `noise_multiplier`: of a round, whose noise is drawn under secure aggregation."""
        if self.user.secure:
            return self.secure_sum(sizes, noise_multiplier).event_of(trains=False, rates=True)
        return self.user.event(self.evaluation.noise_multiplier)

    def least_user_noise(self, noise: float) -> float:
        """The noise multiplier of the release that has the least noise at user level, if that of a round is `noise`."""
        ratings, rated = self.evaluation, self.evaluation.noise_multiplier
        if ratings.private:
            noise = joined_noise_multiplier(noise, rated) if ratings.cohort == "same" else min(noise, rated)
        return min(noise, self.statistics.noise_multiplier) if self.asks_of_data else noise

    def user_releases(
        self, noise_multiplier: float, rounds: int, *, sizes: Sizes = PLANNED
    ) -> tuple[tuple[DpEvent, int], ...]:
        """What so many rounds cost a client at user level, with ratings, and what is asked of data before the first."""
        joined, alone = self.evaluation.ratings(rounds)
        releases = [
            (self.statistics.event, int(self.asks_of_data)),
            (self.user_event(noise_multiplier, sizes=sizes), rounds - joined),
        ]
        if joined:
            releases.append((self.user_event(noise_multiplier, joined=True, sizes=sizes), joined))
        if alone:
            releases.append((self.rating_event(noise_multiplier, sizes=sizes), alone))
        return tuple((event, count) for event, count in releases if count)

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
        local, rows = self.local.kind, self.data.public_num_examples
        rule = "none, gaussian or laplace with evaluation.kind=private: laplace_step noises steps, and no answers"
        require(local != "laplace_step", "privacy.local.kind", rule, local)
        if local != "none":
            rule = "false with evaluation.kind=private and privacy.local: one noise on an answer is charged once"
            require(not self.example.enabled, "privacy.example.enabled", rule, self.example.enabled)
            return
        if not self.example.enabled:
            rule = "true with evaluation.kind=private, or another guarantee on: noise pays for what clients answer"
            require(self.user.enabled, "privacy.user.enabled", rule, self.user.enabled)
            return
        rule = "false with evaluation.kind=private and privacy.example.enabled: the server's clip would cut the noise"
        require(not self.user.enabled, "privacy.user.enabled", rule, self.user.enabled)
        rule = (
            "left out with evaluation.kind=private: what is held out goes by rows, and a removed one moves the others"
        )
        require(rows is None, "data.public_num_examples", rule, rows)
        wrong = [name for name in self.evaluation.metrics if name not in MEANS]
        rule = f"of {', '.join(MEANS)} with privacy.example.enabled: of these one example moves only its own share"
        require(not wrong, "evaluation.metrics", rule, ", ".join(wrong))

    def _check_secure(self, by: str) -> None:
        rule = f"everyone with {by}: the server knows whom it asks, so that sampling amplifies nothing"
        require(self.user.sampling == "everyone", "sampling.kind", rule, self.user.sampling)
        rule = f"{RDP} with {by}: its noise is accounted by Renyi divergences"
        require(self.accountant == RDP, "privacy.accountant", rule, self.accountant)
        rule = f"grid with {by}: masks are added to whole numbers"
        require(self.noise == "grid", "privacy.noise", rule, self.noise)
        self.secure.check_fits(self.user.population_size)

    def _check_shared_step(self, by: str) -> None:
        """Every client sends one clipped gradient of each of its examples, and nothing else."""
        rule = f"false {by}: the sum that is opened is noised for one example, not for a client"
        require(not self.user.enabled, "privacy.user.enabled", rule, self.user.enabled)
        require(self.local.kind == "none", "privacy.local.kind", f"none {by}", self.local.kind)
        require(not self.evaluation.private, "evaluation.kind", f"public or none {by}", self.evaluation.kind)
        training, rows = self.training, self.data.public_num_examples
        require(training.epochs == 1, "training.epochs", f"1 {by}: one step a round", training.epochs)
        require(training.optimizer == "sgd", "training.optimizer", f"sgd {by}: a plain step", training.optimizer)
        require(training.weight_decay == 0, "training.weight_decay", f"0 {by}: a plain step", training.weight_decay)
        rule = f"left out {by}: every step is over all examples, and training.batch_size is the public constant"
        require(rows is None, "data.public_num_examples", rule, rows)

    def _check_local(self) -> None:
        kind, schedule = self.local.kind, self.local.schedule
        if kind != "none" and self.user.enabled:
            raise ConfigError(
                f"privacy.local.kind={kind} needs privacy.user.enabled=false: the server's clip would cut the noise"
            )
        if kind == "laplace_step":
            require(not self.example.enabled, "privacy.example.enabled", "false with laplace_step", True)
            rule = "1 with laplace_step: its sensitivity 2 * eta * C / n holds for a single full-batch step"
            require(self.training.epochs == 1, "training.epochs", rule, self.training.epochs)
            optimizer, decay = self.training.optimizer, self.training.weight_decay
            require(optimizer == "sgd", "training.optimizer", "sgd with laplace_step, a plain step", optimizer)
            require(decay == 0, "training.weight_decay", "0 with laplace_step, a plain step", decay)
        if kind != "none" and isinstance(schedule, list):
            rule = f"a list of {self.rounds} numbers, one a round"
            require(len(schedule) == self.rounds, "privacy.local.schedule", rule, f"{len(schedule)} numbers")
