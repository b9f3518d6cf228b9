"""Which client a process is: a virtual one of a simulation, or the node that it runs on."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from torch import nn

from client_app.account import ClientAccount, Refused
from client_app.client import DPClient
from client_app.node_data import NodeDataError, node_table
from client_app.policy import ClientPolicy, policy_from
from discreet.config import RunConfig
from discreet.federated.durable_ledger import CLIENTS_LEDGER, DurableLedger
from discreet.federated.guarantees import accounts_itself
from discreet.federated.messages import Order
from discreet.privacy.randomness import secure_source, seeded_source
from discreet.tasks.datasets import load_task
from discreet.tasks.examples import SHAPES, Examples, Task
from discreet.tasks.folder import FOLDER, read_description
from discreet.tasks.models import OWN, build_model
from discreet.tasks.partition import client_examples

logger = logging.getLogger("discreet.client")


def virtual_client(order: Order, run: RunConfig) -> DPClient:
    """The virtual client that a simulation's order names. With a seed it draws by seed, round and client alone."""
    if order.client_id is None or order.state_folder is None:
        raise Refused("the order names no virtual client: this process simulates")
    source = secure_source()
    if run.seed is not None:
        source = seeded_source(run.seed).child("client", order.round, order.client_id)
    account = None
    if accounts_itself(run):
        ledger = DurableLedger(Path(order.state_folder) / CLIENTS_LEDGER)
        account = ClientAccount(ledger, str(order.client_id), run.privacy.delta, run.privacy.accountant)
    examples = share_of(run, order.client_id)
    return DPClient(model_of(run), examples, account, ClientPolicy(), source)


def node_client(order: Order, run: RunConfig, node_config: Mapping[str, object]) -> DPClient:
    """The client that a SuperNode is, by its own `--node-config`: its examples, ledger and policy.

    A server can't choose which client a node is, nor make its noise reproducible: `client_id` and `seed` of an order
    are not read here.

    Raises:
      Refused: the node has no data, or no ledger where one is needed, or its policy can't be read.
      LedgerError: its ledger is missing, damaged, or older than what was charged to it.
    """
    account = None
    if accounts_itself(run):
        if "ledger" not in node_config:
            raise Refused("this node has no ledger: start it with --node-config 'ledger=\"/path/ledger.db\"'")
        ledger = DurableLedger(Path(str(node_config["ledger"])))
        ledger.check()
        account = ClientAccount(ledger, "", run.privacy.delta, run.privacy.accountant)
    try:
        policy = policy_from(node_config)
    except ValueError as error:
        raise Refused(f"the policy of this client can't be read: {error}") from error
    examples = node_examples(run, node_config)
    return DPClient(node_model(run, node_config), examples, account, policy, secure_source())


def node_examples(run: RunConfig, node_config: Mapping[str, object]) -> Examples:
    """The examples of a node: those in the folder that `data` names, or the share of the demonstration data that
    `partition-id` names.

    Raises:
      Refused: the node says nothing of its data, they do not fit the task, or it was started for another number of
        clients. What is wrong with the data is only logged: the reason of a refusal goes to the server.
    """
    if "data" in node_config:
        try:
            return node_table(Path(str(node_config["data"])), run.data.name)[0]
        except NodeDataError as error:
            logger.error("%s", error)
            raise Refused(f"this node's own data do not fit the task {run.data.name}; its log says why") from error
    number, count = node_config.get("partition-id"), node_config.get("num-partitions")
    if run.data.name == FOLDER or not isinstance(number, int) or not isinstance(count, int):
        raise Refused("this node has no data: start it with --node-config 'data=\"/folder\"'")
    if count != run.data.num_clients:
        raise Refused(f"this node is one of {count} clients, the run has data.num_clients={run.data.num_clients}")
    return share_of(run, number)


def node_model(run: RunConfig, node_config: Mapping[str, object]) -> nn.Module:
    """The model that a node trains. `package.module:function` is code that the server names, so the node's owner has
    to have named it too: as `model` in the `data.toml` of the node's data.

    Raises:
      Refused: the owner has not.
    """
    folder = Path(str(node_config["data"])) if "data" in node_config else None
    if OWN in run.model.name and (folder is None or read_description(folder).model != run.model.name):
        raise Refused(f"model.name={run.model.name} is not the model that this node's data.toml allows")
    if folder is None or run.data.name != FOLDER:
        return model_of(run)
    shape = node_table(folder, FOLDER)[1]
    return _model(run.model.name, shape.input_shape, shape.num_classes)


def share_of(run: RunConfig, client_id: int) -> Examples:
    """One client's examples of the demonstration data. Loaded and dealt once per process."""
    return client_examples(_task(run), run.data, client_id)


def model_of(run: RunConfig) -> nn.Module:
    """The architecture; its parameters come with each order. Built once per process."""
    if run.data.name in SHAPES:
        shape = SHAPES[run.data.name]
        return _model(run.model.name, shape.input_shape, shape.num_classes)
    task = _task(run)
    return _model(run.model.name, task.input_shape, task.num_classes)


def _task(run: RunConfig) -> Task:
    return load_task(run.data.name, path=run.data.path)


@lru_cache(maxsize=4)
def _model(name: str, input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
    return build_model(name, input_shape, num_classes, seed=0)
