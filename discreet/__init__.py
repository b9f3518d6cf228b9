"""Differentially private federated learning on Flower: the library that server and clients
share."""

from __future__ import annotations

TYPE_CHECKING = False  # for type checkers, which take it for true: the import of `typing` is slow
if TYPE_CHECKING:
    from typing import Any

__version__ = "0.2.0"

# What `discreet.NAME` is, and the module that is imported when it is first asked for: `import
# discreet` stays light, and a node does not need what the server has.
_HOMES = {
    "AdaptiveClipping": "discreet.settings.clip_choice",
    "BatchError": "discreet.dpsgd.dpsgd",
    "BudgetSpent": "discreet.ledger.budget",
    "CentralGaussian": "discreet.mechanisms.central_gaussian",
    "CorrelatedNoise": "discreet.mechanisms.correlated_noise",
    "ConfigError": "discreet.settings.rules",
    "DPFedAvg": "discreet.flower.strategy",
    "DPSGD": "discreet.dpsgd.dpsgd",
    "FixedClipping": "discreet.settings.clip_choice",
    "LoopPrivacy": "discreet.dpsgd.loop_plan",
    "MaskedGaussian": "discreet.mechanisms.masked_sums",
    "PrivateEvaluation": "discreet.flower.strategy_settings",
    "ServerAdam": "discreet.planning.server_optimizer",
    "ServerSGD": "discreet.planning.server_optimizer",
    "ServerYogi": "discreet.planning.server_optimizer",
    "check_table": "discreet.data.site_agreement",
    "local_dp_mod": "discreet.flower.local_dp_mod",
    "per_example_loss": "discreet.per_example.criteria",
    "secure_sum_mod": "discreet.flower.secure_sum_mod",
    "simulate": "discreet.simulation",
    "table_digests": "discreet.data.site_agreement",
    "to_group_norm": "discreet.dpsgd.group_norm",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    try:
        return getattr(import_module(_HOMES[name]), name)
    except ModuleNotFoundError as error:
        from discreet.settings.extras import lacking

        line = lacking(error, f"discreet.{name}")
        if line is None:
            raise
        raise ModuleNotFoundError(line, name=error.name) from error
