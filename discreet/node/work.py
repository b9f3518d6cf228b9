"""The work that a request asks of a client, and the owner's allow-list: the code and files that a
server may name to a node.

A server names a model, a mechanism and a task. Discreet's own names are always allowed. A name such
as `module:name`, or a folder, is imported or read only if the owner's `data.toml` has the same
name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from discreet.accounting.events import noise_in
from discreet.accounting.privacy_ledger import PrivacyLedger
from discreet.data.targets import FolderError
from discreet.mechanisms.mechanism import Mechanism, releases_of
from discreet.mechanisms.mechanism_table import mechanisms_of, own_noise
from discreet.models.models import MODELS, own_builder
from discreet.node.account import Budget, Refused
from discreet.node.promise import ClientTerms, Promise
from discreet.protocol.messages import (
    EVALUATION,
    NORMALISE,
    STATISTICS,
    TrainRequest,
    VirtualClient,
)
from discreet.protocol.simulated import is_simulations
from discreet.settings.adjacency import GUARANTEES, USER
from discreet.settings.client_settings import ClientSettings
from discreet.settings.data import EvaluationConfig, own_metrics
from discreet.settings.privacy import OWNER, Sizes
from discreet.settings.rules import brief
from discreet.settings.training import FLOWER_APP, HF
from discreet.training.local_training import settings_without_noise

if TYPE_CHECKING:
    from discreet.data.examples import TaskShape
    from discreet.queries.query import Query

logger = logging.getLogger("discreet.client")


def client_terms(run: ClientSettings) -> ClientTerms:
    """The terms of a run."""
    example = run.example
    sums = None
    if run.masked:
        sums = run.secure.colluding, run.secure.summands(run.user.population_size)
    units = (OWNER,) if example.by_owner else ()
    budgets = list[Budget]()
    pure = list[Budget]()
    for name in filter(run.gives, GUARANTEES):
        if epsilon := run.largest_epsilon(name):
            budgets.append(Budget(epsilon, run.delta, name))
        target = run.target_epsilon(name)
        if target and run.terms(name).max_epsilon is None:
            pure.append(Budget(target, 0.0, name))
    noise = own_noise(run)
    return ClientTerms(
        settings_without_noise(run.training, run.task),
        example.unit_name,
        example.most_rows,
        Promise({}, run.delta, units, sums, (run.user.sampling, run.user.groups)),
        (*budgets, *pure),
        noise,
        0.0 if noise is None else run.evaluation.share,
    )


@dataclass(frozen=True, eq=False)
class Work:
    """The work that a request asks of a client. Policy, admission and client use this, and never
    look into the settings of the run.

    Attributes:
      request: the round, its clip norm, the settings of the run, and the client's number in a
        simulation. The owner allows every name in it, or this process has made it.
      mechanisms: the run's enabled mechanisms, by guarantee.
      terms: the run's numbers for each client.
    """

    request: TrainRequest
    mechanisms: Mapping[str, Mechanism]
    terms: ClientTerms

    def declaring(self, num_examples: int) -> Work:
        """The same work for a client whose owner declares its number of examples. Either number is
        a constant, and what it costs is charged: add-or-remove holds with both.

        Raises:
          ConfigError: the number does not fit the run.
        """
        run = self.request.run
        run = replace(run, data=replace(run.data, public_num_examples=num_examples))
        return work_of(replace(self.request, run=run))

    def sized(self, num_params: int, shape: TaskShape | None = None) -> Work:
        """The same work with mechanisms for the sizes of a masked sum. `shape`: that of the data
        which clients rate models on."""
        answer = 0
        if self.request.run.evaluation.private and shape is not None:
            answer = self._query(EVALUATION, shape).length
        sizes = Sizes(num_params, answer)
        return replace(self, mechanisms=mechanisms_of(self.request.run, sizes=sizes))

    def query(self, shape: TaskShape | None) -> Query:
        """The question that a client with data of this shape answers.

        Raises:
          Refused: a run that does not ask this has no plan to pay for it either.
          ConfigError: there is no such question.
        """
        run = self.request.run
        name = self.request.work.query
        asked = {STATISTICS: run.statistics.only, NORMALISE: run.needs_normaliser}
        trains = self.request.work.trains
        if shape is None or (name in asked and (trains or not asked[name])):
            raise Refused(f"this run does not include the query {name} about clients' data")
        return self._query(name, shape)

    def _query(self, name: str, shape: TaskShape) -> Query:
        from discreet.queries.query import query_of  # most messages ask none

        return query_of(name, self.request.run, shape)

    def least_user_noise(self) -> float:
        """The smallest noise multiplier of a run's releases that are charged to the server.

        It is the multiplier of the release's event, so a round with correlated noise counts with
        everything that it reveals, and as one that is made again.

        Raises:
          Refused: an event that has no such number.
        """
        run = self.request.run
        try:
            releases = releases_of(self.mechanisms[USER], run, run.rounds, again=True)
            return min(noise_in(event) for event, _ in releases)
        except ValueError as error:
            raise Refused(
                f"the policy of this client can't be checked against the run: {error}"
            ) from error

    def planned_user_epsilon(self, delta: float) -> float:
        """The user-level epsilon at `delta` after the planned rounds, or the run's budget if that
        is smaller, but never less than the cost of one round. `delta` is at least the run's, so its
        budget holds there."""
        run = self.request.run

        def epsilon(rounds: int) -> float:
            releases = releases_of(self.mechanisms[USER], run, rounds)
            return PrivacyLedger(releases).epsilon(delta, run.accountant)

        budget = run.user.max_epsilon
        if budget is None:
            return epsilon(run.rounds)
        return max(epsilon(1), min(epsilon(run.rounds), budget))


def work_of(request: TrainRequest) -> Work:
    """The work of a request whose names are allowed: one that this process has made, or that was
    read with the owner's allow-list.

    Raises:
      Refused: the run has no such round.
    """
    run = request.run
    # After the last round, a cohort may still be asked to rate the last model.
    if request.round > run.rounds + (not request.work.trains):
        raise Refused(
            f"the train request is for round {request.round}, but the run has rounds={run.rounds}"
        )
    terms = client_terms(run)
    return Work(request, mechanisms_of(run), terms)


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
