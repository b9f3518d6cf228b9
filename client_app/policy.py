"""What a client's owner allows: a client refuses work that gives less privacy than that."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from client_app.account import Refused
from discreet.config import RunConfig
from discreet.guarantees import EXAMPLE, GUARANTEES, LOCAL, USER, user_event
from discreet.privacy.ledger import PrivacyLedger

POLICY_KEYS = ("min-noise-multiplier", "max-epsilon", "max-delta", "require")


@dataclass(frozen=True)
class ClientPolicy:
    """The least privacy that a client's owner accepts.

    Attributes:
      min_noise_multiplier: of every guarantee that is on; at least one must be on where this is above 0.
      max_epsilon: of every guarantee, and over all runs for those that the client accounts itself (example, local).
      max_delta: of the run.
      require: guarantees that must be on.
    """

    min_noise_multiplier: float = 0.0
    max_epsilon: float = math.inf
    max_delta: float = 1.0
    require: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.min_noise_multiplier) and self.min_noise_multiplier >= 0):
            raise ValueError(
                f"min-noise-multiplier must be a finite number of at least 0 (got {self.min_noise_multiplier})"
            )
        if math.isnan(self.max_epsilon) or self.max_epsilon <= 0:
            raise ValueError(f"max-epsilon must be above 0 (got {self.max_epsilon})")
        if not 0 < self.max_delta <= 1:
            raise ValueError(f"max-delta must be within (0, 1] (got {self.max_delta})")
        unknown = sorted(set(self.require) - set(GUARANTEES))
        if unknown:
            raise ValueError(f"require must name guarantees of {', '.join(GUARANTEES)} (got {', '.join(unknown)})")


def policy_from(node_config: Mapping[str, object]) -> ClientPolicy:
    """The policy of a node: from the JSON file that `policy` names, and from the node's own keys, which win.

    Raises:
      ValueError: a key or a value that is not understood. A policy that can't be read is never taken for none.
    """
    settings: dict[str, object] = {}
    if "policy" in node_config:
        read = json.loads(Path(str(node_config["policy"])).read_text())
        if not isinstance(read, dict):
            raise ValueError("the policy file must hold one JSON object")
        settings |= read
    settings |= {key: node_config[key] for key in POLICY_KEYS if key in node_config}
    unknown = sorted(set(settings) - set(POLICY_KEYS))
    if unknown:
        raise ValueError(f"the policy has no setting {', '.join(unknown)}: it knows {', '.join(POLICY_KEYS)}")
    required = settings.get("require", "")
    names = required if isinstance(required, list) else str(required).replace(",", " ").split()
    return ClientPolicy(
        min_noise_multiplier=_number(settings, "min-noise-multiplier", 0.0),
        max_epsilon=_number(settings, "max-epsilon", math.inf),
        max_delta=_number(settings, "max-delta", 1.0),
        require=tuple(str(name) for name in names),
    )


def _number(settings: Mapping[str, object], key: str, default: float) -> float:
    value = settings.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(f"{key} must be a number (got {value})")
    try:
        return float(value)
    except ValueError as error:
        raise ValueError(f"{key} must be a number (got {value})") from error


def check_policy(policy: ClientPolicy, config: RunConfig, *, noise_multipliers: Mapping[str, float]) -> None:
    """Refuses work below the policy. `noise_multipliers` holds those of the guarantees that are on.

    A client can hold its own noise to the policy. Of user-level noise, which the server draws, it can only hold the
    server's word to it: that guarantee trusts the server.

    Raises:
      Refused: with the setting that is too weak.
    """
    missing = [name for name in policy.require if name not in noise_multipliers]
    if missing:
        raise Refused(f"the policy of this client requires the {missing[0]}-level guarantee, which is off")
    if policy.min_noise_multiplier > 0 and not noise_multipliers:
        raise Refused(
            f"the policy of this client requires noise of {policy.min_noise_multiplier:g}, and no guarantee is on"
        )
    for name, value in noise_multipliers.items():
        if value < policy.min_noise_multiplier:
            raise Refused(
                f"the policy of this client requires a noise multiplier of {policy.min_noise_multiplier:g}; "
                f"the {name}-level one is {value:g}"
            )
    if config.privacy.delta > policy.max_delta:
        raise Refused(
            f"the policy of this client allows delta up to {policy.max_delta:g}; the run has {config.privacy.delta:g}"
        )
    if USER in noise_multipliers and math.isfinite(policy.max_epsilon):
        planned = planned_user_epsilon(config, noise_multiplier=noise_multipliers[USER])
        if planned > policy.max_epsilon:
            raise Refused(
                f"the policy of this client allows epsilon up to {policy.max_epsilon:g}; "
                f"the run plans a user-level {planned:.4g}"
            )


def planned_user_epsilon(config: RunConfig, *, noise_multiplier: float) -> float:
    """The user-level epsilon after the planned rounds, or the run's budget where that is smaller."""
    ledger = PrivacyLedger().record(user_event(config, noise_multiplier), config.rounds)
    planned = ledger.epsilon(config.privacy.delta, config.privacy.accountant)
    return min(planned, config.privacy.user.max_epsilon or math.inf)


def budget_of(policy: ClientPolicy, config: RunConfig, guarantee: str) -> float | None:
    """The smaller of the run's and the owner's budget for a guarantee that the client accounts itself."""
    example, local = config.privacy.example, config.privacy.local
    budgets = {
        EXAMPLE: example.max_epsilon if example.max_epsilon is not None else example.target_epsilon,
        LOCAL: local.max_epsilon if local.max_epsilon is not None else local.epsilon,
    }
    run_budget = budgets[guarantee]
    least = min(math.inf if run_budget is None else run_budget, policy.max_epsilon)
    return least if math.isfinite(least) else None
