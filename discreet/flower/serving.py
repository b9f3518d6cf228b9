"""The ServerApp of a project or a checkout: composes conf/ once, runs the federation, writes the run folder."""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid import InMemoryGrid

from discreet.evaluation.private_answers import answers_by, answers_of, written_statistics
from discreet.flower.grid_transport import GridTransport
from discreet.flower.masked_transport import transport_of
from discreet.flower.server_messages import OwnMessages
from discreet.flower.simulated_clients import set_up_simulation
from discreet.ledger.durable_ledger import LedgerError
from discreet.logs import log_to
from discreet.models.models import frozen_digest
from discreet.protocol.messages import VirtualClient
from discreet.protocol.run_end import end_run
from discreet.queries.query import EVALUATION, NORMALISE, OF_DATA, STATISTICS, query_of
from discreet.server.resuming import asked_settings
from discreet.server.run_context import interruptible
from discreet.server.run_folder import change_state, state_of
from discreet.server.session import Session, check_secure, finish, normalised, prepare
from discreet.server.training_run import TrainingRun
from discreet.server.transport import Transport
from discreet.settings.rules import ConfigError
from discreet.settings.settings import Settings

logger = logging.getLogger("discreet")

Strategy = Callable[[Session, Transport], TrainingRun]

OVERRIDES_VARIABLE = "DISCREET_OVERRIDES"


def server_app(bundle: Path, strategy: Strategy) -> ServerApp:
    """The ServerApp of a project, whose conf/ and `strategy` (strategies/dp_fedavg.py) come from its bundle."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        serve(grid, context, strategy=strategy, bundle=bundle)

    return app


def serve(grid: Grid, context: Context, *, strategy: Strategy, bundle: Path | None = None) -> None:
    """One run; what ends it early is said in one line."""
    log_to(sys.stdout)
    try:
        config = config_of(context, bundle=bundle)
        log_to(sys.stdout, log_format=config.operations.log_format)
        run(grid, config, strategy=strategy)
    except (ConfigError, LedgerError, OSError) as error:  # of the system: no time is left, a full disk, a large message
        end_run(grid, error)


def config_of(context: Context, *, bundle: Path | None = None) -> Settings:
    """The configuration of a run: a new one starts from the overrides of the machine (DISCREET_OVERRIDES). `bundle`: a
    project's, which has a conf/ of its own. Raises ConfigError, also for one with a Discreet of its own."""
    if bundle is not None and (bundle / "discreet").exists():
        raise ConfigError("this run brings a package discreet of its own: leave it out of fab-include")
    words, machine = str(context.run_config.get("overrides", "")), os.environ.get(OVERRIDES_VARIABLE, "")
    conf = None if bundle is None else bundle / "conf"
    return asked_settings(shlex.split(words), defaults=shlex.split(machine), conf=conf)


def run(grid: Grid, config: Settings, *, strategy: Strategy) -> None:
    """Trains over a grid and writes the run folder. Raises ConfigError or LedgerError before anything has started;
    MessagesTooLarge or TimeoutError, after which what is done is kept and can be resumed."""
    simulated = isinstance(grid, InMemoryGrid)
    if not simulated:
        check_secure(config.seed)
    with ExitStack() as held:
        session = prepare(config, simulated=simulated, held=held)
        transport = _transport(grid, session, held)
        with interruptible(session.folder, f"resume=true output_dir={session.folder.path}"):
            if config.statistics.only:
                ask_and_end(session, transport)
                return
            session = normalised(session, lambda: answers_by(transport, session.plan, NORMALISE))
            transport.messages = _messages(session)
            finish(session, strategy(session, transport_of(session.plan, transport)).run())


def _transport(grid: Grid, session: Session, held: ExitStack) -> GridTransport:
    """Asks nodes; in a simulation virtual clients, whose processes find their ticket as long as `held` is open."""
    plan, folder, virtual = session.plan, session.folder.path, list[VirtualClient]()
    if isinstance(grid, InMemoryGrid):
        asked = (str(folder), set_up_simulation(plan.run, folder, held), plan.seed, plan.data_path)
        virtual = [VirtualClient(number, *asked) for number in range(plan.run.data.num_clients)]
    return GridTransport(
        grid,
        _messages(session),
        timeout=plan.round_timeout,
        population_size=plan.run.user.population_size,
        virtual=virtual,
        min_nodes=plan.min_nodes,
    )


def _messages(session: Session) -> OwnMessages:
    plan, lengths = session.plan, {}
    if plan.query:
        lengths[EVALUATION] = answers_of(plan, plan.query).sent
    if plan.run.asks_of_data:
        lengths |= {name: query_of(name, plan.run, session.task.shape).length for name in OF_DATA}
    return OwnMessages(plan.run, lengths, frozen=frozen_digest(session.model))


def ask_and_end(session: Session, transport: Transport) -> None:
    """Asks for `statistics.of`. The folder is one that a run can go on in."""
    plan, folder = session.plan, session.folder
    text = written_statistics(session.context, session.task, answers_by(transport, session.plan, STATISTICS))
    for line in text.splitlines():
        logger.info("%s", line)
    folder.write_config({**plan.written, "statistics": {**plan.written["statistics"], "only": False}})
    done = state_of(folder) == "finished"
    change_state(folder, "finished" if done else "stopped", None if done else "statistics.only=true: no round is begun")
