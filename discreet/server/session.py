"""A run from its configuration to its last file: what the ServerApp and the simulation have in common."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace

from torch import nn

import discreet
from discreet.data.datasets import load_task
from discreet.data.examples import Task
from discreet.data.partition import BY_CLASS, SAMPLED, task_partition
from discreet.data.targets import CLASSES
from discreet.evaluation.predictions import named_parameters_of, write_indicators, write_predictions
from discreet.evaluation.private_evaluation import Unrated
from discreet.evaluation.private_statistics import normaliser_in, with_constants
from discreet.mechanisms.mechanism_table import masked_mechanism
from discreet.models.model_check import check_fits, num_params_of
from discreet.models.models import flatten_parameters, load_parameters, model_for
from discreet.models.scattering import features_of, split_fixed
from discreet.queries.metrics import evaluate
from discreet.queries.query import EVALUATION, Query, query_of
from discreet.server.deciding_settings import deciding_settings
from discreet.server.guarantees import resolve_noise
from discreet.server.noise_outlook import check_noise
from discreet.server.population_account import PopulationAccount
from discreet.server.run_context import RunContext, close_run, open_run, say_how_it_ended
from discreet.server.run_folder import RunFolder
from discreet.server.run_plan import plan_of
from discreet.server.state import Outcome, State
from discreet.server.training_run import OnRound, Scores, TrainingRun
from discreet.server.transport import Transport
from discreet.settings.privacy import PLANNED, Sizes
from discreet.settings.rules import ConfigError
from discreet.settings.run_config import RunConfig, client_settings
from discreet.training.losses import chance_loss, loss_of, resolved_task

logger = logging.getLogger("discreet")

COUNTED = ("natural", "shards")  # partitions that the data allow only for some numbers of clients


@dataclass(frozen=True, eq=False)
class Session:
    """A run that is ready to start: configuration resolved, data and model there, run folder open.

    Attributes:
      context: what it has in common with runs of other clients.
    """

    context: RunContext
    task: Task
    model: nn.Module

    @property
    def config(self) -> RunConfig:
        """Resolved."""
        return self.context.config

    @property
    def folder(self) -> RunFolder:
        """The folder that the run is written to."""
        return self.context.folder

    @property
    def query(self) -> Query | None:
        """The query that clients answer about models; None unless they rate them."""
        return evaluation_query(self.config, self.task)

    @property
    def sizes(self) -> Sizes:
        """Of what is masked under secure aggregation."""
        return Sizes(self.context.state.params.numel(), self.query.length if self.query else 1)

    def evaluation(self) -> Callable[[State], Scores]:
        """Of the model after a round, on the test set, whose fixed features are computed once; says nothing if the run
        has none."""
        if self.config.evaluation.kind != "public":
            nothing = Unrated(self.query.names() if self.query else ())
            return lambda _: nothing
        fixed, model = split_fixed(self.model)
        test = self.task.test if fixed is None else features_of(fixed, self.task.test)
        loss, target = loss_of(self.config.task), self.task.shape.target

        def scores(after: State) -> Scores:
            load_parameters(model, after.params)
            return evaluate(model, test, loss=loss, target=target)

        return scores


def training_run(session: Session, transport: Transport, *, on_round: OnRound | None = None) -> TrainingRun:
    """The rounds of a run that is ready to start, with the clients that `transport` asks."""
    config = session.config
    plan = plan_of(
        config,
        num_params=session.sizes.num_params,
        chance_loss=chance_loss(config.task, session.task),
        query=session.query,
    )
    return TrainingRun(session.context, plan, transport=transport, evaluate=session.evaluation(), on_round=on_round)


def evaluation_query(config: RunConfig, task: Task) -> Query | None:
    """The query that clients answer about models on data of their own; None unless they rate them.

    Raises:
      ConfigError: a metric does not fit what is predicted.
    """
    return query_of(EVALUATION, client_settings(config), task.shape) if config.evaluation.private else None


def check_secure(config: RunConfig) -> None:
    """Raises ConfigError if a real federation would refuse the configuration."""
    if config.seed is not None:
        raise ConfigError("seed must be null in a real federation: noise that can be drawn again protects nobody")


def prepare(config: RunConfig, *, simulated: bool, held: ExitStack, resolved: RunConfig | None = None) -> Session:
    """Everything before the first round; what is wrong is said here, before anything starts. `simulated`: the clients
    are virtual, and have their ledger in the run folder. `held` holds that folder for this process alone.
    `resolved` is the configuration with its noise resolved, if that was done before.

    Raises:
      ConfigError: a setting does not fit the data or the model, or the target can't be reached.
      LedgerError: a run is resumed under other privacy settings, or its ledgers are not all that was spent.
    """
    asked, (config, task) = config, checked(resolved or config)
    seed = config.seed if config.seed is not None else secrets.randbits(31)
    model = model_for(config.model.name, task.shape, seed=seed)
    params = flatten_parameters(model)
    context = open_run(config, asked=asked, params=params, simulated=simulated, held=held)
    return Session(context, task, model)


def checked(config: RunConfig) -> tuple[RunConfig, Task]:
    """The configuration with noise and loss resolved, and its data: all that is checked before a folder is opened.

    Raises:
      ConfigError: a setting does not fit the data or the model, or the target can't be reached.
    """
    asked = config
    try:
        task = load_task(config.data.name, path=config.data.path)
        masked = masked_mechanism(client_settings(config))
        config = resolve_noise(config, PLANNED if masked is None else sizes_of(config, task))
        deciding_settings(config)
        config = with_constants(replace(config, task=resolved_task(config.task, task)), task)
        task = normaliser_in(config).task(task)
        check_fits(config.model.name, task)
        PopulationAccount.of(config)
        check_noise(asked, num_params=num_params_of(config.model.name, task), resolved=config)
        if config.data.partition in COUNTED or (
            task.shape.target.kind != CLASSES and config.data.partition in BY_CLASS
        ):
            task_partition(task, config.data)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    _check_shares(config, len(task.train))
    _check_evaluation(config, task)
    return config, task


def sizes_of(config: RunConfig, task: Task) -> Sizes:
    """Of what the clients of a run on a task mask under secure aggregation."""
    query = evaluation_query(config, task)
    return Sizes(num_params_of(config.model.name, task), 1 if query is None else query.length)


def _check_shares(config: RunConfig, examples: int) -> None:
    for name, wanted in (
        ("num_clients", 0 if config.data.partition == SAMPLED else config.data.num_clients),
        ("examples_per_client", config.data.examples_per_client or 0),
    ):
        if wanted > examples:
            raise ConfigError(f"data.{name} must be at most the {examples} training examples (got {wanted})")


def _check_evaluation(config: RunConfig, task: Task) -> None:
    if config.evaluation.kind == "public" and len(task.test) == 0:
        raise ConfigError("evaluation.kind=public needs a test set, and these data have none: take private, or none")
    if config.operations.predictions and len(task.test) == 0:
        raise ConfigError("operations.predictions=true needs a test set, and these data have none")
    evaluation_query(config, task)


def finish(session: Session, outcome: Outcome) -> None:
    """Writes the model, privacy.json and, last, that the run is over; says how it ended."""
    config, folder = session.config, session.folder
    metadata = {
        "discreet": discreet.__version__,
        "model": config.model.name,
        "data": config.data.name,
        "input_shape": json.dumps(session.task.shape.input_shape),
        "num_classes": str(session.task.shape.num_classes),
        "num_tokens": str(session.task.shape.num_tokens),
        "target": json.dumps(asdict(session.task.shape.target)),
        "normaliser": json.dumps(asdict(normaliser_in(config))),
    }
    close_run(session.context, outcome, named_parameters_of(session.model, outcome.model.params), metadata)
    if config.operations.predictions:
        write_predictions(folder.path)
        write_indicators(folder.path)
    say_how_it_ended(session.context, outcome)
