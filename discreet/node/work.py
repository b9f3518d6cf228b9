"""The work that a request asks of a client, and the owner's allow-list: the code and files that a
server may name to a node.

A server names a model, a mechanism and a task. Discreet's own names are always allowed. A name such
as `module:name`, or a folder, is imported or read only if the owner's `data.toml` has the same
name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from discreet.data.targets import FolderError
from discreet.mechanisms.mechanism import Mechanism
from discreet.mechanisms.mechanism_table import mechanisms_of
from discreet.models.models import MODELS, own_builder
from discreet.node.account import Refused
from discreet.protocol.messages import TrainRequest, VirtualClient
from discreet.protocol.simulated import is_simulations
from discreet.settings.client_settings import ClientSettings
from discreet.settings.data import EvaluationConfig, own_metrics
from discreet.settings.rules import brief
from discreet.settings.training import FLOWER_APP, HF

logger = logging.getLogger("discreet.client")


@dataclass(frozen=True, eq=False)
class Work:
    """The work that a request asks of a client. Policy, admission and client use this, and never
    look up mechanisms in the settings.

    Attributes:
      request: the round, its clip norm, the settings of the run, and the client's number in a
        simulation. The owner allows every name in it, or this process has made it.
      mechanisms: the run's enabled mechanisms, by guarantee.
    """

    request: TrainRequest
    mechanisms: Mapping[str, Mechanism]


def work_of(request: TrainRequest) -> Work:
    """The work of a request whose names are allowed: one that this process has made, or that was
    read with the owner's allow-list."""
    return Work(request, mechanisms_of(request.run))


@dataclass(frozen=True)
class Names:
    """The names outside Discreet that an owner has listed; None if there are none."""

    model: str | None = None
    mechanism: str | None = None
    metrics: tuple[str, ...] = ()


def check_names(request: TrainRequest, *, node_config: Mapping[str, object]) -> None:
    """Refuses a request that names code or a file that the node's owner has not named.

    Nothing is imported before the answer is yes. In a simulation the server and its clients have
    one owner, and every name is allowed.

    Raises:
      Refused: with the setting and its value. If an owner's file can't be read, or a mechanism
        can't be imported, the reason is only logged.
    """
    if _is_simulation(request.virtual, node_config):
        return
    owner = allowed_names(node_config)
    _check_model(request.run.model.name, owner)
    _check_mechanism(request.run, owner)
    _check_metrics(request.run.evaluation, owner)


def allowed_names(node_config: Mapping[str, object]) -> Names:
    """The names in the `data.toml` of the folder that `data` names; none if the node has no such
    folder.

    Raises:
      Refused: the file can't be read.
    """
    if "data" not in node_config:
        return Names()
    from discreet.data.description import read_description

    try:
        description = read_description(Path(str(node_config["data"])))
    except (FolderError, OSError) as error:
        logger.error("%s", error)
        raise Refused("this node's data.toml can't be read; its log says why") from error
    return Names(description.model, description.mechanism, description.metrics)


def _is_simulation(virtual: VirtualClient | None, node_config: Mapping[str, object]) -> bool:
    if virtual is None:
        return False
    return is_simulations(node_config, Path(virtual.state_folder), virtual.ticket)


def _check_model(name: str, owner: Names) -> None:
    if name in MODELS or name in (FLOWER_APP, owner.model):
        return
    if name == HF and (owner.model or "").startswith(HF):  # the server's own folder does not travel
        return
    raise Refused(f"model.name={brief(name)} is not the model that this node's data.toml allows")


def _check_metrics(evaluation: EvaluationConfig, owner: Names) -> None:
    for name in own_metrics(evaluation.metrics):
        if name not in owner.metrics:
            said = "is not one of the metrics that this node's data.toml allows"
            raise Refused(f"evaluation.metrics: {brief(name)} {said}")
        _imported(name, "evaluation.metrics", "metric")


def _check_mechanism(run: ClientSettings, owner: Names) -> None:
    name = run.user.mechanism
    if name is None:
        return
    if name != owner.mechanism:
        said = "is not the mechanism that this node's data.toml allows"
        raise Refused(f"privacy.user.mechanism={brief(name)} {said}")
    _imported(name, "privacy.user.mechanism", "mechanism")


def _imported(name: str, setting: str, what: str) -> None:
    try:
        own_builder(name, setting=setting)
    except ValueError as error:
        logger.error("%s", error)
        raise Refused(f"this node's own {what} can't be imported; its log says why") from error
