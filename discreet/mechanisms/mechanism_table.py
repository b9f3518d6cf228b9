"""The table of mechanisms: the only place that decides which mechanisms a run has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

from discreet.mechanisms import local_dp_sgd, local_noise
from discreet.mechanisms.central_gaussian import CentralGaussian
from discreet.mechanisms.client_noise import OwnNoise
from discreet.mechanisms.local_dp_sgd import LocalDpSgd
from discreet.mechanisms.local_noise import LocalNoise
from discreet.mechanisms.mechanism import CLIENTS, SERVER, Mechanism
from discreet.settings.adjacency import EXAMPLE, USER
from discreet.settings.client_settings import ClientSettings
from discreet.settings.clip_choice import CLIP, ClipConfig
from discreet.settings.later import later
from discreet.settings.own_numbers import check_fields
from discreet.settings.privacy import CORRELATED, PLAIN, PLANNED, SECURE, Sizes
from discreet.settings.rules import ConfigError, require

OF_A_RUN = ("run", "clip", "sizes")  # fields of a mechanism that a run sets
# A function of the settings that clients receive, the rule of the clip norm, and the sizes of the
# release.
Make = Callable[[ClientSettings, ClipConfig, Sizes], Mechanism]


MASKED = "discreet.mechanisms.masked_sums"
OF_USERS: Mapping[str, Make] = {
    PLAIN: CentralGaussian,
    SECURE: later(MASKED, "MaskedGaussian"),
    CORRELATED: later("discreet.mechanisms.correlated_noise", "CorrelatedNoise"),
}
OF_EXAMPLES: Mapping[str, Make] = {PLAIN: LocalDpSgd, SECURE: later(MASKED, "MaskedStep")}


def guarantees_of(
    run: ClientSettings, clip: ClipConfig = CLIP, sizes: Sizes = PLANNED
) -> tuple[Mechanism, ...]:
    """The mechanism of each of the three guarantees, including disabled ones."""
    if run.user.mechanism is None:
        of_users = OF_USERS[run.user.mechanism_kind]
    else:
        of_users = _own(run.user.mechanism, run.user.mechanism_numbers or {})
    makes: tuple[Make, ...] = (of_users, OF_EXAMPLES[run.example.aggregation], LocalNoise)
    return tuple(make(run, clip, sizes) for make in makes)


def _own(name: str, numbers: Mapping[str, object]) -> Make:
    from discreet.models.models import own_builder  # PyTorch is loaded for nobody else

    try:
        make = cast(Make, own_builder(name, setting="privacy.user.mechanism"))
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if getattr(make, "guarantee", None) != USER or SERVER not in getattr(make, "charged_at", ()):
        rule = "a mechanism of guarantee user that is charged at the server"
        require(False, "privacy.user.mechanism", rule, name)
    check_fields(numbers, make, "privacy.user.mechanism_numbers", apart=OF_A_RUN)
    return partial(make, **numbers)


def mechanisms_of(
    run: ClientSettings, clip: ClipConfig = CLIP, sizes: Sizes = PLANNED
) -> dict[str, Mechanism]:
    """The enabled mechanisms of a run, by guarantee."""
    return {
        each.guarantee: each
        for each in guarantees_of(run, clip, sizes)
        if run.gives(each.guarantee)
    }


def accounts_itself(run: ClientSettings) -> bool:
    """True if each client accounts for a guarantee in its own ledger."""
    return any(CLIENTS in each.charged_at for each in mechanisms_of(run).values())


def own_noise(run: ClientSettings, l1_norm: float = 1.0) -> OwnNoise | None:
    """The noise that each client draws on its own answers, for an L1 norm of at most this; None if
    the server draws it. The event does not depend on the norm."""
    if not run.clients_noise_ratings:
        return None
    if run.gives(EXAMPLE):
        return local_dp_sgd.answer_noise(run)
    return local_noise.answer_noise(run, l1_norm)


def server_mechanism(
    run: ClientSettings, clip: ClipConfig = CLIP, sizes: Sizes = PLANNED
) -> Mechanism | None:
    """The mechanism whose releases are charged to the server's ledger; None if only clients add
    noise."""
    found = mechanisms_of(run, clip, sizes).values()
    return next((each for each in found if SERVER in each.charged_at), None)


def round_mechanism(
    run: ClientSettings, clip: ClipConfig = CLIP, sizes: Sizes = PLANNED
) -> Mechanism:
    """The mechanism of the server's rounds."""
    found = server_mechanism(run, clip, sizes)
    if found is not None:
        return found
    of_clients = mechanisms_of(run, clip, sizes)
    if of_clients:
        return next(iter(of_clients.values()))
    from discreet.mechanisms.unprotected import Unprotected

    return Unprotected(run, clip, sizes)
