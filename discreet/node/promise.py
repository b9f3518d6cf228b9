"""What a run promises a client and asks of it, in numbers. Policies are held against these, and not
against the settings of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from discreet.ledger.owner_account import account_name
from discreet.node.account import Budget
from discreet.settings.adjacency import EXAMPLE
from discreet.settings.privacy import OWNER

if TYPE_CHECKING:
    from discreet.mechanisms.client_noise import OwnNoise
    from discreet.training.local_training import LocalSettings


@dataclass(frozen=True)
class Promise:
    """What a door of a node promises of its reply. Each door states it, and `check_promise` asks
    the owner.

    Attributes:
      noises: the least noise multiplier of each guarantee that is on.
      delta: that of the run, or of the app.
      units: further names of a policy's `require` that hold, such as `owner`.
      sums: how many colluding nodes a masked sum allows for, and of how many honest ones it is, if
        nothing else leaves; None if something does.
      turns: the kind of sampling, and the number of groups that take turns.
    """

    noises: Mapping[str, float]
    delta: float
    units: tuple[str, ...] = ()
    sums: tuple[int, int] | None = None
    turns: tuple[str, int] = ("none", 0)


@dataclass(frozen=True)
class ClientTerms:
    """What a run asks of each of its clients and gives them, in numbers: the same in every round.

    Attributes:
      training: the local training, without noise.
      unit: what the example level protects: "example", or "owner".
      most_rows: the most rows of an owner that a step reads; None if the unit is an example.
      promise: the promise of the run, without the noise, which depends on the client's examples.
      budgets: the run's budgets; those at delta 0 are for releases that have a pure epsilon.
      own_noise: the noise that the client draws on its own ratings; None if the server draws it.
      noised_share: the share of examples that it holds out for them; else 0.
    """

    training: LocalSettings
    unit: str
    most_rows: int | None
    promise: Promise
    budgets: tuple[Budget, ...]
    own_noise: OwnNoise | None
    noised_share: float

    def account(self, guarantee: str, data_owner: str = "") -> str:
        """The account in the client's ledger of the unit that a guarantee protects."""
        return account_name(data_owner, by_owner=guarantee == EXAMPLE and self.unit == OWNER)
