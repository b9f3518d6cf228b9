"""Asks virtual clients in the same process: the same clients and the same round as Flower's runtime, one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from client_app.account import Refused
from client_app.nodes import virtual_client
from discreet.config import RunConfig, config_to_json
from discreet.wire import Order, Reply
from strategies.exchange import Failure
from strategies.session import finish, prepare
from strategies.training import Outcome


LARGE_BATCH = 256  # below it a second thread waits more than it helps


@dataclass(frozen=True)
class InProcessExchange:
    """An `Exchange` that calls each client where it stands."""

    run: RunConfig
    state_folder: str

    def members(self) -> Sequence[int]:
        """Every virtual client."""
        return range(self.run.data.num_clients)

    def ask(
        self, *, round_number: int, params: Tensor, clip_norm: float, cohort: Sequence[int]
    ) -> Iterator[Reply | Failure]:
        """Trains one client after the other."""
        settings = config_to_json(self.run)
        for client_id in cohort:
            order = Order(round_number, clip_norm, settings, client_id, self.state_folder)
            try:
                yield virtual_client(order, self.run).answer(order, params)
            except Refused as refusal:
                yield Failure(client_id, "refused", str(refusal))


def simulate(config: RunConfig) -> Outcome:
    """One whole run in this process.

    Raises:
      ConfigError, LedgerError: before anything has started.
    """
    if config.training.batch_size < LARGE_BATCH:
        torch.set_num_threads(1)
    session = prepare(config)
    exchange = InProcessExchange(session.config, str(session.folder.path))
    outcome = session.training(exchange).run(session.checkpoint)
    finish(session, outcome)
    return outcome
