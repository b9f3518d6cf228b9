"""The plan of a run: flat, frozen, every number decided. `plan_of` is the last reader of a run's settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from discreet.accounting.calibration import noise_multiplier_for_epsilon
from discreet.ledger.budget import ServerBudget
from discreet.mechanisms import mechanism_table as table
from discreet.mechanisms.mechanism import Mechanism, ServerMechanism, Statement, releases_of, terms_of
from discreet.server.server_optimizer import ServerOptimizer, server_optimizer
from discreet.settings.client_settings import ClientSettings
from discreet.settings.privacy import PLANNED, USER, ClipConfig, Sizes
from discreet.settings.rules import ConfigError
from discreet.settings.settings import OperationsConfig, RayConfig, Settings, client_settings, described, flat
from discreet.settings.training import ModelConfig

if TYPE_CHECKING:
    from discreet.queries.query import Query

ALWAYS = (
    *("privacy.delta", "privacy.noise", "privacy.user.enabled", "sampling.kind", "seed"),
    *("data.name", "data.num_clients", "data.partition", "data.alpha", "data.partition_seed"),
)
OF_RATINGS = tuple(f"evaluation.{name}" for name in ("kind", "every", "cohort", "share", "metrics", "noise_multiplier"))
OF_DATA = ("data.normalise", "statistics.noise_multiplier")


@dataclass(frozen=True)
class Plan:
    """All that a run needs.

    Attributes:
      run: what clients are told, with the noise that a target chose.
      model: with the folder that it lies in, which clients are not told.
      account, population: the file that the run charges before its own ledger, and whose account it is.
      deciding: what decides the cost of a release, flat: a run that is resumed must have the same.
      written, asked: the settings as config.yaml and asked.yaml have them: decided, and as a person wrote them.
      num_params: of the model, or as many as are planned for before it is known.
      query: what clients are asked of models; None unless they rate them.
      chance_loss: of a model that gives 0 throughout: every class the same chance, or the middle of every range;
        infinity if it is not known.
    """

    run: ClientSettings
    model: ModelConfig
    clip: ClipConfig
    optimizer: ServerOptimizer
    seed: int | None
    output: str | None
    resume: bool
    account: str | None
    population: str | None
    too_noisy: str
    data_path: str | None
    engine: str
    device: str
    ray: RayConfig
    operations: OperationsConfig
    round_timeout: float
    min_nodes: int
    deciding: Mapping[str, object]
    written: dict[str, Any]
    asked: dict[str, Any]
    num_params: int = PLANNED.num_params
    query: Query | None = None
    chance_loss: float = math.inf

    @property
    def sizes(self) -> Sizes:
        """Of what is masked under secure aggregation."""
        return Sizes(self.num_params, self.query.length if self.query else 1)

    @cached_property
    def mechanisms(self) -> dict[str, Mechanism]:
        return table.mechanisms_of(self.run)

    @cached_property
    def mechanism(self) -> ServerMechanism | None:
        return table.server_mechanism(self.run, self.clip, self.sizes)

    @cached_property
    def guarantees(self) -> tuple[Statement, ...]:
        """All three guarantees, those that are off included."""
        return tuple(
            each.stated(enabled=table.is_on(self.run, each.guarantee), account=self.account is not None)
            for each in table.guarantees_of(self.run)
        )

    @property
    def accounts_itself(self) -> bool:
        return table.accounts_itself(self.run)

    @property
    def first_clip_norm(self) -> float:
        """C_0; infinity if user-level privacy is off, and nothing is clipped at the server."""
        return self.clip.norm if USER in self.mechanisms else math.inf

    def budget(self, guarantee: str = USER) -> ServerBudget:
        """The budget of a guarantee that the server accounts."""
        largest = self.run.user.max_epsilon if guarantee == USER else self.run.example.max_epsilon
        name = f"privacy.{guarantee}.max_epsilon"
        return ServerBudget(largest, self.run.delta, self.run.accountant, name=name, guarantee=guarantee)

    def noised(self, guarantee: str) -> bool:
        """True if a guarantee is on, with noise."""
        mechanism = self.mechanisms.get(guarantee)
        return mechanism is not None and terms_of(mechanism).noise_multiplier != 0


def plan_of(
    decided: Settings,
    *,
    asked: Settings | None = None,
    num_params: int = PLANNED.num_params,
    query: Query | None = None,
    chance_loss: float = math.inf,
) -> Plan:
    """The plan of settings whose noise is decided. `asked`: as a person wrote them; None: the same."""
    user = decided.privacy.user
    return Plan(
        run=client_settings(decided),
        model=decided.model,
        clip=user.clip,
        optimizer=server_optimizer(decided.server),
        seed=decided.seed,
        output=decided.output_dir,
        resume=decided.resume,
        account=user.account,
        population=decided.sampling.population_name,
        too_noisy=user.too_noisy,
        data_path=decided.data.path,
        engine=decided.engine,
        device=decided.device,
        ray=decided.ray,
        operations=decided.operations,
        round_timeout=decided.server.round_timeout,
        min_nodes=decided.sampling.min_nodes,
        deciding=_deciding(client_settings(decided), flat(asdict(decided))),
        written=described(decided),
        asked=described(asked or decided),
        num_params=num_params,
        query=query,
        chance_loss=chance_loss,
    )


def planned(settings: Settings) -> Plan:
    """The plan of a run of which neither data nor model are known yet. ConfigError: no noise reaches the target."""
    return plan_of(resolve_noise(settings), asked=settings)


def resolve_noise(settings: Settings, sizes: Sizes = PLANNED) -> Settings:
    """The settings with the smallest noise multiplier whose epsilon after the planned rounds is at most the target of
    the server's mechanism. The target becomes the budget unless `max_epsilon` is given. `sizes`: of what is masked
    under secure aggregation. ConfigError: no noise reaches the target."""
    mechanism = table.server_mechanism(client_settings(settings), sizes=sizes)
    if mechanism is None:
        return settings
    section = getattr(settings.privacy, mechanism.guarantee)
    target = section.target_epsilon
    if target is None:
        return settings
    try:
        noise_multiplier = noise_multiplier_for_epsilon(
            target,
            releases=lambda noise: releases_of(mechanism, noise, settings.rounds),
            delta=settings.privacy.delta,
            accountant=settings.privacy.accountant,
        )
    except ValueError as error:
        name = f"privacy.{mechanism.guarantee}.target_epsilon"
        raise ConfigError(f"{name}={target:g} can't be reached: {error}") from error
    budget = target if section.max_epsilon is None else section.max_epsilon
    resolved = replace(section, noise_multiplier=noise_multiplier, target_epsilon=None, max_epsilon=budget)
    return replace(settings, privacy=replace(settings.privacy, **{mechanism.guarantee: resolved}))


def _deciding(run: ClientSettings, decided: Mapping[str, object]) -> dict[str, object]:
    mechanisms = table.mechanisms_of(run).values()
    names = [*ALWAYS, *(name for each in mechanisms for name in each.deciding)]
    names += ("privacy.user.mechanism",) if run.user.mechanism is not None else ()
    names += OF_RATINGS if run.evaluation.private else ()
    names += OF_DATA if run.data.normalise == "private" else ()
    names += ("data.examples_per_client",) if run.data.examples_per_client is not None else ()
    names += ("sampling.population_name",) if decided["privacy.user.account"] is not None else ()
    facts = {name: decided[name] for name in names}
    facts["sampling.probability"] = run.user.probability
    facts["sampling.population_size"] = run.user.population_size
    for each in mechanisms:
        facts |= each.decided
    return facts
