"""The plan of a run: its settings with every number decided, and the facts that decided them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from discreet.accounting.calibration import noise_multiplier_for_epsilon
from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.ledger.budget import ServerBudget
from discreet.mechanisms import mechanism_table as table
from discreet.mechanisms.mechanism import SERVER, Mechanism, Statement, releases_of, stated
from discreet.planning.server_optimizer import ServerOptimizer, server_optimizer
from discreet.settings.adjacency import GUARANTEES, USER
from discreet.settings.client_settings import ClientSettings
from discreet.settings.clip_choice import ClipConfig
from discreet.settings.data import DataConfig
from discreet.settings.privacy import PLANNED, PrivacyConfig, Sizes
from discreet.settings.rules import ConfigError
from discreet.settings.settings import RayConfig, Settings, client_settings, flat
from discreet.settings.training import ModelConfig
from discreet.settings.wording import Key, Wording

if TYPE_CHECKING:
    from dp_accounting import DpEvent

    from discreet.planning.constant_guess import ConstantGuess  # it imports PyTorch
    from discreet.planning.linear_model import LinearModel
    from discreet.privacy.sampling import CohortSampling
    from discreet.queries.query import Query

ALWAYS = (
    "privacy.delta",
    "privacy.noise",
    "privacy.user.enabled",
    "sampling.kind",
    "seed",
    "data.name",
    "data.num_clients",
    "data.partition",
    "data.alpha",
    "data.partition_seed",
)
OF_RATINGS = tuple(
    f"evaluation.{name}"
    for name in ("kind", "every", "cohort", "share", "metrics", "noise_multiplier")
)
OF_DATA = ("data.normalise", "statistics.noise_multiplier")


@dataclass(frozen=True)
class Plan:
    """The complete plan of a run.

    Attributes:
      settings: the decided settings, with the noise that a target chose, as in config.yaml.
      asked: the settings as the user wrote them, as in asked.yaml; None: the same.
      num_params: the number of the model's parameters, or a planned number before the model is
        known.
      query: the query about models that clients answer; None unless they rate them.
      chance_loss: the loss of a model whose outputs are all 0 (equal chances for every class, or
        the middle of every range); infinity if it is not known.
      constant: the constant guess that a model should beat; None if none is known.
      linear: the public facts about a linear model of a table; None for another model.
      reasons: a line about each setting that the rule for tables chose.
    """

    settings: Settings
    asked: Settings | None = None
    num_params: int = PLANNED.num_params
    query: Query | None = None
    chance_loss: float = math.inf
    constant: ConstantGuess | None = None
    linear: LinearModel | None = None
    reasons: tuple[str, ...] = ()

    @cached_property
    def run(self) -> ClientSettings:
        """The settings that clients receive."""
        return client_settings(self.settings)

    @property
    def as_asked(self) -> Settings:
        """The settings as the user wrote them."""
        return self.asked or self.settings

    @property
    def seed(self) -> int | None:
        """The number that all draws follow from; None: they are secure."""
        return self.settings.seed

    @property
    def data(self) -> DataConfig:
        """The data, with the server's own folder of them."""
        return self.settings.data

    @property
    def model(self) -> ModelConfig:
        return self.settings.model

    @property
    def privacy(self) -> PrivacyConfig:
        """The guarantees with their noise, which a resumed run must have again."""
        return self.settings.privacy

    @cached_property
    def optimizer(self) -> ServerOptimizer:
        return server_optimizer(self.settings.server)

    @cached_property
    def clip(self) -> ClipConfig:
        return self.privacy.user.clip

    @property
    def account(self) -> str | None:
        """The account file that the run charges before its own ledger."""
        return self.privacy.user.account

    @property
    def population_name(self) -> str:
        """The population that the account belongs to."""
        return str(self.settings.sampling.population_name)

    @property
    def only_warns(self) -> bool:
        """True if a run starts even if noise would keep it from learning."""
        return self.privacy.user.too_noisy == "warn"

    @property
    def keeps_best(self) -> bool:
        """True if the run's model is that of its best round."""
        return self.settings.evaluation.keep == "best"

    @property
    def engine(self) -> str:
        return self.settings.engine

    @property
    def ray(self) -> RayConfig:
        return self.settings.ray

    @property
    def round_timeout(self) -> float:
        """The seconds that the server waits for a round's replies."""
        return self.settings.server.round_timeout

    @property
    def min_nodes(self) -> int:
        """The number of connected nodes that the first round waits for."""
        return self.settings.sampling.min_nodes

    @property
    def log_format(self) -> str:
        return self.settings.operations.log_format

    @property
    def predictions(self) -> bool:
        """True if the run ends with predictions for the public test set."""
        return self.settings.operations.predictions

    @property
    def sizes(self) -> Sizes:
        """The sizes of the release."""
        if self.query is None:
            return Sizes(self.num_params)
        return Sizes(self.num_params, self.query.length, self.query.l1_norm)

    @cached_property
    def mechanisms(self) -> dict[str, Mechanism]:
        return table.mechanisms_of(self.run, self.clip, self.sizes)

    @cached_property
    def mechanism(self) -> Mechanism:
        """The mechanism of the server's rounds."""
        return table.round_mechanism(self.run, self.clip, self.sizes)

    @property
    def charges_server(self) -> bool:
        """True if the server's ledger pays for rounds."""
        return SERVER in self.mechanism.charged_at

    @cached_property
    def sampling(self) -> CohortSampling:
        from discreet.privacy.sampling import CohortSampling  # with PyTorch

        user = self.run.user
        return CohortSampling(user.sampling, user.probability, user.population_size, user.groups)

    @cached_property
    def denominator(self) -> float:
        """The public denominator of sums, whichever clients have replied."""
        return self.run.expected_cohort

    @cached_property
    def every_mechanism(self) -> tuple[Mechanism, ...]:
        """The mechanisms of all three guarantees, including disabled ones."""
        return table.guarantees_of(self.run, self.clip, self.sizes)

    @cached_property
    def guarantees(self) -> tuple[Statement, ...]:
        """All three guarantees, including disabled ones."""
        return tuple(
            stated(each, self.run, account=self.account is not None)
            for each in self.every_mechanism
        )

    @property
    def accounts_itself(self) -> bool:
        return table.accounts_itself(self.run)

    @property
    def first_clip_norm(self) -> float:
        """C_0, the first clip norm; infinity if user-level privacy is off and the server clips
        nothing."""
        if USER in self.mechanisms:
            return self.clip.first
        return math.inf

    @property
    def by_rule(self) -> bool:
        """True if the rule for tables chooses the clip norm; a linear model then starts from
        zeros."""
        return self.as_asked.privacy.user.clip.norm is None

    def changed(self, **settings: Any) -> Plan:
        """The plan with other values of some decided settings."""
        return replace(self, settings=replace(self.settings, **settings))

    def budget(self, guarantee: str = USER) -> ServerBudget:
        """The budget of a guarantee that the server accounts."""
        if guarantee == USER:
            largest = self.run.user.max_epsilon
        else:
            largest = self.run.example.max_epsilon
        name = f"privacy.{guarantee}.max_epsilon"
        return ServerBudget(
            largest, self.run.delta, self.run.accountant, name=name, guarantee=guarantee
        )

    def epsilon_after(self, rounds: int) -> float:
        """The epsilon of so many rounds at the server, with ratings and questions about data."""
        releases = releases_of(self.mechanism, self.run, rounds)
        return PrivacyLedger(releases).epsilon(self.run.delta, self.run.accountant)

    def noised(self, guarantee: str) -> bool:
        """True if an enabled guarantee has noise."""
        return self.run.gives(guarantee) and self.run.configured_noise_multiplier(guarantee) != 0

    @property
    def is_private(self) -> bool:
        """True if a guarantee of the run has noise."""
        return any(map(self.noised, GUARANTEES))

    @property
    def deciding(self) -> dict[str, object]:
        """The settings that decide the cost of a release, by dotted name. A resumed run must have
        the same."""
        run = self.run
        decided = flat(asdict(self.settings))
        mechanisms = self.mechanisms.values()
        names = [*ALWAYS]
        if run.user.mechanism is not None:
            names += ("privacy.user.mechanism",)
        if run.evaluation.private:
            names += OF_RATINGS
        if run.data.normalise == "private":
            names += OF_DATA
        if run.data.examples_per_client is not None:
            names += ("data.examples_per_client",)
        if decided["privacy.user.account"] is not None:
            names += ("sampling.population_name",)
        facts = {name: decided[name] for name in names}
        if run.user.mechanism_numbers is not None:
            facts["privacy.user.mechanism_numbers"] = run.user.mechanism_numbers
        facts["sampling.probability"] = run.user.probability
        facts["sampling.population_size"] = run.user.population_size
        for each in mechanisms:
            facts |= each.price_settings
        return facts


def planned(settings: Settings) -> Plan:
    """The plan of a run whose data and model are not known yet. ConfigError: no noise meets the
    target."""
    return Plan(resolve_noise(settings), settings)


def resolve_noise(settings: Settings, sizes: Sizes = PLANNED) -> Settings:
    """The settings with the smallest noise multiplier that keeps epsilon after the planned rounds
    within the target of the server's mechanism. The target becomes the budget unless `max_epsilon`
    is given. `sizes`: the sizes of a masked release under secure aggregation. ConfigError: no noise
    meets the target."""
    run = client_settings(settings)
    mechanism = table.server_mechanism(run, sizes=sizes)
    if mechanism is None:
        return settings
    guarantee = mechanism.guarantee
    section = getattr(settings.privacy, guarantee)
    target = section.target_epsilon
    if target is None:
        return settings
    try:
        noise_multiplier = noise_multiplier_for_epsilon(
            target,
            releases=lambda noise: planned_releases(run, guarantee, noise, sizes),
            delta=settings.privacy.delta,
            accountant=settings.privacy.accountant,
        )
    except ValueError as error:
        asked = Key(f"privacy.{guarantee}.target_epsilon={target:g}")
        raise ConfigError(Wording(asked, f" can't be reached: {error}")) from error
    if section.max_epsilon is None:
        budget = target
    else:
        budget = section.max_epsilon
    resolved = replace(
        section, noise_multiplier=noise_multiplier, target_epsilon=None, max_epsilon=budget
    )
    return replace(settings, privacy=replace(settings.privacy, **{guarantee: resolved}))


def check_cost(plan: Plan) -> None:
    """Raises ConfigError if a third-party mechanism states that all planned rounds together cost
    nothing."""
    run = plan.run
    own = run.user.mechanism
    if own is not None and run.gives(USER) and plan.epsilon_after(run.rounds) == 0:
        raise ConfigError(f"privacy.user.mechanism={own} states that its rounds cost nothing")


def check_room(plan: Plan) -> None:
    """Raises ConfigError if the budget of a run has no room for one round. One that begins with a
    question about data is refused where that is asked."""
    run = plan.run
    if not plan.charges_server or plan.account is not None or run.asks_of_data:
        return
    guarantee = plan.mechanism.guarantee
    budget = plan.budget(guarantee)
    most = budget.max_epsilon
    if most is not None and (first := plan.epsilon_after(1)) > most:
        key = Key(f"{budget.name}={most:g}")
        room = f" has no room for a round, which costs {first:.4g}: "
        raise ConfigError(Wording(key, f"{room}more noise or a smaller cohort costs less"))


def planned_releases(
    run: ClientSettings, guarantee: str, noise_multiplier: float, sizes: Sizes = PLANNED
) -> tuple[tuple[DpEvent, int], ...]:
    """The events that all planned rounds would cost with a noise multiplier."""
    noised = run.with_noise(guarantee, noise_multiplier)
    mechanism = table.server_mechanism(noised, sizes=sizes)
    assert mechanism is not None
    return releases_of(mechanism, noised, run.rounds)
