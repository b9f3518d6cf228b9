"""A sum of clients' noised vectors that nobody has read yet: what a round under secure aggregation is given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from discreet.federated.messages import TRAIN, Work
from discreet.federated.partial_reply import PartialReply
from discreet.federated.transport import Failure, Transport
from discreet.privacy.secure_grid import SecureSum
from discreet.settings.rules import ConfigError


class RoundAbandoned(Exception):
    """Too few clients are left to open a sum, so that nothing was released by this attempt. A round may be tried again.

    Attributes:
      reason: in words.
      failures: of the clients that are missing.
    """

    def __init__(self, reason: str, failures: Sequence[Failure] = ()) -> None:
        super().__init__(reason)
        self.reason, self.failures = reason, tuple(failures)


@dataclass(frozen=True, eq=False)
class Sealed:
    """A sum that nobody has read.

    Attributes:
      open: reads it: the noised total, int64 (length,), centred as `SecureSum.centred` has it. It may raise
        `RoundAbandoned`, if too many are lost while it is opened. What opens it charges it before.
      replies: how many clients' vectors are in it.
      failures: of the clients whose are not.
    """

    open: Callable[[], Tensor]
    replies: int
    failures: tuple[Failure, ...] = ()


@runtime_checkable
class SealedTransport(Protocol):
    """Asks clients for masked vectors."""

    def members(self) -> Sequence[int]:
        """The clients that can be asked now."""

    def ask_sealed(
        self, *, round_number: int, params: Tensor, clip_norm: float, cohort: Sequence[int], work: Work = TRAIN
    ) -> Sealed:
        """The sealed sum of what the clients of the cohort send.

        Raises:
          RoundAbandoned: too few are left.
        """


def check_sealed(transport: object, *, secure: bool) -> None:
    """Raises ConfigError unless a transport makes sealed sums if the run has secure aggregation, and only then."""
    sealed = isinstance(transport, SealedTransport)
    if secure and not sealed:
        raise ConfigError("privacy.user.aggregation=secure is not offered here: the server would read each update")
    if sealed and not secure:
        raise ConfigError("privacy.user.aggregation must be secure for a transport of masked sums (got plain)")


@dataclass(frozen=True, eq=False)
class InTheClear:
    """What masks would hide, added up in the process of a simulation: the same integers, the same noise, no masks.

    Attributes:
      transport: asks virtual clients, whose replies are sums of noised vectors.
      vector: what they are.
      fewest: n - d, of how many clients at least a sum is opened.
    """

    transport: Transport
    vector: SecureSum
    fewest: int

    def members(self) -> Sequence[int]:
        """See `SealedTransport`."""
        return self.transport.members()

    def ask_sealed(
        self, *, round_number: int, params: Tensor, clip_norm: float, cohort: Sequence[int], work: Work = TRAIN
    ) -> Sealed:
        """See `SealedTransport`."""
        asked = self.transport.ask(
            round_number=round_number, params=params, clip_norm=clip_norm, cohort=cohort, work=work
        )
        total, replies, failures = torch.zeros(self.vector.length, dtype=torch.int64), 0, []
        for reply in asked:
            if isinstance(reply, Failure):
                failures.append(reply)
                continue
            assert isinstance(reply, PartialReply)
            total += reply.values
            replies += reply.replies
        if replies < self.fewest:
            raise RoundAbandoned(f"{replies} of {len(cohort)} clients are left, and {self.fewest} must be", failures)
        return Sealed(lambda: self.vector.centred(total), replies, tuple(failures))
