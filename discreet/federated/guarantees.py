"""The three guarantees of a run: what each protects, from whom, by which mechanism, and what it does not cover."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from discreet.federated.secure_terms import SecureTerms
from discreet.privacy.calibration import noise_multiplier_for_releases
from discreet.privacy.quantile import default_count_stddev
from discreet.settings.privacy import ADD_OR_REMOVE, EXAMPLE, GUARANTEES, LOCAL, PLANNED, USER, ZERO_OUT, Sizes
from discreet.settings.rules import ConfigError
from discreet.settings.run_config import RunConfig, client_settings
from discreet.settings.training import FLOWER_APP

if TYPE_CHECKING:
    from dp_accounting import DpEvent

__all__ = ["EXAMPLE", "GUARANTEES", "LOCAL", "USER", "ZERO_OUT", "Guarantee", "guarantees_of"]

NOT_COVERED = (
    "the choice of hyperparameters, if private data guided it",
    "timing, traffic and which nodes are connected",
)

ASKED_BEFORE = "; and before the first round a Gaussian of everybody's means and deviations of inputs"

OF_ANOTHER_APP = (
    "the train_config and the initial arrays, which are sent as they are",
    "the data that evaluate_fn works on, which are the server's own",
    "what the clients' code sends elsewhere",
)


@dataclass(frozen=True)
class Guarantee:
    """A guarantee in words; docs/privacy.md says the same at length. `enabled` False: the run gives none of this kind,
    epsilon is infinite.

    Attributes:
      unit, adjacency: what is hidden, and which inputs are neighbours.
      trusted: who must be honest.
      observer: from whom the unit is hidden.
      mechanism, accounting: how, and as which events.
      not_covered: what it does not speak about.
    """

    name: str
    enabled: bool
    unit: str
    adjacency: str
    trusted: str
    observer: str
    mechanism: str
    accounting: str
    not_covered: tuple[str, ...]


def guarantees_of(config: RunConfig) -> tuple[Guarantee, Guarantee, Guarantee]:
    """All three guarantees of a run, those that are off included."""
    return _user(config), _example(config), _local(config)


def _user(config: RunConfig) -> Guarantee:
    clip, secure = f"{config.privacy.user.clip.kind} clip norm", config.privacy.user.secure
    sampling, accounting = _sampled(config)
    # Of another app only its nodes are known: whether one is a person, a device or a hospital is the app's to say.
    foreign = config.model.name == FLOWER_APP
    unit, who = ("everything that one node holds", "node") if foreign else ("all data of one client", "client")
    neighbours = f"replace one {who}" if config.sampling.kind == "fixed" else f"add or remove one {who}"
    terms = SecureTerms.of(config) if secure else None
    mechanism = f"DP-FedAvg with {clip}, {sampling}, Gaussian noise on the sum at the server"
    return Guarantee(
        USER,
        config.privacy.user.enabled,
        unit=unit,
        adjacency=terms.adjacency(who) if terms else neighbours,
        trusted=terms.trusted if terms else "the server",
        observer=terms.observer if terms else "who sees every released model and clip norm, but not who takes part",
        mechanism=(terms.mechanism(clip) if terms else mechanism) + _ratings(config)[0],
        accounting=(terms.accounting("update and bits together, ") if terms else accounting)
        + _ratings(config)[1]
        + (ASKED_BEFORE if config.data.normalise == "private" else ""),
        not_covered=(
            *NOT_COVERED,
            *(terms.not_covered if terms else ("who took part in a round, and how many replied",)),
            *_unamplified(config),
            *(OF_ANOTHER_APP if foreign else _reported(config)),
            "a client with several nodes: one node is taken for one client",
            "earlier runs over the same clients: each run has a ledger of its own"
            if config.privacy.user.account is None
            else "runs over the same clients that did not charge the population's account",
            *_shared_examples(config),
        ),
    )


def _sampled(config: RunConfig) -> tuple[str, str]:
    """How cohorts are drawn, and as which event a round of them is accounted."""
    return {
        "poisson": (
            f"Poisson cohorts, q = {config.sampling_probability:g}",
            "a Poisson-sampled Gaussian a round, update and bits together",
        ),
        "fixed": (
            f"cohorts of {round(config.expected_cohort)} of {config.population_size} without replacement",
            "a Gaussian of half the noise multiplier, sampled without replacement, a round; by RDP",
        ),
        "everyone": (
            "everybody in every round, no amplification",
            "a Gaussian a round, update and bits together",
        ),
    }[config.sampling.kind]


def _unamplified(config: RunConfig) -> tuple[str, ...]:
    sampled = config.sampling.kind != "everyone"
    return ("amplification by sampling, towards who sees which clients are asked",) if sampled else ()


def _reported(config: RunConfig) -> tuple[str, ...]:
    return () if config.privacy.user.secure else ("the epsilons that clients report about their own guarantees",)


def _ratings(config: RunConfig) -> tuple[str, str]:
    """What the ratings by clients add to the mechanism and to the accounting."""
    asked = config.evaluation
    if not asked.private:
        return "", ""
    own, secure = asked.cohort == "own", config.privacy.user.secure
    what = "such a sum" if secure else "a Gaussian"
    rated = "for each rating, by a cohort of its own," if own else "for the last rating"
    joined = "" if own else "in a round that also rates the model its answer too; "
    return (
        f"; clients rate the model on held-out examples of their own every {asked.every} rounds and at the end, each "
        "answer clipped to norm 1, "
        + ("in the same vector" if secure else "Gaussian noise on their sum at the server"),
        f"; {joined}{rated} {what} of noise multiplier {asked.noise_multiplier:g}",
    )


def _shared_step(config: RunConfig) -> Guarantee:
    terms = SecureTerms.of(config)
    return Guarantee(
        EXAMPLE,
        True,
        unit="one example of one client",
        adjacency=ADD_OR_REMOVE,
        trusted=f"{terms.trusted}; and the client itself",
        observer=terms.observer,
        mechanism=terms.shared_step,
        accounting=terms.accounting(),
        not_covered=(
            *NOT_COVERED,
            *terms.not_covered,
            "all examples of one person together, if a client holds several of one person",
            "earlier runs over the same examples, in the server's account: each client's own ledger adds them up",
            *_shared_examples(config),
        ),
    )


def _example(config: RunConfig) -> Guarantee:
    if config.privacy.example.secure:
        return _shared_step(config)
    declared = config.data.public_num_examples
    probability = (
        "batch_size / n"
        if declared is None
        else f"batch_size / public_num_examples = {config.training.batch_size} / {declared}"
    )
    return Guarantee(
        EXAMPLE,
        config.privacy.example.enabled,
        unit="one example of one client",
        adjacency=ZERO_OUT if declared is None else ADD_OR_REMOVE,
        trusted="nobody but the client itself",
        observer="everybody else, the server too",
        mechanism=f"DP-SGD inside the client: Poisson batches with q = {probability}, per-example clipping, "
        f"Gaussian noise on the sum{_own_ratings(config)[0]}",
        accounting=f"a Poisson-sampled Gaussian a local step{_own_ratings(config)[1]}, over every round of every run "
        "in the client's ledger",
        not_covered=(
            *NOT_COVERED,
            *_number_of_examples(declared),
            "all examples of one person together, if a client holds several of one person",
            "that a client took part",
            *_shared_examples(config),
        ),
    )


def _own_ratings(config: RunConfig) -> tuple[str, str]:
    """What it adds to mechanism and accounting that clients rate the model, each with noise of its own."""
    asked = config.evaluation
    if not asked.private:
        return "", ""
    rated = f"every {asked.every} rounds and at the end"
    return (
        f"; the client rates the model {rated} on the m examples that it holds out, with Gaussian noise "
        f"of standard deviation {asked.noise_multiplier:g} / m on its own answer, which one example moves by 1 / m",
        f", and for each answer a Gaussian of noise multiplier {asked.noise_multiplier:g}, added up as if both were "
        "about the same examples",
    )


def _number_of_examples(declared: int | None) -> tuple[str, ...]:
    if declared is not None:
        return ("adding or removing an example, as regards runs without data.public_num_examples in the same ledger",)
    return (
        "the number n of a client's examples, which decides q, the number of steps, and so the epsilon it reports",
        "adding or removing an example: it changes q for all others, and may cost more; see data.public_num_examples",
    )


def _shared_examples(config: RunConfig) -> tuple[str, ...]:
    """A sampled population is for measuring: real people would not hold each other's examples."""
    shared = "the same example at other clients: with data.partition=sampled views overlap, each is counted by itself"
    return (shared,) if config.data.partition == "sampled" else ()


def _local(config: RunConfig) -> Guarantee:
    kind = config.privacy.local.kind
    step = kind == "laplace_step"
    return Guarantee(
        LOCAL,
        kind != "none",
        unit="one example of one client" if step else "all data of one client",
        adjacency="replace",
        trusted="nobody but the client itself",
        observer="everybody else, the server too",
        mechanism={
            "none": "none",
            "gaussian": "the update is clipped in L2, Gaussian noise for 2 * clip_norm at the client",
            "laplace": "the update is clipped in L1, Laplace noise for 2 * clip_norm at the client",
            "laplace_step": "one full-batch step, L1 clipping per example, Laplace noise for 2 * eta * C / n",
        }[kind]
        + _local_ratings(config)[0],
        accounting="a Gaussian or Laplace event a round in which the client takes part"
        f"{_local_ratings(config)[1]}, over every run in its ledger",
        not_covered=(
            *NOT_COVERED,
            "that a client took part",
            *(("its number of examples",) if step else ()),
            *_shared_examples(config),
        ),
    )


def _local_ratings(config: RunConfig) -> tuple[str, str]:
    """What it adds to mechanism and accounting that clients rate the model, with local noise on each answer."""
    asked = config.evaluation
    if not asked.private:
        return "", ""
    return (
        f"; the client rates the model every {asked.every} rounds and at the end, its answer clipped and noised "
        f"the same way for twice its largest norm, with the noise multiplier {asked.noise_multiplier:g}",
        " and another for each answer",
    )


def user_event(config: RunConfig, noise_multiplier: float, *, joined: bool = False, sizes: Sizes = PLANNED) -> DpEvent:
    """What one round costs a client, for the sampling that the configuration runs; `joined`: one whose cohort also
    rates the model."""
    return client_settings(config).user_event(noise_multiplier, joined=joined, sizes=sizes)


def evaluation_event(config: RunConfig, sizes: Sizes = PLANNED) -> DpEvent:
    """What it costs a client if a cohort rates the model, and is asked for nothing else."""
    return client_settings(config).rating_event(config.privacy.user.noise_multiplier, sizes=sizes)


def expected_cohort(config: RunConfig) -> float:
    """The public denominator; of a fixed-size cohort its size."""
    return float(round(config.expected_cohort)) if config.sampling.kind == "fixed" else config.expected_cohort


def user_releases(
    config: RunConfig, noise_multiplier: float, sizes: Sizes = PLANNED
) -> tuple[tuple[DpEvent, int], ...]:
    """All that a whole run costs a client at user level."""
    return client_settings(config).user_releases(noise_multiplier, config.rounds, sizes=sizes)


def resolve_noise(config: RunConfig, sizes: Sizes = PLANNED) -> RunConfig:
    """The configuration with the user-level noise multiplier that its target asks for, and its budget, filled in.

    A target is met by the smallest noise multiplier whose epsilon after the planned rounds is at most the target, and
    becomes the budget unless `max_epsilon` is given. `sizes`: of what is masked under secure aggregation.

    Raises:
      ConfigError: no noise reaches the target.
    """
    if config.privacy.example.secure:
        return _resolve_shared_step(config, sizes)
    user = config.privacy.user
    if not user.enabled or user.target_epsilon is None:
        return config
    try:
        noise_multiplier = noise_multiplier_for_releases(
            user.target_epsilon,
            releases=lambda noise: user_releases(config, noise, sizes),
            delta=config.privacy.delta,
            accountant=config.privacy.accountant,
        )
    except ValueError as error:
        raise ConfigError(f"privacy.user.target_epsilon={user.target_epsilon:g} can't be reached: {error}") from error
    budget = user.max_epsilon if user.max_epsilon is not None else user.target_epsilon
    resolved = replace(user, noise_multiplier=noise_multiplier, target_epsilon=None, max_epsilon=budget)
    return replace(config, privacy=replace(config.privacy, user=resolved))


def _resolve_shared_step(config: RunConfig, sizes: Sizes) -> RunConfig:
    """As `resolve_noise`, of the noise that clients share at example level."""
    example, settings = config.privacy.example, client_settings(config)
    if example.target_epsilon is None:
        return config
    try:
        noise_multiplier = noise_multiplier_for_releases(
            example.target_epsilon,
            releases=lambda noise: ((settings.secure_sum(sizes, noise).event, config.rounds),),
            delta=config.privacy.delta,
            accountant=config.privacy.accountant,
        )
    except ValueError as error:
        raise ConfigError(
            f"privacy.example.target_epsilon={example.target_epsilon:g} can't be reached: {error}"
        ) from error
    budget = example.max_epsilon if example.max_epsilon is not None else example.target_epsilon
    resolved = replace(example, noise_multiplier=noise_multiplier, target_epsilon=None, max_epsilon=budget)
    return replace(config, privacy=replace(config.privacy, example=resolved))


def count_stddev(config: RunConfig) -> float | None:
    """The noise on the count of norms below the clip norm; None with a fixed clip norm. Needs a resolved configuration.

    Raises:
      ConfigError: so little that the bits alone would cost more than the round may.
    """
    user = config.privacy.user
    if user.clip.kind == "fixed":
        return None
    assert user.noise_multiplier is not None
    value = user.clip.count_stddev
    if value is None:
        value = default_count_stddev(config.expected_cohort, noise_multiplier=user.noise_multiplier)
    if user.noise_multiplier > 0 and value <= user.noise_multiplier / 2:
        raise ConfigError(
            f"privacy.user.clip.count_stddev must be above noise_multiplier / 2 = {user.noise_multiplier / 2:g} "
            f"(got {value:g})"
        )
    return value
