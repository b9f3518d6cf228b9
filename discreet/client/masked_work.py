"""What a node puts into a masked sum, and what it writes down for it: asked for in one stage of a round."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray
from torch import Tensor

from discreet.client.account import Accounts, Refused
from discreet.client.client import DPClient
from discreet.client.nodes import client_of
from discreet.client.noised_vector import noised_vector
from discreet.client.policy import ClientPolicy, budgets_of, check_own_count
from discreet.client_settings import EXAMPLE, USER
from discreet.federated.durable_ledger import Charge
from discreet.federated.messages import TrainReply, TrainRequest, decode_request
from discreet.federated.query import EVALUATION, query_of
from discreet.masking.agreement import Terms
from discreet.privacy.randomness import RandomSource
from discreet.privacy.secure_grid import SecureSum
from discreet.secure_settings import Sizes

if TYPE_CHECKING:
    from dp_accounting import DpEvent

logger = logging.getLogger("discreet.client")


class Worker(Protocol):
    """A client that trains, with its ledger, its owner's policy and its random numbers, as `DPClient` has them."""

    @property
    def accounts(self) -> Accounts | None: ...

    @property
    def policy(self) -> ClientPolicy: ...

    @property
    def source(self) -> RandomSource: ...

    @property
    def holder(self) -> str: ...

    def answer(self, request: TrainRequest, params: Tensor) -> TrainReply: ...


@dataclass(frozen=True, eq=False)
class MaskedWork:
    """One round's work of a client whose update nobody sees.

    Attributes:
      client: does it.
      request: what is asked, and under which guarantees.
      params: (num_params,), float32.
      sums: what is added up, by the client's own count.
    """

    client: Worker
    request: TrainRequest
    params: Tensor
    sums: SecureSum

    @classmethod
    def read(cls, content: RecordDict, node_config: Mapping[str, object]) -> MaskedWork:
        """Of a message.

        Raises:
          MalformedMessage, Refused, LedgerError, ConfigError: as `client_of`; the run is not one under secure
            aggregation, or a policy does not allow it.
        """
        request, params = decode_request(content)
        if not request.run.masked:
            raise Refused("a masked vector is asked for, and the train request has aggregation=plain")
        client = client_of(request, node_config)
        if request.virtual is not None:
            torch.set_num_threads(1)  # a simulation has a process for each core
        return cls(client, request, params, request.run.secure_sum(_sizes(request, params, client)))

    @property
    def guarantee(self) -> str:
        """Which guarantee the sum is charged to."""
        return EXAMPLE if self.request.run.example.secure else USER

    @property
    def event(self) -> DpEvent:
        """What the sum of this round costs this client, by its own count."""
        return self.sums.event_of(trains=self.request.work.trains, rates=bool(self.request.work.query))

    def terms(self, run: str) -> Terms:
        """Of the masked sums of a run, by the settings that this client was sent: others are refused."""
        user, secure, sums = self.request.run.user, self.request.run.secure, self.sums
        nodes = user.population_size
        counts = (nodes, secure.dropouts, secure.colluding, secure.threshold_of(nodes))
        return Terms(run, *counts, sums.bits, sums.length, sums.variance)

    def vector(self) -> NDArray[np.int64]:
        """The clipped update, the bit and the answer on the grid, with this client's share of the noise: (length,).

        Raises:
          Refused: what the sum would cost passes a budget, or its noise is below the policy's: nothing is computed.
        """
        self._check()
        reply = self.client.answer(self.request, self.params)
        values: NDArray[np.int64] = noised_vector(self.sums, reply, self.request, self.client.source).numpy()
        return values

    def release(self) -> None:
        """Writes what the sum costs to this client's own ledger, before its masked vector leaves.

        Raises:
          Refused: it would pass a budget.
        """
        assert self.client.accounts is not None
        written = False
        while not written:  # if the ledger was charged by another run meanwhile, the budgets are looked at again
            written = self.client.accounts.write([self._check()])

    def _check(self) -> Charge:
        """The charge, held to the budgets of the run and of the owner.

        Raises:
          Refused: it would pass one.
        """
        run, policy, accounts = self.request.run, self.client.policy, self.client.accounts
        if accounts is None:
            raise Refused("this client has no ledger, and spends nothing it can't write down: start it with one")
        check_own_count(policy, self.event)
        charge = Charge(self.request.round, self.guarantee, self.client.holder, self.event)
        accounts.after([charge], budgets_of(policy, run, self.guarantee))
        return charge

    def report(self, size: int) -> None:
        """Says what has left: a masked vector of so many bytes, and what this client has spent by its own account."""
        if self.request.virtual is not None or self.client.accounts is None:
            return
        name = f"epsilon_{self.guarantee}"
        spent = self.client.accounts.epsilon(self.client.accounts.spent(self.guarantee, self.client.holder))
        logger.info(
            "round %d: a masked vector of %d bytes (%d bits a value) sent; spent by this node's own account: epsilon "
            "%s %.4g",
            *(self.request.round, size, self.sums.bits, self.guarantee, spent),
            extra={"fields": {"event": "masked", "round": self.request.round, name: spent, "bytes": size}},
        )


def _sizes(request: TrainRequest, params: Tensor, client: DPClient) -> Sizes:
    if not request.run.evaluation.private:
        return Sizes(params.numel())
    assert client.shape is not None
    return Sizes(params.numel(), query_of(EVALUATION, request.run, client.shape).length)
