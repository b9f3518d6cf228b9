"""The ServerApp: composes the configuration once, runs the federation, writes the run folder."""

from __future__ import annotations

import logging
import shlex
import sys
from typing import TextIO

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from flwr.superlink.grid import InMemoryGrid

from discreet.config import ConfigError, RunConfig, config_to_json, load_config
from discreet.durable_ledger import LedgerError
from strategies.dp_fedavg import DPFedAvg, GridExchange, VirtualClients
from strategies.session import finish, prepare
from strategies.training import Outcome

logger = logging.getLogger("discreet")

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """One run. What is wrong with the configuration is said in one line before any client is asked."""
    log_to(sys.stdout)
    try:
        config = load_config(shlex.split(str(context.run_config.get("overrides", ""))))
        run(grid, config)
    except (ConfigError, LedgerError) as error:
        logger.error("discreet: %s", error)
        raise SystemExit(2) from error


def run(grid: Grid, config: RunConfig) -> None:
    """Trains over a grid and writes the run folder.

    Raises:
      ConfigError, LedgerError: before anything has started.
    """
    simulated = isinstance(grid, InMemoryGrid)
    if config.seed is not None and not simulated:
        raise ConfigError("seed must be null in a real federation: noise that can be drawn again protects nobody")
    session = prepare(config)
    virtual = VirtualClients(config.data.num_clients, str(session.folder.path)) if simulated else None
    exchange = GridExchange(
        grid,
        config_to_json(session.config),
        timeout=config.server.round_timeout,
        virtual=virtual,
        min_nodes=config.sampling.min_nodes,
    )
    strategy = DPFedAvg(session.training(exchange), exchange, checkpoint=session.checkpoint)
    strategy.start(grid)
    finish(session, Outcome(strategy.checkpoint, strategy.stopped))


def log_to(stream: TextIO) -> None:
    """Sends Discreet's log to a stream, one plain line for each message, whatever else is configured."""
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.handlers = [handler]
    logger.setLevel(logging.INFO)
    logger.propagate = False
