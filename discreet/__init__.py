"""Differentially private federated learning on Flower: the library that server and clients share."""

from __future__ import annotations

from importlib import import_module
from typing import Any

__all__ = [
    "DPSGD",
    "BatchError",
    "BudgetSpent",
    "ConfigError",
    "DPFedAvg",
    "LoopPrivacy",
    "PrivateEvaluation",
    "ServerAdam",
    "ServerSGD",
    "ServerYogi",
    "per_example_loss",
    "secure_sum_mod",
    "simulate",
    "to_group_norm",
]
__version__ = "0.1.0"

# What `discreet.NAME` is, and the module that is imported when it is first asked for: `import discreet` stays light,
# and a node does not need what the server has.
_HOMES = {
    "BatchError": "discreet.dpsgd.dpsgd",
    "BudgetSpent": "discreet.ledger.budget",
    "ConfigError": "discreet.settings.rules",
    "DPFedAvg": "discreet.flower.strategy",
    "DPSGD": "discreet.dpsgd.dpsgd",
    "LoopPrivacy": "discreet.dpsgd.step_account",
    "PrivateEvaluation": "discreet.flower.strategy_settings",
    "ServerAdam": "discreet.server.server_optimizer",
    "ServerSGD": "discreet.server.server_optimizer",
    "ServerYogi": "discreet.server.server_optimizer",
    "per_example_loss": "discreet.training.losses",
    "secure_sum_mod": "discreet.flower.secure_sum_mod",
    "simulate": "discreet.simulation",
    "to_group_norm": "discreet.training.group_norm",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
