"""The guarantees of a configuration, and the noise that its target asks for."""

from __future__ import annotations

from dataclasses import replace

from discreet.accounting.calibration import noise_multiplier_for_releases
from discreet.mechanisms import mechanism_table as table
from discreet.mechanisms.mechanism import Mechanism, ServerMechanism, Statement, releases_of, terms_of
from discreet.settings.privacy import PLANNED, Sizes
from discreet.settings.rules import ConfigError
from discreet.settings.run_config import RunConfig, client_settings


def guarantees_of(config: RunConfig) -> tuple[Statement, ...]:
    """All three guarantees of a run, those that are off included."""
    run, account = client_settings(config), config.privacy.user.account is not None
    return tuple(
        replace(each.statement(account=account), name=each.guarantee, enabled=table.is_on(run, each.guarantee))
        for each in table.guarantees_of(run)
    )


def mechanisms_of(config: RunConfig) -> dict[str, Mechanism]:
    """The mechanisms of a run by their guarantees; those that are off are left out."""
    return table.mechanisms_of(client_settings(config))


def server_mechanism(config: RunConfig) -> ServerMechanism | None:
    """The mechanism whose releases the server is charged for; None if clients alone noise what they send."""
    return table.server_mechanism(client_settings(config))


def accounts_itself(config: RunConfig) -> bool:
    """True if each client accounts a guarantee in a ledger of its own."""
    return table.accounts_itself(client_settings(config))


def noised(config: RunConfig, guarantee: str, *, masked: bool = False) -> bool:
    """True if a guarantee is on, with noise, by a mechanism that masks what clients send or by one that does not."""
    mechanism = mechanisms_of(config).get(guarantee)
    return mechanism is not None and mechanism.masked == masked and terms_of(mechanism).noise_multiplier != 0


def resolve_noise(config: RunConfig, sizes: Sizes = PLANNED) -> RunConfig:
    """The configuration with the noise multiplier that the target of the server's mechanism asks for, and its budget,
    filled in.

    A target is met by the smallest noise multiplier whose epsilon after the planned rounds is at most the target, and
    becomes the budget unless `max_epsilon` is given. `sizes`: of what is masked under secure aggregation.

    Raises:
      ConfigError: no noise reaches the target.
    """
    mechanism = server_mechanism(config)
    if mechanism is None:
        return config
    section = getattr(config.privacy, mechanism.guarantee)
    target = section.target_epsilon
    if target is None:
        return config
    try:
        noise_multiplier = noise_multiplier_for_releases(
            target,
            releases=lambda noise: releases_of(mechanism, noise, config.rounds, sizes=sizes),
            delta=config.privacy.delta,
            accountant=config.privacy.accountant,
        )
    except ValueError as error:
        name = f"privacy.{mechanism.guarantee}.target_epsilon"
        raise ConfigError(f"{name}={target:g} can't be reached: {error}") from error
    budget = target if section.max_epsilon is None else section.max_epsilon
    resolved = replace(section, noise_multiplier=noise_multiplier, target_epsilon=None, max_epsilon=budget)
    return replace(config, privacy=replace(config.privacy, **{mechanism.guarantee: resolved}))
