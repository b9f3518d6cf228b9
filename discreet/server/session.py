"""A run from its configuration to its last file: the common part of the ServerApp and the
simulation."""

from __future__ import annotations

import json
import logging
import math
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

import discreet
from discreet.data.datasets import load_task
from discreet.data.description import read_description
from discreet.data.examples import Task, normalised_task
from discreet.data.folder import FOLDER
from discreet.data.partition import BY_CLASS, SAMPLED, client_examples_of
from discreet.data.targets import CLASSES, FolderError
from discreet.data.text import pretrained_folder
from discreet.mechanisms.sums import Replies
from discreet.models.fixed_part import behind_fixed
from discreet.models.model_check import check_fits
from discreet.models.models import flatten_parameters, load_parameters, model_for
from discreet.models.transformer import save_adapter
from discreet.planning.constant_guess import constant_guess
from discreet.planning.noise_outlook import check_noise
from discreet.planning.plan import Plan, check_cost, resolve_noise
from discreet.planning.run_price import average_units
from discreet.planning.state import Outcome, State
from discreet.queries.metrics import evaluate
from discreet.queries.query import EVALUATION, query_of
from discreet.queries.scores import EvaluationResult, unrated
from discreet.run_files.final_results import FILE as TEST_SET
from discreet.run_files.final_results import final_results
from discreet.run_files.model_description import FILE as MODEL_DESCRIPTION
from discreet.run_files.model_description import model_facts
from discreet.run_files.predictions import named_parameters_of, write_predictions
from discreet.run_files.run_folder import RunFolder
from discreet.run_files.run_folder import write_json as write_facts
from discreet.server.data_questions import found_normaliser, with_constants
from discreet.server.population_account import PopulationAccount
from discreet.server.run_context import RunContext, close_run, open_run, say_how_it_ended
from discreet.server.training_run import OnRound, TrainingRun
from discreet.server.transport import Transport
from discreet.settings.call import Call
from discreet.settings.data import DataConfig
from discreet.settings.privacy import PLANNED, PrivacyConfig, Sizes
from discreet.settings.rules import ConfigError, require, write_json
from discreet.settings.settings import Settings, client_settings
from discreet.settings.training import HF, TaskConfig
from discreet.training.losses import loss_of, resolved_task
from discreet.training.units import warning_of_rows

logger = logging.getLogger("discreet")

# partitions that the data allow only for certain numbers of clients
COUNTED = ("natural", "owners", "shards")


@dataclass(frozen=True, eq=False)
class Session:
    """A run that is ready to start: data and model are loaded, and the run folder is open."""

    context: RunContext
    task: Task
    model: nn.Module

    @property
    def plan(self) -> Plan:
        return self.context.plan

    @property
    def folder(self) -> RunFolder:
        return self.context.folder

    def evaluation(self) -> Callable[[State], EvaluationResult]:
        """The evaluation of the model after a round on the test set, whose fixed features are
        computed once. It returns nothing if the run has no test set to evaluate on."""
        run = self.plan.run
        query = self.plan.query
        if run.evaluation.kind != "public":
            nothing = unrated(query.names() if query else ())
            return lambda _: nothing
        model, test = behind_fixed(self.model, self.task.test)
        loss = loss_of(run.task)
        target = self.task.shape.target

        def scores(after: State) -> EvaluationResult:
            load_parameters(model, after.params)
            return evaluate(model, test, loss=loss, target=target)

        return scores


def training_run(
    session: Session, transport: Transport, *, on_round: OnRound | None = None
) -> TrainingRun:
    """The rounds of a run that is ready to start, with the clients that `transport` asks."""
    return TrainingRun(
        session.context, transport=transport, evaluate=session.evaluation(), on_round=on_round
    )


def check_secure(seed: int | None) -> None:
    """Raises ConfigError if a real federation has a seed."""
    if seed is not None:
        raise ConfigError(
            "seed must be null in a real federation: noise that can be drawn again protects nobody"
        )


def prepare(
    settings: Settings,
    call: Call,
    *,
    simulated: bool,
    held: ExitStack,
    decided: PrivacyConfig | None = None,
) -> Session:
    """Prepares a run up to its first round; errors as `resolve` and `open_run`. `decided`: the
    guarantees with their noise, if a target has chosen it already."""
    plan, task = resolve(settings, decided, resumed=call.resume)
    return opened(plan, task, call, simulated=simulated, held=held)


def opened(plan: Plan, task: Task, call: Call, *, simulated: bool, held: ExitStack) -> Session:
    """The session of a plan, with the arguments of `prepare`."""
    if plan.settings.seed is not None:
        seed = plan.settings.seed
    else:
        seed = secrets.randbits(31)
    model = model_for(plan.settings.model, task.shape, seed=seed)
    if simulated and (said := warning_of_rows(plan.run, task.train)):
        logger.warning("%s", said)
    context = open_run(
        plan,
        call,
        params=flatten_parameters(model),
        simulated=simulated,
        held=held,
        units=average_units(plan.run, task.train) if simulated else None,
    )
    return Session(context, task, model)


def resolve(
    settings: Settings, decided: PrivacyConfig | None = None, *, resumed: bool = False
) -> tuple[Plan, Task]:
    """The plan of a run, and its data, checked before a folder is opened. ConfigError: a setting
    does not fit the data or the model, or the target can't be reached."""
    try:
        task = load_task(settings.data.name, path=settings.data.path)
        _check_weights(settings.model.name, settings.data)
        asked = replace(settings, task=resolved_task(settings.task, task))
        config = with_constants(asked, task, resumed=resumed)
        task = normalised_task(task, config.normaliser)
        num_params = check_fits(config.model, task)
        run = client_settings(config)
        if run.evaluation.private:
            query = query_of(EVALUATION, run, task.shape)
        else:
            query = None
        if run.masked:
            sizes = Sizes(num_params, query.length if query else 1)
        else:
            sizes = PLANNED
        if decided is None:
            config = resolve_noise(config, sizes)
        else:
            config = replace(config, privacy=decided)
        by_chance = chance_loss(config.task, task)
        constant = constant_guess(task, config.task)
        planned = partial(
            Plan, num_params=num_params, query=query, chance_loss=by_chance, constant=constant
        )
        plan = planned(config, asked=settings)
        PopulationAccount.of(plan)
        check_cost(plan)
        if not resumed:
            check_noise(
                plan, lambda rounds: planned(resolve_noise(replace(settings, rounds=rounds)))
            )
        if config.data.partition in COUNTED or (
            task.shape.target.kind != CLASSES and config.data.partition in BY_CLASS
        ):
            client_examples_of(task, config.data)
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from error
    data = config.data
    examples = len(task.train)
    dealt = {"num_clients": 0 if data.partition == SAMPLED else data.num_clients}
    for name, wanted in (dealt | {"examples_per_client": data.examples_per_client or 0}).items():
        require(
            wanted <= examples, f"data.{name}", f"at most the {examples} training examples", wanted
        )
    for name, needed in (
        ("evaluation.kind=public", run.evaluation.kind == "public"),
        ("operations.predictions=true", plan.settings.operations.predictions),
    ):
        if needed and not len(task.test):
            raise ConfigError(f"{name} needs a test set, but these data have none")
    return plan, task


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


def normalised(session: Session, answers: Callable[[], Replies]) -> Session:
    """The session of a run with `data.normalise=private`, after asking clients for the means and
    deviations of inputs. Any other session, and one that is resumed, is returned unchanged. From
    then on the run folder has means and deviations. ConfigError: asking would exceed the budget; no
    client is asked then."""
    plan = session.plan
    task = session.task
    run = session.context
    if not plan.run.needs_normaliser:
        return session
    found = found_normaliser(run, task, answers())
    plan = replace(plan, settings=replace(plan.settings, normaliser=found))
    run.folder.write_config(plan.settings, device=run.device)
    return replace(session, context=replace(run, plan=plan), task=normalised_task(task, found))


def finish(session: Session, outcome: Outcome) -> None:
    """Writes the model, privacy.json and, last, the final status; logs how the run ended."""
    plan = session.plan
    folder = session.folder.path
    shape = session.task.shape
    metadata = {
        "discreet": discreet.__version__,
        "model": plan.settings.model.name,
        "model_settings": write_json(plan.settings.model),
        "data": plan.run.data.name,
        "input_shape": json.dumps(shape.input_shape),
        "num_classes": str(shape.num_classes),
        "num_tokens": str(shape.num_tokens),
        "target": json.dumps(asdict(shape.target)),
        "normaliser": json.dumps(asdict(plan.run.normaliser)),
    }
    load_parameters(session.model, outcome.model.params)
    if (results := final_results(session.model, session.task)) is not None:
        write_facts(folder / TEST_SET, results)
    if plan.settings.model.lora.kind != "none":
        save_adapter(session.model, folder)
    tensors = named_parameters_of(session.model, outcome.model.params)
    facts = model_facts(plan.settings, shape, tensors, session.task.description)
    write_facts(folder / MODEL_DESCRIPTION, facts)
    close_run(session.context, outcome, tensors, metadata)
    if plan.settings.operations.predictions:
        write_predictions(folder)
    say_how_it_ended(session.context, outcome)


def chance_loss(settings: TaskConfig, task: Task) -> float:
    """The mean loss on the public test set of a model whose outputs are all 0: equal chances for
    every class or label, or the middle of every range. It is log(classes) for cross entropy without
    weights, and infinity without a test set."""
    if not len(task.test):
        return math.inf
    loss = loss_of(settings)
    total = 0.0
    for targets in torch.split(task.test.targets, 1024):
        outputs = torch.zeros(len(targets), *task.shape.output_shape, dtype=torch.float64)
        total += float(loss(outputs, targets if task.shape.num_classes else targets.double()).sum())
    return total / len(task.test)
