"""The ServerApp of a project or a checkout, which composes conf/ once, runs the federation and
writes the run folder; and the server's side of the messages to Discreet's clients."""

from __future__ import annotations

import logging
import math
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid import InMemoryGrid
from torch import Tensor

from discreet.flower.grid_transport import GridTransport
from discreet.flower.masked_transport import members_of, transport_of
from discreet.flower.round_messages import Messages, RoundMessages
from discreet.flower.simulated_nodes import set_up_simulation
from discreet.ledger.durable_ledger import LedgerError
from discreet.logs import log_to
from discreet.models.models import frozen_digest
from discreet.protocol.messages import (
    ANSWER,
    EPSILONS,
    EVALUATION,
    NORMALISE,
    OF_DATA,
    PARAMETERS,
    REPLY,
    REQUEST,
    STATISTICS,
    UPDATE,
    MalformedMessage,
    TrainReply,
    TrainRequest,
    VirtualClient,
    all_finite,
    array_of,
    floats_of,
    request_items,
)
from discreet.protocol.run_end import end_run
from discreet.queries.query import query_of
from discreet.run_files.call import Call
from discreet.run_files.resuming import asked_settings
from discreet.run_files.run_folder import change_state, state_of
from discreet.run_files.run_members import RunMembers
from discreet.server.data_questions import answers_by, written_statistics
from discreet.server.model_ratings import answers_of
from discreet.server.resolve import forbid_seed
from discreet.server.run_context import interruptible
from discreet.server.session import Session, finish, normalised, prepare
from discreet.server.training_run import TrainingRun
from discreet.server.transport import Transport
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings

logger = logging.getLogger("discreet")

NO_QUERY: Mapping[str, int] = {}

Strategy = Callable[[Session, Transport], TrainingRun]

OVERRIDES_VARIABLE = "DISCREET_OVERRIDES"


def server_app(bundle: Path, strategy: Strategy) -> ServerApp:
    """The ServerApp of a project, whose conf/ and `strategy` (strategies/dp_fedavg.py) come from
    its bundle."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(grid, context, strategy=strategy, bundle=bundle)

    return app


def serve(grid: Grid, context: Context, *, strategy: Strategy, bundle: Path | None = None) -> None:
    """Serves one run; an early end is reported in one line."""
    log_to(sys.stdout)
    try:
        config, call = config_of(context, bundle=bundle)
        log_to(sys.stdout, log_format=config.operations.log_format)
        run(grid, config, call, strategy=strategy)
    # OSError: a timeout, a full disk, a message that is too large.
    except (ConfigError, LedgerError, OSError) as error:
        end_run(grid, error)


def config_of(context: Context, *, bundle: Path | None = None) -> tuple[Settings, Call]:
    """The configuration of a run; a new one starts from the overrides of the machine
    (DISCREET_OVERRIDES). `bundle`: that of a project, with its own conf/. Raises ConfigError, also
    for a bundle with its own copy of Discreet."""
    if bundle is not None and (bundle / "discreet").exists():
        raise ConfigError(
            "this run brings a package discreet of its own: leave it out of fab-include"
        )
    words = str(context.run_config.get("overrides", ""))
    machine = os.environ.get(OVERRIDES_VARIABLE, "")
    if bundle is None:
        conf = None
    else:
        conf = bundle / "conf"
    return asked_settings(shlex.split(words), defaults=shlex.split(machine), conf=conf)


def run(grid: Grid, config: Settings, call: Call, *, strategy: Strategy) -> None:
    """Trains over a grid and writes the run folder. Raises ConfigError or LedgerError before the
    start; MessagesTooLarge or TimeoutError later, after which the run can be resumed."""
    simulated = isinstance(grid, InMemoryGrid)
    if not simulated:
        forbid_seed(config.seed)
    with ExitStack() as held:
        session = prepare(config, call, simulated=simulated, held=held)
        transport = _transport(grid, session, held)
        with interruptible(session.folder, f"resume=true output_dir={session.folder.path}"):
            if config.statistics.only:
                ask_and_end(session, transport)
                return
            session = normalised(session, lambda: answers_by(transport, session.plan, NORMALISE))
            transport.messages = _messages(session)
            if not simulated:
                transport.members = RunMembers.of(session.plan, session.folder)
            finish(session, strategy(session, transport_of(session.plan, transport)).run())


def _transport(grid: Grid, session: Session, held: ExitStack) -> GridTransport:
    """The transport to nodes; in a simulation to virtual clients, whose ticket is valid until
    `held` closes."""
    plan = session.plan
    folder = session.folder.path
    virtual = list[VirtualClient]()
    if isinstance(grid, InMemoryGrid):
        ticket = set_up_simulation(folder, held, members=members_of(plan))
        where = str(folder), ticket, plan.seed, plan.data.path
        virtual = [VirtualClient(number, *where) for number in range(plan.data.num_clients)]
    return GridTransport(
        grid,
        _messages(session),
        timeout=plan.round_timeout,
        population_size=plan.run.user.population_size,
        virtual=virtual,
        min_nodes=plan.min_nodes,
    )


def _messages(session: Session) -> Messages:
    plan = session.plan
    lengths = {}
    if plan.query:
        lengths[EVALUATION] = answers_of(plan, plan.query).sent
    if plan.run.asks_of_data:
        lengths |= {name: query_of(name, plan.run, session.task.shape).length for name in OF_DATA}
    return partial(own_messages, lengths=lengths, frozen=frozen_digest(session.model))


def ask_and_end(session: Session, transport: Transport) -> None:
    """Asks for `statistics.of`. A run can resume in the same folder."""
    plan = session.plan
    folder = session.folder
    text = written_statistics(
        session.context, session.task, answers_by(transport, session.plan, STATISTICS)
    )
    for line in text.splitlines():
        logger.info("%s", line)
    plan = plan.changed(statistics=replace(plan.run.statistics, only=False))
    folder.write_config(plan.settings, device=session.context.device)
    done = state_of(folder) == "finished"
    change_state(
        folder,
        "finished" if done else "stopped",
        None if done else "statistics.only=true: no round is begun",
    )


def own_messages(
    asked: TrainRequest,
    params: Tensor,
    *,
    lengths: Mapping[str, int] = NO_QUERY,
    frozen: str | None = None,
) -> RoundMessages:
    """The messages of one round to clients of Discreet; the parameters are encoded once.

    Args:
      lengths: lengths of query answers, by name of the query.
      frozen: the digest of the model's frozen values.
    """
    asked, work, parameters = replace(asked, frozen=frozen), asked.work, parameters_record(params)
    if work.trains:
        num_params = params.numel()
    else:
        num_params = 0
    if work.query:
        answer_size = lengths[work.query]
    else:
        answer_size = 0
    return RoundMessages(
        MessageType.TRAIN,
        max(1, num_params + answer_size),
        request=lambda client: encode_request(replace(asked, virtual=client), parameters),
        reply=partial(
            decode_reply, round_number=asked.round, num_params=num_params, answer_size=answer_size
        ),
    )


def parameters_record(params: Tensor) -> ArrayRecord:
    """Parameters (num_params,) as one array, which is encoded once for any model."""
    return ArrayRecord({PARAMETERS: array_of(params)})


def encode_request(request: TrainRequest, parameters: ArrayRecord) -> RecordDict:
    """The content of a training message. `parameters` is shared by all messages of a round."""
    return RecordDict({PARAMETERS: parameters, REQUEST: ConfigRecord(dict(request_items(request)))})


def decode_reply(
    content: RecordDict, *, round_number: int, num_params: int, answer_size: int = 0
) -> TrainReply:
    """A client's reply, checked before anything is computed from it. `answer_size`: length of its
    answer, 0 for none. Raises MalformedMessage: another round, a missing or additional part, a
    wrong shape or dtype, a value that is not finite, a bit that is not a bit, or an epsilon that is
    not a number of at least 0. A client that sends such a reply counts as zero, and neither noise
    nor denominator change."""
    numbers = content.get(REPLY)
    arrays = content.get(UPDATE)
    if (
        not isinstance(numbers, MetricRecord)
        or not isinstance(arrays, ArrayRecord)
        or list(arrays) != [UPDATE]
    ):
        raise MalformedMessage("the reply does not hold exactly one update and its numbers")
    if numbers.get("round") != round_number:
        raise MalformedMessage(f"the reply is for round {numbers.get('round')}, not {round_number}")
    below = numbers.get("below")
    if not isinstance(below, int) or below not in (0, 1):
        raise MalformedMessage(f"the bit must be 0 or 1 (got {below})")
    update = _vector(arrays, UPDATE, num_params)
    answer = None
    if answer_size:
        answered = content.get(ANSWER)
        if not isinstance(answered, ArrayRecord) or list(answered) != [ANSWER]:
            raise MalformedMessage("the reply does not hold the answer to what was asked")
        answer = _vector(answered, ANSWER, answer_size)
    spent = [_epsilon(numbers.get(name), name) for name in EPSILONS]
    return TrainReply(round_number, update, bool(below), *spent, answer=answer)


def _vector(arrays: ArrayRecord, name: str, size: int) -> Tensor:
    values = floats_of(arrays[name], name)
    if values.shape != (size,):
        raise MalformedMessage(f"the {name} must have the shape ({size},), got {values.shape}")
    with np.errstate(over="ignore"):
        vector = values.astype(np.float32)  # a copy, as the memory of a message is read-only
    if not all_finite(vector):
        raise MalformedMessage(f"the {name} holds NaN, infinity, or values beyond float32")
    return torch.from_numpy(vector)


def _epsilon(value: object, name: str) -> float:
    if not isinstance(value, int | float) or math.isnan(value) or value < 0:
        raise MalformedMessage(f"{name} must be a number of at least 0 (got {value})")
    return float(value)
