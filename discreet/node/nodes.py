"""Makes the client of a request: a virtual client of a simulation, or the node that the process
runs on."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from discreet.data.examples import SHAPES, Examples, TaskShape, normalised_examples
from discreet.data.targets import FolderError
from discreet.mechanisms.mechanism import CLIENTS
from discreet.models.models import model_for
from discreet.node.account import Refused, accounts_of
from discreet.node.client import Client
from discreet.node.policy import TASK, ClientPolicy, check_turn, policy_from
from discreet.node.work import Work
from discreet.privacy.randomness import secure_source, seeded_source
from discreet.protocol.messages import OF_DATA, TrainRequest
from discreet.protocol.simulated import is_simulations
from discreet.settings.client_settings import ClientSettings
from discreet.settings.data import FOLDER, DataConfig, NormaliserConfig
from discreet.settings.rules import brief
from discreet.settings.training import HF, ModelConfig
from discreet.training.losses import check_task
from discreet.training.units import warning_of_rows

if TYPE_CHECKING:
    from discreet.data.partition import ClientExamples

logger = logging.getLogger("discreet.client")


def client_of(
    work: Work,
    node_config: Mapping[str, object],
    node_id: int | None = None,
    *,
    policy: ClientPolicy | None = None,
) -> Client:
    """The client of a request: the virtual client that it names, or the node that received it.

    A virtual client is made only in a simulation: the simulation's ticket must exist, and the node
    configuration may have only the keys that Flower's simulation sets. A node that an owner has set
    up can only be itself.

    Raises:
      Refused: the request names a virtual client, but this is not a simulation; or for a reason of
        `node_client`.
    """
    virtual = work.request.virtual
    if virtual is None:
        return node_client(work, node_config, node_id, policy=policy)
    if not is_simulations(node_config, Path(virtual.state_folder), virtual.ticket):
        raise Refused(
            "the train request names a virtual client, but this node is not part of a simulation"
        )
    torch.set_num_threads(1)  # Flower's simulation has a process for each core
    return virtual_client(work)


def virtual_client(work: Work) -> Client:
    """The virtual client that a simulation's request names. With a seed, its random numbers depend
    on seed, round and client alone."""
    request = work.request
    run = request.run
    virtual = request.virtual
    assert virtual is not None
    number = virtual.client_id
    path = virtual.data_path
    source = secure_source()
    if virtual.seed is not None:
        source = seeded_source(virtual.seed).child("client", request.round, number)
    accounts = None
    if _is_charged(work):
        accounts = accounts_of(run, virtual, {})
    share = share_of(run.data, number, path=path)
    _, dealt = _dealt(run.data, path)
    examples, held_out = _split(request, share, dealt.name(number))
    shape = shape_of(run, path=path)
    model = model_of(_beside_data(run.model, Path(path) if path else None), shape)
    return Client(model, examples, accounts, ClientPolicy(), source, str(number), held_out, shape)


def node_client(
    work: Work,
    node_config: Mapping[str, object],
    node_id: int | None = None,
    *,
    policy: ClientPolicy | None = None,
) -> Client:
    """The client of a SuperNode, with the examples, ledger and policy of its own `--node-config`.
    Fields of a request about virtual clients are not read here. `node_id`: the node's number at the
    server. `policy`: that of the node, if it was read already.

    Raises:
      Refused: the node has no data, or no ledger although one is needed, or its policy can't be
        read.
      ConfigError: the run's loss or class weights do not fit the data.
      LedgerError: its ledger is missing, damaged, or older than what was charged to it.
    """
    request = work.request
    run = request.run
    if "data" in node_config:
        folder = Path(str(node_config["data"]))
    else:
        folder = None
    accounts = None
    if _is_charged(work):
        accounts = accounts_of(run, None, node_config)
    # for a node with its own data any fixed number will do
    number = node_config.get("partition-id", 0)
    if folder is not None and run.data.name == FOLDER:
        _check_agreed(run.data.agreed, folder)
    held = node_examples(run.data, node_config)
    _say_once(warning_of_rows(run, held))
    examples, held_out = _split(request, held, number if isinstance(number, int) else 0)
    if folder is not None and run.data.name == FOLDER:
        from discreet.data.folder import node_table

        shape = node_table(folder, FOLDER)[1]
    else:
        shape = shape_of(run)
    check_task(run.task, shape, run.data.name)
    model = model_of(_beside_data(run.model, folder), shape)
    if policy is None:
        policy = policy_from(node_config)
    if policy.min_groups and request.work.trains:
        check_turn(run.user.groups, request.round, node_id)
    return Client(
        model, examples, accounts, policy, secure_source(), held_out=held_out, shape=shape
    )


def _check_agreed(asked: list[str] | None, folder: Path) -> None:
    """Refuses a run whose table is described otherwise than this node's: the model would mean
    something else here."""
    if asked is None:
        return
    from discreet.data.site_agreement import otherwise, table_digests

    try:
        own = table_digests(folder)
    except FolderError as error:
        logger.error("%s", error)
        raise Refused(
            f"this node's own data do not fit the task {FOLDER}; its log says why"
        ) from error
    if said := otherwise(own, asked):
        raise Refused(said)


def _is_charged(work: Work) -> bool:
    """True if a client's own ledger pays for something."""
    return any(CLIENTS in each.charged_at for each in work.mechanisms.values())


@lru_cache
def _say_once(said: str) -> None:
    if said:
        logger.warning("%s", said)


def _beside_data(model: ModelConfig, folder: Path | None) -> ModelConfig:
    """The model, with the transformer folder that the data.toml in `folder` names: the server's own
    folder is not sent."""
    if folder is None or model.name != HF:
        return model
    from discreet.data.description import read_description

    return replace(model, name=read_description(folder).model or HF)


def _split(
    request: TrainRequest, examples: Examples, name: int
) -> tuple[Examples, Examples | None]:
    """The examples that a client trains on, and those that it holds out; None unless clients rate
    the model. They are normalised if the run says so, except for a question about the raw data."""
    run = request.run
    if request.work.query not in OF_DATA:
        examples = _normalised(examples, run.normaliser)
    if not run.evaluation.private:
        return examples, None
    from discreet.data.partition import split_rows

    trained, held = split_rows(len(examples), name, share=run.evaluation.share)
    return examples.subset(trained), examples.subset(held)


def _normalised(examples: Examples, by: NormaliserConfig) -> Examples:
    try:
        return normalised_examples(examples, by)
    except ValueError as error:
        logger.error("%s", error)
        raise Refused(
            "the run's normaliser does not fit the data of this node; its log says why"
        ) from error


def node_examples(data: DataConfig, node_config: Mapping[str, object]) -> Examples:
    """The examples of a node: those in the folder of its key `data`, or the share of the
    demonstration data with its `partition-id`.

    Raises:
      Refused: the node has no data configured, they do not fit the task, or it was started for
        another number of clients. Faults of the data are only logged, because the server receives
        the reason of a refusal.
    """
    if "data" in node_config:
        from discreet.data.folder import node_table

        try:
            return node_table(Path(str(node_config["data"])), data.name)[0]
        except FolderError as error:
            logger.error("%s", error)
            raise Refused(
                f"this node's own data do not fit the task {data.name}; its log says why"
            ) from error
    number = node_config.get("partition-id")
    count = node_config.get("num-partitions")
    if data.name == FOLDER or not isinstance(number, int) or not isinstance(count, int):
        raise Refused("this node has no data: start it with --node-config 'data=\"/folder\"'")
    if count != data.num_clients:
        raise Refused(
            f"this node is one of {count} clients, the run has data.num_clients={data.num_clients}"
        )
    from discreet.data.images import FROM_HUB

    if data.name in FROM_HUB and data.name != node_config.get(TASK):
        raise Refused(
            "this node does not download data sets that a server names: start it with "
            f"--task {data.name}"
        )
    try:
        return share_of(data, number)
    except (ValueError, OSError) as error:
        logger.error("%s", error)
        raise Refused(
            f"this node can't load its share of {brief(data.name)}; its log says why"
        ) from error


def share_of(data: DataConfig, client_id: int, *, path: str | None = None) -> Examples:
    """One client's examples of the demonstration data."""
    if not 0 <= client_id < data.num_clients:
        raise ValueError(f"client_id must lie in [0, {data.num_clients}), not {client_id}")
    train, dealt = _dealt(data, path)
    return train.subset(torch.from_numpy(dealt.examples(client_id)))


def _dealt(data: DataConfig, path: str | None) -> tuple[Examples, ClientExamples]:
    """The training examples and those of each client, loaded and partitioned once per process."""
    from discreet.data.datasets import load_task
    from discreet.data.partition import client_examples_of

    task = load_task(data.name, path=path)
    return task.train, client_examples_of(task, data)


def shape_of(run: ClientSettings, *, path: str | None = None) -> TaskShape:
    """The shape of the demonstration data."""
    if run.data.name in SHAPES:
        return SHAPES[run.data.name]
    from discreet.data.datasets import load_task

    return load_task(run.data.name, path=path).shape


@lru_cache(maxsize=4)
def model_of(model: ModelConfig, shape: TaskShape) -> nn.Module:
    """The architecture; its parameters come with each request. It is built once per process.
    Refused: the requested model can't be built. The reason is only logged, because it may be a text
    of third-party code."""
    try:
        return model_for(model, shape, seed=0)
    except ValueError as error:
        logger.error("%s", error)
        raise Refused(
            f"this node can't build the model {brief(model.name)} of the run; its log says why"
        ) from error
