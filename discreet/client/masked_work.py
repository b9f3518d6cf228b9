"""What a node puts into a masked sum, and what it writes down for it: asked for in one stage of a round."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from flwr.app import RecordDict
from numpy.typing import NDArray
from torch import Tensor

from discreet.client.account import Refused
from discreet.client.admission import NO_LEDGER, Account
from discreet.client.client import DPClient
from discreet.client.nodes import client_of
from discreet.client.policy import budgets_of, check_own_count
from discreet.federated.durable_ledger import Charge
from discreet.federated.masked_messages import terms_of
from discreet.federated.messages import TrainRequest, decode_request
from discreet.federated.query import EVALUATION, query_of
from discreet.masking.agreement import Terms
from discreet.privacy.secure_grid import SecureSum
from discreet.settings.privacy import EXAMPLE, USER, Sizes

if TYPE_CHECKING:
    from dp_accounting import DpEvent

logger = logging.getLogger("discreet.client")


class Worker(Account, Protocol):
    """A client whose work goes into masked sums, as `DPClient` does it."""

    def vector(self, request: TrainRequest, params: Tensor, sums: SecureSum) -> Tensor:
        """One round's work, int64 (length,), noised. Refused, before anything is computed, as `admit_one` has it."""


@dataclass(frozen=True, eq=False)
class MaskedWork:
    """One round's work of a client whose update nobody sees.

    Attributes:
      client: does it.
      request: what is asked, and under which guarantees.
      params: (num_params,), float32.
      sizes: of what is added up.

    Raises:
      Refused: the run is not one under secure aggregation.
    """

    client: Worker
    request: TrainRequest
    params: Tensor
    sizes: Sizes

    def __post_init__(self) -> None:
        if not self.request.run.masked:
            raise Refused("a masked vector is asked for, and the train request has aggregation=plain")

    @classmethod
    def read(cls, content: RecordDict, node_config: Mapping[str, object]) -> MaskedWork:
        """Of a message.

        Raises:
          MalformedMessage, Refused, LedgerError, ConfigError: as `client_of`, and as the class.
        """
        request, params = decode_request(content)
        client = client_of(request, node_config)
        if request.virtual is not None:
            torch.set_num_threads(1)  # a simulation has a process for each core
        return cls(client, request, params, _sizes(request, params, client))

    @cached_property
    def sums(self) -> SecureSum:
        """What is added up, by the client's own count."""
        return self.request.run.secure_sum(self.sizes)

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
        return terms_of(run, self.request.run, self.sums)

    def vector(self) -> NDArray[np.int64]:
        """The clipped update, the bit and the answer on the grid, with this client's share of the noise: (length,).

        Raises:
          Refused: what the sum would cost passes a budget, or the policy forbids the work: nothing is computed.
        """
        self._check()
        values: NDArray[np.int64] = self.client.vector(self.request, self.params, self.sums).numpy()
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
            raise Refused(NO_LEDGER)
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
