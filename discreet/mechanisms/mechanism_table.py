"""The table of mechanisms: the one place that asks which of them a run has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from discreet.mechanisms.central_gaussian import CentralGaussian
from discreet.mechanisms.client_noise import OwnNoise
from discreet.mechanisms.correlated_noise import CorrelatedNoise
from discreet.mechanisms.local_dp_sgd import LocalDpSgd
from discreet.mechanisms.local_noise import LocalNoise
from discreet.mechanisms.masked_sums import MaskedGaussian, MaskedStep, MaskedSum
from discreet.mechanisms.mechanism import CLIP, Mechanism, ServerMechanism
from discreet.settings.client_settings import ClientSettings
from discreet.settings.privacy import CORRELATED, PLAIN, PLANNED, SECURE, ClipConfig, Sizes
from discreet.settings.rules import ConfigError

Made = Mapping[str, Callable[[ClientSettings], Mechanism]]

OF_USERS: Made = {PLAIN: CentralGaussian, SECURE: MaskedGaussian, CORRELATED: CorrelatedNoise}
OF_EXAMPLES: Made = {PLAIN: LocalDpSgd, SECURE: MaskedStep}


def guarantees_of(run: ClientSettings) -> tuple[Mechanism, Mechanism, Mechanism]:
    """The mechanism of each of the three guarantees, those that are off included."""
    return (
        OF_USERS[run.user.law](run) if run.user.mechanism is None else _own(run.user.mechanism)(run),
        OF_EXAMPLES[run.example.aggregation](run),
        LocalNoise(run),
    )


def _own(name: str) -> Callable[[ClientSettings], Mechanism]:
    from discreet.models.models import own_builder  # PyTorch is loaded for nobody else

    try:
        return cast(Callable[[ClientSettings], Mechanism], own_builder(name, setting="privacy.user.mechanism"))
    except ValueError as error:
        raise ConfigError(str(error)) from error


def mechanisms_of(run: ClientSettings) -> dict[str, Mechanism]:
    """The mechanisms of a run by their guarantees; those that are off are left out."""
    return {each.guarantee: each for each in guarantees_of(run) if each.on}


def accounts_itself(run: ClientSettings) -> bool:
    """True if each client accounts a guarantee in a ledger of its own."""
    return any(each.at_client for each in mechanisms_of(run).values())


def own_noise(run: ClientSettings, l1_norm: float = 1.0) -> OwnNoise | None:
    """The noise that each client draws on its own answers, of at most this L1 norm; None if the server does. The
    event does not depend on the norm."""
    noises = (each.answer_noise(l1_norm) for each in mechanisms_of(run).values()) if run.evaluation.private else ()
    return next((noise for noise in noises if noise is not None), None)


def server_mechanism(run: ClientSettings, clip: ClipConfig = CLIP, sizes: Sizes = PLANNED) -> ServerMechanism | None:
    """The mechanism whose releases the server is charged for; None if clients alone noise what they send."""
    found = next((each for each in mechanisms_of(run).values() if each.at_server), None)
    return None if found is None else cast(Any, type(found))(run, clip, sizes)


def masked_mechanism(run: ClientSettings, sizes: Sizes = PLANNED) -> MaskedSum | None:
    """The mechanism of masked sums; None if the server reads replies."""
    found = server_mechanism(run, sizes=sizes)
    return found if isinstance(found, MaskedSum) else None
