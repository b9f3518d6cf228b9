"""From the arguments of `DPFedAvg` to settings of a run, and what of Flower's arguments privacy can't honour."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from discreet.server.server_optimizer import server_section
from discreet.settings.compose import parse_config
from discreet.settings.privacy import SECURE
from discreet.settings.rules import ConfigError
from discreet.settings.run_config import RunConfig
from discreet.settings.training import FLOWER_APP


@dataclass(frozen=True)
class PrivateEvaluation:
    """Clients rate the model on data of their own, and what they say is noised and paid for: of `DPFedAvg`.

    A cohort drawn as those of training rounds gets Flower's evaluate message. Each client's `metric` is held to [0, 1],
    the server adds up what it is above one half, and noises the sum for one client: an event of its own in the ledger.

    Attributes:
      every: after so many rounds, again and again, and after the last one.
      metric: its name in the MetricRecord that clients send back: an accuracy, or another share.
      noise_multiplier: of the noise, over what one client can add. The standard error of the mean over clients is
        noise_multiplier / (2 * fraction_train * population_size).
    """

    every: int = 10
    metric: str = "accuracy"
    noise_multiplier: float = 10.0


EVALUATED = "what clients report of their own data is not private. Evaluate on data of the server's own by evaluate_fn"
REFUSED = {
    "fraction_evaluate": f"0: {EVALUATED}",
    "min_evaluate_nodes": f"0: {EVALUATED}",
    "evaluate_metrics_aggr_fn": f"left out: {EVALUATED}",
    "train_metrics_aggr_fn": f"left out: {EVALUATED}",
    "weighted_by_key": "left out: weights by numbers that clients report would make one client count for more than the "
    "noise is for; all count the same",
}

LARGEST_DOUBT = 0.2  # the share that says "much too short" is 0.5 away from the one that says "right"
# If no clip norm is given: noise for one that is far too long undoes what was learned, one that is too short costs a
# round. Their steps multiply the norm by at most exp(5 / 2) = 12, then 3.5, 1.9, ...
FIRST_NORM, LARGEST_NORM, SEARCH_RATE = 0.1, 10.0, 5.0


def refuse_what_is_not_private(given: Mapping[str, Any]) -> None:
    """Raises ConfigError if an argument asks for what a private strategy does not do; nothing is ignored."""
    for name, rule in REFUSED.items():
        if given[name] not in (None, 0):
            raise ConfigError(f"{name} must be {rule}")
    least, available = given["min_train_nodes"], given["min_available_nodes"]
    everybody = given["fraction_train"] == 1 and given["sampling"] != "fixed"
    if least != 0 and not (everybody and least <= available):
        raise ConfigError(
            f"min_train_nodes must be 0 (got {least}): each node is drawn by itself, so a cohort may be small or even "
            "empty, and filling it up would change the sampling that is accounted for. min_available_nodes says how "
            "many nodes to wait for"
        )
    population = given["population_size"]
    if population is None:
        raise ConfigError(
            "population_size must be given: how many nodes there may be, a number that is public. The average is over "
            "fraction_train * population_size, and delta must be below 1 / population_size"
        )
    if not 1 <= available <= population:
        raise ConfigError(f"min_available_nodes must be within [1, population_size={population}] (got {available})")


def flower_settings(given: Mapping[str, Any]) -> RunConfig:
    """The settings of a run with one round and Flower's timeout, which `start` replaces.

    Raises:
      ConfigError: one is of the wrong type or out of range, or two contradict each other.
    """
    if given["sampling"] == "everyone" and given["fraction_train"] != 1:
        raise ConfigError(f"fraction_train must be 1 with sampling=everyone (got {given['fraction_train']})")
    population = given["population_size"]
    names = ("noise_multiplier", "target_epsilon", "max_epsilon", "too_noisy", "account", "aggregation")
    user = {name: given[name] for name in names}
    if given["aggregation"] == SECURE and given["private_evaluation"] is not None:
        raise ConfigError(
            "private_evaluation must be None with aggregation=secure: another app's metrics are not masked"
        )
    return parse_config(
        {
            "rounds": 1,
            **{name: given[name] for name in ("seed", "output_dir", "resume")},
            "data": {"name": FLOWER_APP, "num_clients": population},
            "model": {"name": FLOWER_APP},
            "sampling": {
                "kind": given["sampling"],
                "probability": given["fraction_train"],
                "population_size": population,
                "population_name": given["population_name"],
                "min_nodes": given["min_available_nodes"],
            },
            "server": _server(given),
            "evaluation": _evaluation(given["private_evaluation"]),
            "privacy": {
                **{name: given[name] for name in ("delta", "accountant", "noise")},
                "user": {**user, "enabled": True, "clip": _clip(given)},
                "secure": {name: given[name] for name in ("dropouts", "colluding", "threshold")},
            },
        }
    )


def _clip(given: Mapping[str, Any]) -> dict[str, object]:
    """The section `privacy.user.clip` of the settings."""
    searches = given["clip_norm"] is None
    if searches and given["clipping"] == "fixed":
        raise ConfigError("clip_norm must be given with clipping=fixed: nothing moves it to where the differences are")
    return {
        "kind": given["clipping"],
        "norm": FIRST_NORM if searches else given["clip_norm"],
        "max": LARGEST_NORM if searches and given["clip_max"] is None else given["clip_max"],
        "search_rate": SEARCH_RATE if searches else 0.0,
        "target_quantile": given["target_quantile"],
        "learning_rate": given["clip_learning_rate"],
        "count_stddev": given["count_stddev"],
    }


def check_search(config: RunConfig, count_stddev: float | None) -> None:
    """Raises ConfigError if the clip norm is to be searched for, and noise on the bits would hide where it is."""
    share = (count_stddev or 0.0) / config.expected_cohort
    if config.privacy.user.clip.search_rate and share >= LARGEST_DOUBT:
        raise ConfigError(
            "clip_norm must be given, as long as a node's difference is, by public data: the share of differences "
            f"within it can't be told, for its noise has a standard deviation of {share:.2g}, and {LARGEST_DOUBT:g} or "
            "more is too much to search by"
        )


def _evaluation(asked: PrivateEvaluation | None) -> dict[str, object]:
    """The section `evaluation` of the settings."""
    if asked is None:
        return {}
    return {"kind": "private", "every": asked.every, "noise_multiplier": asked.noise_multiplier}


def _server(given: Mapping[str, Any]) -> dict[str, object]:
    """The section `server` of the settings."""
    optimizer = given["server_optimizer"]
    if optimizer is None:
        return {
            "learning_rate": given["server_learning_rate"],
            "momentum": given["server_momentum"],
            "shrink_with_noise": given["shrink_with_noise"],
        }
    for name, default in (("server_learning_rate", 1.0), ("server_momentum", 0.0), ("shrink_with_noise", False)):
        if given[name] != default:
            raise ConfigError(f"{name} must be left out with server_optimizer, which has its own (got {given[name]})")
    return server_section(optimizer)
