"""The work of a client whose update nobody sees: asked for in one stage of a masked sum, and paid for before it
leaves."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray
from torch import Tensor

from discreet.ledger.durable_ledger import Charge
from discreet.mechanisms.masked_sums import MaskedSum
from discreet.mechanisms.mechanism_table import masked_mechanism
from discreet.node.account import Accounts, Refused
from discreet.node.admission import NO_LEDGER
from discreet.node.nodes import client_of
from discreet.node.policy import ClientPolicy, budgets_of, check_own_count
from discreet.privacy.secure_grid import SecureSum
from discreet.protocol.messages import TrainRequest, decode_request
from discreet.queries.query import EVALUATION, query_of
from discreet.settings.privacy import Sizes

if TYPE_CHECKING:
    from dp_accounting import DpEvent

logger = logging.getLogger("discreet.client")


@dataclass(frozen=True, eq=False)
class MaskedWork:
    """One round's work of a client for a masked sum.

    Attributes:
      request: what is asked, and under which guarantees.
      sizes: of what is added up.
      accounts, policy, data_owner: as `discreet.node.client.Client` has them.
      work: gives the client's vector, int64 (length,), noised, as `Client.vector` does; Refused before anything is
        computed.
    """

    request: TrainRequest
    sizes: Sizes
    accounts: Accounts | None
    policy: ClientPolicy
    data_owner: str
    work: Callable[[SecureSum], Tensor]

    def __post_init__(self) -> None:
        if masked_mechanism(self.request.run) is None:
            raise Refused("a masked vector is asked for, and the train request has aggregation=plain")

    @classmethod
    def read(cls, content: RecordDict, node_config: Mapping[str, object]) -> MaskedWork:
        """The work that a message asks for; errors as `client_of`."""
        request, params = decode_request(content)
        client, sizes = client_of(request, node_config), Sizes(params.numel())
        if request.run.evaluation.private:
            assert client.shape is not None
            sizes = Sizes(params.numel(), query_of(EVALUATION, request.run, client.shape).length)
        work = partial(client.vector, request, params)
        return cls(request, sizes, client.accounts, client.policy, client.data_owner, work)

    @property
    def mechanism(self) -> MaskedSum:
        """The mechanism that masks."""
        mechanism = masked_mechanism(self.request.run, self.sizes)
        assert mechanism is not None
        return mechanism

    @cached_property
    def sums(self) -> SecureSum:
        """The masked sum, by the client's own count."""
        return self.mechanism.vector

    @property
    def guarantee(self) -> str:
        """The guarantee that the sum is charged to."""
        return self.mechanism.guarantee

    @property
    def event(self) -> DpEvent:
        """The cost of this round's sum to this client, by its own count."""
        return self.sums.event_of(trains=self.request.work.trains, rates=bool(self.request.work.query))

    def vector(self) -> NDArray[np.int64]:
        """The client's vector (length,). Nothing is computed if a budget or the policy forbids it: Refused."""
        self._check()
        values: NDArray[np.int64] = self.work(self.sums).numpy()
        return values

    def release(self) -> None:
        """Charges the sum to this client's own ledger, before its masked vector leaves; Refused beyond a budget."""
        assert self.accounts is not None
        while not self.accounts.write([self._check()]):
            pass  # the ledger was charged by another run meanwhile, and the budgets are looked at again

    def _check(self) -> Charge:
        """The charge, held to the budgets of the run and of the owner; Refused if it would pass one."""
        if self.accounts is None:
            raise Refused(NO_LEDGER)
        check_own_count(self.policy, self.event)
        charge = Charge(self.request.round, self.guarantee, self.data_owner, self.event)
        self.accounts.after([charge], budgets_of(self.policy, self.request.run, self.guarantee))
        return charge

    def report(self, size: int) -> None:
        """Logs what has left: a masked vector of so many bytes, and what this client has spent by its own account."""
        if self.request.virtual is not None or self.accounts is None:
            return
        name = f"epsilon_{self.guarantee}"
        spent = self.accounts.epsilon(self.accounts.spent(self.guarantee, self.data_owner))
        logger.info(
            "round %d: a masked vector of %d bytes (%d bits a value) sent; spent by this node's own account: epsilon "
            "%s %.4g",
            *(self.request.round, size, self.sums.bits, self.guarantee, spent),
            extra={"fields": {"event": "masked", "round": self.request.round, name: spent, "bytes": size}},
        )
