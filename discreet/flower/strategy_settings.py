"""Converts the arguments of `DPFedAvg` to settings of a run, and refuses arguments of Flower that
privacy rules out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from functools import reduce
from typing import Any, cast

from discreet.ledger.durable_ledger import LedgerError
from discreet.mechanisms.central_gaussian import CentralGaussian
from discreet.mechanisms.correlated_noise import CorrelatedNoise
from discreet.mechanisms.masked_sums import MaskedGaussian
from discreet.mechanisms.mechanism import Mechanism
from discreet.mechanisms.mechanism_table import OF_A_RUN
from discreet.planning.server_optimizer import ServerSGD, server_section
from discreet.run_files.compose import parse_asked
from discreet.settings.clip_choice import CLIP_WORDS, AdaptiveClipping, FixedClipping
from discreet.settings.own_numbers import kept_numbers, own_name
from discreet.settings.privacy import PLAIN, SECURE
from discreet.settings.rules import ConfigError, did_you_mean, plain, require
from discreet.settings.settings import Settings
from discreet.settings.training import FLOWER_APP
from discreet.settings.wording import in_words


@dataclass(frozen=True)
class PrivateEvaluation:
    """Private federated evaluation for `DPFedAvg`: clients evaluate the model on their own data,
    and the result is noised and accounted for.

    A cohort drawn as in training rounds gets Flower's evaluate message. Each client's `metric` is
    clamped to [0, 1] and reduced by one half. The server adds these up and noises the sum for one
    client, which is a separate event in the ledger.

    Attributes:
      every: the number of rounds between evaluations; there is one after the last round too.
      metric: its name among the metrics that clients return: an accuracy, or another share.
      noise_multiplier: the noise's standard deviation over the largest contribution of a client.
        The standard error of the mean over clients is noise_multiplier / (2 * fraction_train *
        population_size).
    """

    every: int = 10
    metric: str = "accuracy"
    noise_multiplier: float = 10.0


KINDS = (CentralGaussian, MaskedGaussian, CorrelatedNoise)
SHORT = ("target_epsilon", "delta", "clip_norm")
HELD = tuple(each.name for each in fields(CentralGaussian) if each.name not in OF_A_RUN)
VERBS = ("add_up", "event", "release")
EVALUATED = (
    "clients' reports about their own data are not private. Evaluate on data of the server's own "
    "by start(evaluate_fn=...), or let clients rate the model with noise by "
    "DPFedAvg(private_evaluation=discreet.PrivateEvaluation())"
)
# Arguments of Flower's FedAvg that privacy rules out, with the reason.
REFUSED = {
    **dict.fromkeys(("fraction_evaluate", "min_evaluate_nodes"), EVALUATED),
    **dict.fromkeys(("evaluate_metrics_aggr_fn", "train_metrics_aggr_fn"), EVALUATED),
    "weighted_by_key": "weights reported by clients would give one of them more weight than the "
    "noise covers",
}
# Arguments that belong elsewhere: those of the mechanism, and of Flower's strategies that are
# FedAvg with other server steps.
ELSEWHERE = {
    **{
        each.name: "mechanism"
        for kind in KINDS
        for each in fields(kind)
        if each.name not in OF_A_RUN
    },
    **dict.fromkeys(
        ("eta", "beta_1", "beta_2", "tau"), "server_optimizer, a discreet.ServerAdam or ServerYogi"
    ),
    "proximal_mu": "clients, in the train_config of start",
}
# For each setting of conf/ the argument, of the constructor or of the mechanism, that sets it.
GIVEN = {
    "seed": "seed",
    "sampling.kind": "sampling",
    "sampling.probability": "fraction_train",
    "sampling.population_size": "population_size",
    "sampling.population_name": "population_name",
    "sampling.min_nodes": "min_available_nodes",
    "sampling.groups": "groups",
    "data.num_clients": "population_size",
    **{f"privacy.{name}": name for name in ("delta", "accountant", "noise")},
    **{
        f"privacy.user.{name}": name
        for name in ("noise_multiplier", "target_epsilon", "max_epsilon", "too_noisy")
    },
    "privacy.user.account": "account",
    "privacy.user.mechanism": "own",
    "privacy.user.mechanism_numbers": "numbers",
    "privacy.user.correlation.kind": "correlation",
    "privacy.user.correlation.bandwidth": "bandwidth",
    **{f"privacy.secure.{name}": name for name in ("dropouts", "colluding", "threshold")},
}
# The names in messages of all settings, including those of nested values and of `start`.
ARGUMENTS = {
    **GIVEN,
    **CLIP_WORDS,
    **{
        f"server.{name}": f"server_optimizer.{name}"
        for name in ("learning_rate", "momentum", "shrink_with_noise")
    },
    **{
        f"evaluation.{name}": f"private_evaluation.{name}" for name in ("every", "noise_multiplier")
    },
    "privacy.user.too_noisy=warn": 'mechanism=CentralGaussian(..., too_noisy="warn")',
    "privacy.user.aggregation": "mechanism",
    "privacy.user.aggregation=secure": "mechanism=MaskedGaussian",
    "server.round_timeout": "timeout",
    "resume=true": "resume=True",
    "rounds": "num_rounds",
}


@contextmanager
def in_words_of_arguments() -> Iterator[None]:
    """A context in which errors about a setting name the argument instead, once if it stands for
    several settings."""
    try:
        yield
    except (ConfigError, LedgerError) as error:
        lines = in_words(error, ARGUMENTS).splitlines()
        said = "\n  ".join(dict.fromkeys(line.strip() for line in lines))
        raise type(error)(said) from error


def _refuse(given: Mapping[str, Any]) -> None:
    """Raises for arguments of Flower's strategies that privacy rules out, and for unknown
    arguments."""
    for name, value in given["flower"].items():
        if name in REFUSED:
            require(value in (None, 0), name, f"omitted, None or 0: {REFUSED[name]}", value)
        elif name != "min_train_nodes":
            if name in ELSEWHERE:
                hint = f": give it to {ELSEWHERE[name]}"
            else:
                hint = did_you_mean(name, given)
            raise TypeError(f"DPFedAvg has no argument {name}{hint}")
    drawn = given["sampling"]
    share = given["fraction_train"]
    if drawn in ("everyone", "cyclic"):
        require(share == 1, "fraction_train", f"1 with sampling={drawn}", share)
    least = given["flower"].get("min_train_nodes", 0)
    available = given["min_available_nodes"]
    rule = (
        "0: a filled-up cohort is not the one that is accounted for. min_available_nodes "
        "waits for nodes"
    )
    asks_all = share == 1 and drawn in ("poisson", "everyone")
    require(least == 0 or (asks_all and least <= available), "min_train_nodes", rule, least)


def _mechanism(given: Mapping[str, Any]) -> Mechanism:
    """The given mechanism, or the one that the short arguments stand for."""
    mechanism = given["mechanism"]
    short = {name: given[name] for name in SHORT if given[name] is not None}
    if mechanism is None:
        named = "target_epsilon" in short
        require(
            named,
            "target_epsilon",
            "given, or mechanism, such as discreet.CentralGaussian(...)",
            None,
        )
        return CentralGaussian(clipping=AdaptiveClipping(short.pop("clip_norm", None)), **short)
    if isinstance(mechanism, type) or not (
        is_dataclass(mechanism) and all(hasattr(mechanism, verb) for verb in VERBS)
    ):
        kinds = "CentralGaussian, CorrelatedNoise or MaskedGaussian, or one of your own"
        raise ConfigError(f"mechanism must be a {kinds} (got {type(mechanism).__name__})")
    for name, value in short.items():
        has = hasattr(mechanism, "clipping" if name == "clip_norm" else name)
        require(not has, name, "omitted with a mechanism, which has its own", value)
    return cast(Mechanism, mechanism)


def settings_of_mechanism(mechanism: Mechanism) -> dict[str, Any]:
    """The settings of a caller's mechanism, by the names of its fields."""
    names = (each.name for each in fields(cast(Any, mechanism)) if each.name not in OF_A_RUN)
    return {name: getattr(mechanism, name) for name in names}


def _from_outside(mechanism: Mechanism, own: Mapping[str, Any]) -> dict[str, Any]:
    """What a run folder keeps of a mechanism from outside: its name, and the values that no other
    setting has."""
    if type(mechanism) in KINDS:
        return {"own": None, "numbers": None}
    more = {name: plain(value) for name, value in own.items() if name not in HELD}
    return {"own": own_name(mechanism), "numbers": kept_numbers(more, "mechanism")}


def _nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Values by key as sections within sections.

    >>> _nested({"data.name": "digits", "rounds": 1})
    {'data': {'name': 'digits'}, 'rounds': 1}
    """
    nested: dict[str, Any] = {}
    for key, value in settings.items():
        *path, name = key.split(".")
        reduce(lambda section, part: section.setdefault(part, {}), path, nested)[name] = value
    return nested


def _check_rating(rating: object) -> None:
    """Raises ConfigError unless `rating` is a PrivateEvaluation of a metric with a name."""
    kind = type(rating).__name__
    rule = "a PrivateEvaluation, such as discreet.PrivateEvaluation(metric=...)"
    require(isinstance(rating, PrivateEvaluation), "private_evaluation", rule, kind)
    metric = getattr(rating, "metric", None)
    require(isinstance(metric, str), "private_evaluation.metric", "the name of a metric", metric)


def flower_settings(given: Mapping[str, Any]) -> Settings:
    """The settings of a run with one round and Flower's timeout, which `start` replaces. No
    argument is ignored. Raises ConfigError: an argument has the wrong type, is out of range or not
    private, or two contradict each other; TypeError: there is no such argument."""
    _refuse(given)
    mechanism = _mechanism(given)
    rating = given["private_evaluation"]
    own = settings_of_mechanism(mechanism)
    masked = isinstance(mechanism, MaskedGaussian)
    asked = {**given, **own, **_from_outside(mechanism, own)}
    asked["delta"] = 1e-5 if asked["delta"] is None else asked["delta"]
    settings: dict[str, Any] = {key: asked[name] for key, name in GIVEN.items() if name in asked}
    if rating is not None:
        _check_rating(rating)
        rule = "None with mechanism=MaskedGaussian: another app's metrics are not masked"
        require(not masked, "private_evaluation", rule, rating)
        settings["evaluation"] = {
            "kind": "private",
            "every": rating.every,
            "noise_multiplier": rating.noise_multiplier,
        }
    settings |= {
        "rounds": 1,
        "data.name": FLOWER_APP,
        "model.name": FLOWER_APP,
        "server": server_section(
            ServerSGD() if given["server_optimizer"] is None else given["server_optimizer"]
        ),
        "privacy.user.enabled": True,
        "privacy.user.aggregation": SECURE if masked else PLAIN,
        "privacy.user.clip": _clip(asked.get("clipping", _unused_clipping(given["clip_norm"]))),
    }
    require(
        given["on_round"] is None or callable(given["on_round"]),
        "on_round",
        "a function",
        given["on_round"],
    )
    config, _ = parse_asked(_nested(settings))
    least = given["min_available_nodes"]
    rule = f"within [1, population_size={config.population_size}]"
    require(least <= config.population_size, "min_available_nodes", rule, least)
    return config


def _unused_clipping(clip_norm: float | None) -> AdaptiveClipping | FixedClipping:
    """The clipping of a mechanism without a field for it: adaptive if a clip norm is given."""
    return FixedClipping(1.0) if clip_norm is None else AdaptiveClipping(clip_norm)


def _clip(clipping: AdaptiveClipping | FixedClipping) -> dict[str, object]:
    """The section `privacy.user.clip` of the settings."""
    if isinstance(clipping, FixedClipping):
        return {"kind": "fixed", "norm": clipping.norm}
    if not isinstance(clipping, AdaptiveClipping):
        raise ConfigError(
            "clipping must be an AdaptiveClipping or a FixedClipping (got "
            f"{type(clipping).__name__})"
        )
    return asdict(clipping.section())
