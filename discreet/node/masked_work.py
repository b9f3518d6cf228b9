"""A client's work under secure aggregation: requested in one stage of a masked sum, and charged
before it begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray
from torch import Tensor

from discreet.ledger.durable_ledger import Charge
from discreet.masking.node import Release
from discreet.node.account import Accounts, Refused, say_spent
from discreet.node.admission import NO_LEDGER
from discreet.node.nodes import client_of
from discreet.node.policy import ClientPolicy, budgets_of, check_clipped, check_own_count
from discreet.node.work import Work, check_names, work_of
from discreet.privacy.secure_grid import SecureSum
from discreet.protocol.messages import TrainRequest, decode_request
from discreet.settings.adjacency import USER


@dataclass(eq=False)
class MaskedWork:
    """A client's work in one round of a masked sum.

    Attributes:
      asked: the requested work, with the mechanisms for the sizes of the sum.
      accounts, policy, data_owner: as `discreet.node.client.Client` has them.
      work: returns the client's noised vector, int64 (length,), as `Client.vector` does; Refused is
        raised before it calls its second argument, which is before anything is computed.
      sums, guarantee: the masked sum, by the client's own count, and the guarantee that it is
        charged to.
    """

    asked: Work
    accounts: Accounts | None
    policy: ClientPolicy
    data_owner: str
    work: Callable[[SecureSum, Release], Tensor]

    def __post_init__(self) -> None:
        for mechanism in self.asked.mechanisms.values():
            vector = mechanism.participation.vector
            if vector is not None and self.asked.terms.promise.sums is not None:
                self.sums = vector
                self.guarantee = mechanism.guarantee
                if self.guarantee == USER and self.request.work.trains:
                    check_clipped(self.request.clip_norm)
                return
        raise Refused("a masked vector is requested, but the train request has aggregation=plain")

    @classmethod
    def read(
        cls, content: RecordDict, node_config: Mapping[str, object], policy: ClientPolicy
    ) -> MaskedWork:
        """The work that a message requests of a node with this policy; errors as in
        `client_of`."""
        allowed = partial(check_names, node_config=node_config)
        request, params = decode_request(content, allowed=allowed)
        asked = work_of(request)
        client = client_of(asked, node_config, policy=policy)
        asked = asked.sized(params.numel(), client.shape)
        return cls(
            asked,
            client.accounts,
            client.policy,
            client.data_owner,
            partial(client.vector, asked, params),
        )

    @property
    def request(self) -> TrainRequest:
        """The request of the message, as received."""
        return self.asked.request

    def vector(self, begin: Release) -> NDArray[np.int64]:
        """The client's vector (length,). If a budget or the policy forbids it, Refused is raised
        before anything is computed or charged."""
        self._check()
        values: NDArray[np.int64] = self.work(self.sums, begin).numpy()
        return values

    def release(self) -> None:
        """Charges the sum to this client's own ledger. Refused: a budget would be exceeded."""
        assert self.accounts is not None
        while not self.accounts.write([self._check()]):
            # another run charged the ledger meanwhile, so the budgets are checked again
            pass

    def _check(self) -> Charge:
        """The charge, checked against the budgets of the run and of the owner. Refused: it would
        exceed one."""
        if self.accounts is None:
            raise Refused(NO_LEDGER)
        event = self.sums.event_of(
            trains=self.request.work.trains, rates=bool(self.request.work.query)
        )
        check_own_count(self.policy, event)
        charge = Charge(self.request.round, self.guarantee, self.account, event)
        self.accounts.after([charge], budgets_of(self.policy, self.asked, [charge]))
        return charge

    @property
    def account(self) -> str:
        """The account of the unit that the sum protects."""
        return self.asked.terms.account(self.guarantee, self.data_owner)

    def report(self, size: int) -> None:
        """Logs the size of the masked vector that has left, and this client's spending by its own
        account."""
        if self.request.virtual is not None or self.accounts is None:
            return
        spent = {
            self.guarantee: self.accounts.epsilon(self.accounts.spent(self.guarantee, self.account))
        }
        what = f"a masked vector of {size} bytes ({self.sums.bits} bits a value)"
        say_spent("masked", what, self.request.round, **spent)
