"""One full-batch gradient step a round, with Laplace noise that the client adds for one of its examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from discreet.mechanisms.local_noise import EPSILONS, LOCAL_SETTINGS, local_statement
from discreet.mechanisms.mechanism import Statement
from discreet.settings.client_settings import ClientSettings
from discreet.settings.privacy import LOCAL


@dataclass(frozen=True)
class LaplaceStep:
    """One example of one client, from everybody else; nobody but the client itself is trusted."""

    run: ClientSettings
    guarantee: ClassVar[str] = LOCAL
    masked: ClassVar[bool] = False
    at_server: ClassVar[bool] = False
    at_client: ClassVar[bool] = True
    batched: ClassVar[bool] = False
    reported: ClassVar[tuple[str, ...]] = EPSILONS
    deciding: ClassVar[tuple[str, ...]] = LOCAL_SETTINGS
    decided: ClassVar[Mapping[str, object]] = {}
    finite: ClassVar[tuple[str, ...]] = EPSILONS
    grid_slack: ClassVar[None] = None
    only_rdp: ClassVar[bool] = False

    def statement(self, *, account: bool = False) -> Statement:
        how = "one full-batch step, L1 clipping per example, Laplace noise for 2 * eta * C / n"
        unit, uncovered = "one example of one client", ("its number of examples",)
        return local_statement(self.run, unit=unit, mechanism=how, uncovered=uncovered)
