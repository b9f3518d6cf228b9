"""The work that a request asks of a client. It is read once, after the owner's allow-list was
checked for every name in the request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from discreet.mechanisms.mechanism import CLIENTS, SERVER, Mechanism
from discreet.mechanisms.mechanism_table import mechanisms_of
from discreet.protocol.messages import TrainRequest
from discreet.settings.client_settings import ClientSettings
from discreet.settings.privacy import USER
from discreet.training.local_training import LocalSettings, settings_without_noise


@dataclass(frozen=True, eq=False)
class Work:
    """The work that a request asks of a client. Policy, admission and client use this, and never
    look up mechanisms in the settings.

    Attributes:
      request: the round, its clip norm, and the client's number in a simulation.
      run: the settings of the run, the same in every round.
      mechanisms: the run's enabled mechanisms, by guarantee.
      training: the settings of local training without noise; None: nothing is trained, and no
        update leaves.
      query: the name of the query that the client answers; empty for none.
      at_server: the mechanism whose releases are charged to the server's ledger; None if only
        clients add noise.
      is_charged: True if a client's own ledger pays for something.
      has_own_noise: True if clients draw the noise on their ratings themselves.
    """

    request: TrainRequest
    run: ClientSettings
    mechanisms: Mapping[str, Mechanism]
    training: LocalSettings | None
    query: str
    at_server: Mechanism | None
    is_charged: bool
    has_own_noise: bool


def work_of(request: TrainRequest, mechanisms: Mapping[str, Mechanism] | None = None) -> Work:
    """The work of a request whose names are allowed: one that this process has made, or that was
    read with the owner's allow-list. `mechanisms`: those of the run, if they are made already."""
    run = request.run
    asked = request.work
    if mechanisms is None:
        mechanisms = mechanisms_of(run)
    at_server = None
    is_charged = False
    for mechanism in mechanisms.values():
        is_charged = is_charged or CLIENTS in mechanism.charged_at
        if SERVER in mechanism.charged_at:
            at_server = mechanism
    has_own_noise = run.evaluation.private and bool(mechanisms) and USER not in mechanisms
    if asked.trains:
        training = settings_without_noise(run.training, run.task)
    else:
        training = None
    return Work(
        request, run, mechanisms, training, asked.query, at_server, is_charged, has_own_noise
    )
