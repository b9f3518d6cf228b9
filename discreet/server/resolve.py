"""Settings become a plan: data and model are loaded, and every number is decided."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import torch

from discreet.data.datasets import load_task
from discreet.data.description import read_description
from discreet.data.examples import SHAPES, Task, normalised_task
from discreet.data.folder import SCALE
from discreet.data.partition import BY_CLASS, SAMPLED, client_examples_of
from discreet.data.site_agreement import agreed_of
from discreet.data.targets import CLASSES, FolderError
from discreet.data.text import pretrained_folder
from discreet.planning.constant_guess import constant_guess
from discreet.planning.noise_outlook import check_noise
from discreet.planning.plan import Plan, check_cost, resolve_noise
from discreet.protocol.messages import EVALUATION
from discreet.queries.query import query_of, shape_of_data
from discreet.server.metric_check import check_metrics
from discreet.server.model_check import check_fits
from discreet.server.population_account import PopulationAccount
from discreet.server.rising import check_rising
from discreet.server.spread import spread_of
from discreet.server.table_rule import linear_model, with_clip_norm, with_step
from discreet.settings.data import FOLDER, DataConfig, NormaliserConfig, StatisticsConfig
from discreet.settings.privacy import PLANNED, PrivacyConfig, Sizes
from discreet.settings.rules import ConfigError, require
from discreet.settings.settings import Settings, client_settings
from discreet.settings.training import HF, TaskConfig
from discreet.training.losses import rating_loss_of, resolved_task

# partitions that the data allow only for certain numbers of clients
COUNTED = ("natural", "owners", "shards", "site")


def resolve(
    settings: Settings, decided: PrivacyConfig | None = None, *, resumed: bool = False
) -> tuple[Plan, Task]:
    """The plan of a run, and its data, checked before a folder is opened. `decided`: the guarantees
    with their noise, if a target has chosen it already. ConfigError: a setting does not fit the
    data or the model, or the target can't be reached."""
    try:
        task = load_task(settings.data.name, path=settings.data.path)
        _check_weights(settings.model.name, settings.data)
        config = _with_facts(settings, task, resumed=resumed)
        task = normalised_task(task, config.normaliser)
        plan = _decided(config, task, asked=settings, privacy=decided)
        PopulationAccount.of(plan)
        check_cost(plan)
        if not resumed:
            check_noise(plan, lambda rounds: _of_rounds(plan, settings, rounds))
        _check_partition(config.data, task)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    _check_examples(plan, task)
    return plan, task


def _decided(
    config: Settings, task: Task, *, asked: Settings, privacy: PrivacyConfig | None
) -> Plan:
    """The plan, with the noise that `privacy` has or that a target chooses."""
    num_params = check_fits(config.model, task)
    check_rising(config.model.name, task)
    linear = linear_model(config, task)
    if privacy is not None:
        config = replace(config, privacy=privacy)
    config = with_clip_norm(config, linear)
    run = client_settings(config)
    if run.evaluation.kind != "none":
        check_metrics(run.evaluation.metrics, task.shape)
    query = None
    if run.evaluation.private:
        query = query_of(EVALUATION, run, task.shape)
    sizes = PLANNED
    if run.masked:
        sizes = Sizes(num_params, query.length if query else 1)
    if privacy is None:
        config = resolve_noise(config, sizes)
    plan = Plan(
        config,
        asked,
        num_params=num_params,
        query=query,
        chance_loss=chance_loss(config.task, task),
        constant=constant_guess(task, config.task),
        linear=None if linear is None or linear.products else linear,
    )
    return with_step(plan)


def _of_rounds(plan: Plan, asked: Settings, rounds: int) -> Plan:
    """The plan for a number of rounds, with the noise computed anew."""
    settings = resolve_noise(replace(asked, rounds=rounds))
    user = replace(settings.privacy.user, clip=plan.clip)
    settings = replace(settings, privacy=replace(settings.privacy, user=user))
    return replace(plan, settings=settings, asked=None)


def _check_partition(data: DataConfig, task: Task) -> None:
    """Raises ValueError if the data can't be dealt to the number of clients."""
    by_class = task.shape.target.kind != CLASSES and data.partition in BY_CLASS
    if data.partition in COUNTED or by_class:
        client_examples_of(task, data)


def _check_examples(plan: Plan, task: Task) -> None:
    """Raises ConfigError if there are too few examples to train on, or none to test on."""
    data = plan.data
    examples = len(task.train)
    dealt = {"num_clients": 0 if data.partition == SAMPLED else data.num_clients}
    for name, wanted in (dealt | {"examples_per_client": data.examples_per_client or 0}).items():
        require(
            wanted <= examples, f"data.{name}", f"at most the {examples} training examples", wanted
        )
    for name, needed, without in (
        (
            "evaluation.kind=public",
            plan.run.evaluation.kind == "public",
            "evaluation.kind=private, by which clients rate the model, or evaluation.kind=none",
        ),
        ("operations.predictions=true", plan.predictions, "operations.predictions=false"),
    ):
        if needed and not len(task.test):
            raise ConfigError(
                f"{name} needs a test set, but these data have none: make one with `discreet data "
                f"split`, or write {without}"
            )


def _check_weights(name: str, data: DataConfig) -> None:
    """Raises FolderError unless a transformer is the one whose tokenizer encoded the texts, which
    is also the one that nodes load."""
    if name.startswith(HF):
        if data.name == FOLDER and data.path:
            known = read_description(Path(data.path)).model
        else:
            known = None
        if known != f"{HF}{pretrained_folder(name)}":
            raise FolderError(
                f"model.name: {name} must be the model of data.toml in data.path, which is {known}"
            )


def forbid_seed(seed: int | None) -> None:
    """Raises ConfigError if a real federation has a seed."""
    if seed is not None:
        raise ConfigError(
            "seed must be null in a real federation: noise that can be drawn again protects nobody"
        )


def with_range(asked: StatisticsConfig, data: str, path: str | None) -> StatisticsConfig:
    """The requested statistics. Unless the range is given, it is the public range of all inputs, as
    a model reads them, that the data declare; there is no range if they declare none."""
    shape = SHAPES.get(data)
    declared = None
    if data == FOLDER and path is not None:
        description = read_description(Path(path).expanduser().resolve())
        if description.low is not None or description.columns:
            declared = SCALE
    elif shape is not None and not shape.num_tokens:
        declared = shape.scale
    if asked.low is not None or declared is None:
        return asked
    return replace(asked, low=declared[0], high=declared[1])


def _with_facts(settings: Settings, task: Task, *, resumed: bool) -> Settings:
    """The settings with what data decide: the task, the public range of statistics, and the
    normaliser of inputs."""
    of_task = resolved_task(settings.task, task)
    data = settings.data
    statistics = with_range(settings.statistics, data.name, data.path)
    normaliser = settings.normaliser
    if data.normalise == "none" and normaliser.means is not None:
        raise ConfigError(
            "normaliser.means must be omitted with data.normalise=none, which does not use them"
        )
    if data.normalise != "none" or statistics.only:
        normaliser = _normaliser(settings, statistics, task, resumed=resumed)
    described = replace(data, agreed=_agreed(data, task))
    return replace(
        settings, task=of_task, data=described, statistics=statistics, normaliser=normaliser
    )


def _agreed(data: DataConfig, task: Task) -> list[str] | None:
    """The description of the table, by digests: nodes with another one refuse. ConfigError: other
    ones are given."""
    if task.description is None:
        found = None
    else:
        found = agreed_of(task.description)
    if data.agreed not in (None, found):
        raise ConfigError(
            "data.agreed must be omitted: it follows from data.path, and differs from it"
        )
    return found


def _normaliser(
    settings: Settings, statistics: StatisticsConfig, task: Task, *, resumed: bool
) -> NormaliserConfig:
    """The normaliser of `data.normalise=public` or `spread` unless it is given: the middle and half
    width of the public range, or `spread_of` the data. ConfigError: inputs can't be normalised in
    this way."""
    given = settings.normaliser
    kind = settings.data.normalise
    if kind != "none" and settings.model.name == "scattering":
        raise ConfigError(
            "data.normalise must be none with model.name=scattering, whose transform reads plain "
            "pixels"
        )
    shape = shape_of_data(statistics, task.shape)
    if given.means is not None and len(given.means) != shape.columns:
        rule = f"{shape.columns} numbers, one per column"
        raise ConfigError(f"normaliser.means must be {rule} (got {len(given.means)})")
    if kind == "private" and given.means is not None and not resumed:
        raise ConfigError(
            "normaliser.means must be omitted with data.normalise=private: clients are "
            "asked for them"
        )
    if given.means is not None or kind not in ("public", "spread"):
        return given
    if kind == "spread":
        return _spread(task)
    middle = (shape.low + shape.high) / 2
    half = (shape.high - shape.low) / 2
    return NormaliserConfig([middle] * shape.columns, [half] * shape.columns)


def _spread(task: Task) -> NormaliserConfig:
    try:
        return spread_of(task.description, task.shape.input_shape[0])
    except ValueError as error:
        raise ConfigError(str(error)) from error


def chance_loss(settings: TaskConfig, task: Task) -> float:
    """The mean loss on the public test set of a model whose outputs are all 0: equal chances for
    every class or label, or the middle of every range. It is log(classes) for cross entropy without
    weights, and infinity without a test set."""
    if not len(task.test):
        return math.inf
    loss = rating_loss_of(settings)
    total = 0.0
    for targets in torch.split(task.test.targets, 1024):
        outputs = torch.zeros(len(targets), *task.shape.output_shape, dtype=torch.float64)
        total += float(loss(outputs, targets if task.shape.num_classes else targets.double()).sum())
    return total / len(task.test)
