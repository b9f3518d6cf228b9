"""Which client a process is: a virtual one of a simulation, or the node that it runs on."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from torch import nn

from discreet.client.account import Accounts, Refused, node_accounts
from discreet.client.client import DPClient
from discreet.client.node_data import NodeDataError, node_table
from discreet.client.policy import ClientPolicy, node_policy
from discreet.federated.durable_ledger import CLIENTS_LEDGER, DurableLedger
from discreet.federated.messages import TrainRequest
from discreet.federated.query import OF_DATA
from discreet.federated.simulation_ticket import is_simulations
from discreet.privacy.randomness import secure_source, seeded_source
from discreet.settings.client_settings import ClientSettings
from discreet.settings.data import DataConfig
from discreet.settings.evaluation import EvaluationConfig
from discreet.tasks.datasets import load_task
from discreet.tasks.description import read_description
from discreet.tasks.examples import SHAPES, Examples, TaskShape
from discreet.tasks.folder import FOLDER
from discreet.tasks.models import OWN, model_for
from discreet.tasks.normalising import normaliser_of
from discreet.tasks.partition import client_examples, split_rows

logger = logging.getLogger("discreet.client")


def client_of(request: TrainRequest, node_config: Mapping[str, object]) -> DPClient:
    """The client that a request is for: the virtual one that it names, or the node that it has come to.

    A virtual client is made only in a simulation: where the simulation's ticket is found, and nothing is configured but
    what Flower's simulation configures. A node that an owner has set up is nobody but itself.

    Raises:
      Refused: the request names a virtual client, and this is no simulation; and as `node_client`.
    """
    virtual = request.virtual
    if virtual is None:
        return node_client(request, node_config)
    if not is_simulations(node_config, Path(virtual.state_folder), virtual.ticket):
        raise Refused("the train request names a virtual client, and this node is no simulation's")
    return virtual_client(request)


def virtual_client(request: TrainRequest) -> DPClient:
    """The virtual client that a simulation's request names. With a seed it draws by seed, round and client alone."""
    run, virtual = request.run, request.virtual
    assert virtual is not None
    source = secure_source()
    if virtual.seed is not None:
        source = seeded_source(virtual.seed).child("client", request.round, virtual.client_id)
    accounts = None
    if run.accounts_itself:
        accounts = Accounts(DurableLedger(Path(virtual.state_folder) / CLIENTS_LEDGER), run.delta, run.accountant)
    number, path = virtual.client_id, virtual.data_path
    examples = as_asked(request, share_of(run.data, number, path=path))
    examples, held_out = split_examples(examples, run.evaluation, client_id=number)
    model, shape = model_of(run, path=path), shape_of(run, path=path)
    return DPClient(model, examples, accounts, ClientPolicy(), source, str(number), held_out, shape)


def node_client(request: TrainRequest, node_config: Mapping[str, object]) -> DPClient:
    """The client that a SuperNode is, by its own `--node-config`: its examples, ledger and policy. What a request says
    of virtual clients is not read here.

    Raises:
      Refused: the node has no data, or no ledger although one is needed, or its policy can't be read.
      LedgerError: its ledger is missing, damaged, or older than what was charged to it.
    """
    run, accounts = request.run, None
    if run.accounts_itself:
        accounts = node_accounts(node_config, delta=run.delta, accountant=run.accountant)
    policy = node_policy(node_config)
    number = node_config.get("partition-id", 0)  # of a node with data of its own: any number that stays will do
    examples = as_asked(request, node_examples(run.data, node_config))
    examples, held_out = split_examples(examples, run.evaluation, client_id=number if isinstance(number, int) else 0)
    made = node_model(run, node_config), examples, accounts, policy, secure_source()
    return DPClient(*made, held_out=held_out, shape=node_shape(run, node_config))


def as_asked(request: TrainRequest, examples: Examples) -> Examples:
    """A client's examples as the model of a run reads them, normalised if the run has means and deviations to do that
    by; for a question about the data as they are."""
    if request.work.query in OF_DATA:
        return examples
    return normaliser_of(request.run.normaliser.means, request.run.normaliser.deviations).examples(examples)


def split_examples(
    examples: Examples, evaluation: EvaluationConfig, *, client_id: int
) -> tuple[Examples, Examples | None]:
    """What a client trains on, and what it holds out: None unless clients rate the model."""
    if not evaluation.private:
        return examples, None
    trained, held = split_rows(len(examples), client_id, share=evaluation.share)
    return examples.subset(trained), examples.subset(held)


def node_examples(data: DataConfig, node_config: Mapping[str, object]) -> Examples:
    """The examples of a node: those in the folder that `data` names, or the share of the demonstration data that
    `partition-id` names.

    Raises:
      Refused: the node says nothing of its data, they do not fit the task, or it was started for another number of
        clients. What is wrong with the data is only logged: the reason of a refusal goes to the server.
    """
    if "data" in node_config:
        try:
            return node_table(Path(str(node_config["data"])), data.name)[0]
        except NodeDataError as error:
            logger.error("%s", error)
            raise Refused(f"this node's own data do not fit the task {data.name}; its log says why") from error
    number, count = node_config.get("partition-id"), node_config.get("num-partitions")
    if data.name == FOLDER or not isinstance(number, int) or not isinstance(count, int):
        raise Refused("this node has no data: start it with --node-config 'data=\"/folder\"'")
    if count != data.num_clients:
        raise Refused(f"this node is one of {count} clients, the run has data.num_clients={data.num_clients}")
    return share_of(data, number)


def node_model(run: ClientSettings, node_config: Mapping[str, object]) -> nn.Module:
    """The model that a node trains. `package.module:function` is code that the server names, so the node's owner has
    to have named it too: as `model` in the `data.toml` of the node's data.

    Raises:
      Refused: the owner has not.
    """
    folder = Path(str(node_config["data"])) if "data" in node_config else None
    if OWN in run.model and (folder is None or read_description(folder).model != run.model):
        raise Refused(f"model.name={run.model} is not the model that this node's data.toml allows")
    if folder is None or run.data.name != FOLDER:
        return model_of(run)
    return _model(run.model, node_table(folder, FOLDER)[1])


def shape_of(run: ClientSettings, *, path: str | None = None) -> TaskShape:
    """What an example of the demonstration data is."""
    return SHAPES.get(run.data.name) or load_task(run.data.name, path=path).shape


def node_shape(run: ClientSettings, node_config: Mapping[str, object]) -> TaskShape:
    """What an example of a node is."""
    if run.data.name != FOLDER or "data" not in node_config:
        return shape_of(run)
    return node_table(Path(str(node_config["data"])), FOLDER)[1]


def share_of(data: DataConfig, client_id: int, *, path: str | None = None) -> Examples:
    """One client's examples of the demonstration data. Loaded and dealt once per process."""
    return client_examples(load_task(data.name, path=path), data, client_id)


def model_of(run: ClientSettings, *, path: str | None = None) -> nn.Module:
    """The architecture; its parameters come with each request. Built once per process."""
    return _model(run.model, shape_of(run, path=path))


@lru_cache(maxsize=4)
def _model(name: str, shape: TaskShape) -> nn.Module:
    return model_for(name, shape, seed=0)
