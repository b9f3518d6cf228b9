"""The ServerApp: composes the configuration once, runs the federation, writes the run folder."""

from __future__ import annotations

import logging
import os
import secrets
import shlex
import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid
from flwr.superlink.grid import InMemoryGrid

from discreet.config import ConfigError, RunConfig
from discreet.extras import require
from discreet.federated.durable_ledger import LedgerError
from discreet.federated.grid_transport import GridTransport, VirtualClients
from discreet.federated.resuming import run_config
from discreet.federated.server_messages import OwnMessages, parameters_record
from discreet.federated.session import Session, check_secure, prepare
from discreet.federated.simulation_ticket import TICKET
from discreet.federated.transport import MessagesTooLarge
from discreet.logs import log_to
from discreet.settings import client_settings
from strategies.dp_fedavg import dp_fedavg

logger = logging.getLogger("discreet")

OVERRIDES_VARIABLE = "DISCREET_OVERRIDES"
ENDS = (ConfigError, LedgerError, MessagesTooLarge, TimeoutError)  # end a run with one line, not with a traceback


def main(grid: Grid, context: Context) -> None:
    """One run. What is wrong with the configuration is one of ENDS, raised before any client is asked."""
    log_to(sys.stdout)
    config = config_of(context)
    log_to(sys.stdout, log_format=config.operations.log_format)
    run(grid, config)


def leave_ticket(folder: Path) -> str:
    """A new ticket, which lies in the folder of a simulation from now on."""
    ticket = secrets.token_hex(32)
    path = folder / TICKET
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(ticket)
    return ticket


def take_ticket_back(folder: Path) -> None:
    """The simulation is over."""
    (folder / TICKET).unlink(missing_ok=True)


def config_of(context: Context) -> RunConfig:
    """The configuration of a run: a new one starts from the overrides of the machine (DISCREET_OVERRIDES)."""
    machine = os.environ.get(OVERRIDES_VARIABLE, "")
    return run_config(shlex.split(str(context.run_config.get("overrides", ""))), defaults=shlex.split(machine))


def run(grid: Grid, config: RunConfig) -> None:
    """Trains over a grid and writes the run folder.

    Raises:
      ConfigError, LedgerError: before anything has started.
      MessagesTooLarge, TimeoutError: the messages are refused, or too few nodes are connected; what is done is kept,
        and can be resumed.
    """
    simulated = isinstance(grid, InMemoryGrid)
    if not simulated:
        check_secure(config)
    with ExitStack() as held:
        _train(grid, prepare(config, simulated=simulated, held=held), simulated=simulated, held=held)


def _train(grid: Grid, session: Session, *, simulated: bool, held: ExitStack) -> None:
    config = session.config
    virtual = None
    if simulated:
        folder = session.folder.path
        ticket = leave_ticket(folder)
        held.callback(take_ticket_back, folder)
        virtual = VirtualClients(config.data.num_clients, str(folder), ticket, config.seed, config.data.path)
    transport = GridTransport(
        grid,
        OwnMessages(client_settings(config)),
        timeout=config.server.round_timeout,
        population_size=config.population_size,
        virtual=virtual,
        min_nodes=config.sampling.min_nodes,
    )
    strategy = dp_fedavg(session, transport, meanwhile=_metrics(session))
    arrays = parameters_record(session.checkpoint.params)
    strategy.start(grid, arrays, num_rounds=config.rounds, timeout=config.server.round_timeout)


def _metrics(session: Session) -> AbstractContextManager[int | None]:
    operations, budget = session.config.operations, session.config.privacy.user.max_epsilon
    if operations.metrics_port is None:
        return nullcontext()
    require("prometheus_client", extra="deployment", why="operations.metrics_port")
    from discreet.federated.telemetry import serving_metrics

    return serving_metrics(
        session.folder.path, port=operations.metrics_port, host=operations.metrics_host, budget=budget
    )
