"""A run from its configuration to its last file: the common part of the ServerApp and the
simulation."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace

from torch import Tensor, nn

import discreet
from discreet.data.examples import Task, normalised_task
from discreet.mechanisms.sums import Replies
from discreet.models.fixed_part import behind_fixed
from discreet.models.models import (
    flatten_parameters,
    load_parameters,
    model_for,
)
from discreet.models.transformer import save_adapter
from discreet.planning.plan import Plan, check_room
from discreet.planning.run_price import average_units
from discreet.planning.state import Outcome
from discreet.queries.evaluation_result import EvaluationResult
from discreet.queries.metrics import evaluation_on
from discreet.run_files.call import Call
from discreet.run_files.final_results import FILE as TEST_SET
from discreet.run_files.final_results import final_results
from discreet.run_files.metrics_table import unrated
from discreet.run_files.model_description import FILE as MODEL_DESCRIPTION
from discreet.run_files.model_description import model_facts
from discreet.run_files.predictions import named_parameters_of, write_predictions
from discreet.run_files.run_folder import RunFolder
from discreet.run_files.score_intervals import FILE as INTERVALS
from discreet.run_files.score_intervals import final_intervals
from discreet.run_files.shapes import FILE as SHAPES
from discreet.run_files.whole_files import write_json as write_facts
from discreet.server.data_questions import found_normaliser
from discreet.server.resolve import resolve
from discreet.server.rising import rising_shapes
from discreet.server.run_context import RunContext, announce, close_run, open_run, say_how_it_ended
from discreet.server.training_run import OnRound, TrainingRun
from discreet.server.transport import Transport
from discreet.settings.adjacency import USER
from discreet.settings.client_settings import ClientSettings
from discreet.settings.data import SITE, own_metrics
from discreet.settings.privacy import PrivacyConfig
from discreet.settings.rules import ConfigError, settings_json
from discreet.settings.settings import Settings
from discreet.training.losses import rating_loss_of
from discreet.training.units import warning_of_rows

logger = logging.getLogger("discreet")
RANKED = ("natural", SITE)  # partitions that number clients by the rank of their names


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

    def evaluation(self) -> Callable[[int, Tensor], EvaluationResult]:
        """The evaluation of the model after a round on the test set, whose fixed features are
        computed once. It returns nothing if the run has no test set to evaluate on."""
        run = self.plan.run
        query = self.plan.query
        if run.evaluation.kind != "public":
            nothing = unrated(query.names() if query else ())
            return lambda _, __: nothing
        model, test = behind_fixed(self.model, self.task.test)
        return evaluation_on(
            model,
            test,
            loss=rating_loss_of(run.task),
            target=self.task.shape.target,
            own=own_metrics(run.evaluation.metrics),
        )


def training_run(
    session: Session, transport: Transport, *, on_round: OnRound | None = None
) -> TrainingRun:
    """The rounds of a run that is ready to start, with the clients that `transport` asks."""
    return TrainingRun(
        session.context, transport=transport, evaluate=session.evaluation(), on_round=on_round
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
    check_room(plan)
    return open_session(plan, task, call, simulated=simulated, held=held)


def open_session(
    plan: Plan, task: Task, call: Call, *, simulated: bool, held: ExitStack
) -> Session:
    """The session of a plan, with the arguments of `prepare`."""
    if plan.seed is not None:
        seed = plan.seed
    else:
        seed = secrets.randbits(31)
    model = model_for(plan.model, task.shape, seed=seed)
    if simulated:
        _check_turns(plan.run)
        for said in warnings_of(plan.run, task):
            logger.warning("%s", said)
    params = flatten_parameters(model)
    if plan.by_rule and plan.linear is not None:  # the middle of a range, or equal chances
        params = params.zero_()
    context = open_run(plan, call, params=params, simulated=simulated, held=held)
    if simulated:
        announce(context, average_units(plan.run, task.train))
    else:
        announce(context)
    return Session(context, task, model)


def _check_turns(run: ClientSettings) -> None:
    """Raises ConfigError if a virtual client's turn would follow from the others: its number then
    is the rank of its name."""
    if run.user.sampling == "cyclic" and run.data.partition in RANKED:
        raise ConfigError(
            "sampling.kind=cyclic gives turns by clients' numbers, which data.partition="
            f"{run.data.partition} changes with each new client: use another partition, or nodes "
            "with data of their own"
        )


def warnings_of(run: ClientSettings, task: Task) -> list[str]:
    """What a simulation protects less than one may expect of its data."""
    found = warning_of_rows(run, task.train), warning_of_clients(run, task)
    return [said for said in found if said]


def warning_of_clients(run: ClientSettings, task: Task) -> str:
    """A warning for a simulation at user level that deals the rows of an owner to several clients;
    else ""."""
    owner = None if task.description is None else task.description.owner
    owners = task.owners
    dealt = run.data.partition not in (*RANKED, "owners")
    if owner is None or owners is None or not run.gives(USER) or not dealt:
        return ""
    if len(set(owners.tolist())) == len(owners):
        return ""
    return (
        f"privacy.user protects a client, and data.partition={run.data.partition} deals the rows "
        f"of one {owner} to several: with data.partition=natural each {owner} is a client, with "
        "owners at one client"
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
    plan = plan.changed(normaliser=found)
    run.folder.write_config(plan.settings, device=run.device)
    return replace(session, context=replace(run, plan=plan), task=normalised_task(task, found))


def finish(session: Session, outcome: Outcome) -> None:
    """Writes the model, privacy.json and, last, the final status; logs how the run ended."""
    plan = session.plan
    folder = session.folder.path
    shape = session.task.shape
    metadata = {
        "discreet": discreet.__version__,
        "model": plan.model.name,
        "model_settings": settings_json(plan.model),
        "data": plan.run.data.name,
        "input_shape": json.dumps(shape.input_shape),
        "num_classes": str(shape.num_classes),
        "num_tokens": str(shape.num_tokens),
        "target": json.dumps(asdict(shape.target)),
        "normaliser": json.dumps(asdict(plan.run.normaliser)),
    }
    load_parameters(session.model, outcome.model.params)
    # Before anything is read off the model that leaves.
    shapes = rising_shapes(session.task, plan, session.model, outcome.model.round)
    if (results := final_results(session.model, session.task)) is not None:
        write_facts(folder / TEST_SET, results)
    if intervals := final_intervals(session.model, session.task):
        write_facts(folder / INTERVALS, intervals)
    if plan.model.lora.kind != "none":
        save_adapter(session.model, folder)
    tensors = named_parameters_of(session.model, flatten_parameters(session.model).cpu())
    if shapes is not None:
        write_facts(folder / SHAPES, shapes)
    facts = model_facts(plan, shape, tensors, session.task.description)
    write_facts(folder / MODEL_DESCRIPTION, facts)
    close_run(session.context, outcome, tensors, metadata)
    if plan.predictions:
        write_predictions(folder)
    say_how_it_ended(session.context, outcome)
