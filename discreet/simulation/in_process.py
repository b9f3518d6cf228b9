"""Asks virtual clients in the same process: the same clients and the same round as Flower's
runtime, without Ray."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, TextIO

import torch
from torch import Tensor

from discreet.data.examples import Task
from discreet.data.partition import client_examples_of
from discreet.ledger.durable_ledger import DurableLedger
from discreet.mechanisms.mechanism_table import mechanisms_of
from discreet.mechanisms.sums import PartialReply, UnopenedSum
from discreet.node.account import Accounts, Refused
from discreet.node.nodes import virtual_client
from discreet.node.work import Work, client_terms
from discreet.planning.plan import Plan
from discreet.planning.state import Outcome
from discreet.privacy.secure_grid import SecureSum
from discreet.protocol.messages import NORMALISE, TrainReply, TrainRequest, VirtualClient
from discreet.queries.query import query_of
from discreet.run_files.call import Call
from discreet.server.resolve import resolve
from discreet.server.session import Session, finish, normalised, prepare, training_run
from discreet.server.training_run import OnRound
from discreet.server.transport import Failure, Reply, RoundAbandoned, Transport
from discreet.settings.client_settings import ClientSettings
from discreet.settings.privacy import PrivacyConfig
from discreet.settings.rules import ConfigError, Rule, check_value, require_extra
from discreet.settings.settings import Settings, client_settings
from discreet.simulation.chunk import trained_on
from discreet.simulation.cohort import BatchedTransport, engine_of, masked_vector
from discreet.simulation.mapped_model import MappedModel

logger = logging.getLogger("discreet")

LARGE_BATCH = 256  # for smaller batches a second thread does not help


@dataclass(frozen=True)
class InProcessTransport:
    """A `Transport` that calls each client directly. `vector`: the secure sum under secure
    aggregation."""

    plan: Plan
    state_folder: str
    vector: SecureSum | None = None

    def available_clients(self) -> Sequence[int]:
        """Every virtual client."""
        return range(self.plan.run.data.num_clients)

    def ask(self, asked: TrainRequest, params: Tensor, cohort: Sequence[int]) -> Iterator[Reply]:
        """Trains the clients one after the other."""
        terms = client_terms(asked.run)
        for client_id in cohort:
            virtual = VirtualClient(
                client_id, self.state_folder, seed=self.plan.seed, data_path=self.plan.data.path
            )
            request = replace(asked, virtual=virtual)
            try:
                work = Work(request, self.plan.mechanisms, terms)
                client = virtual_client(work)
                if self.vector is None:
                    yield replace(client.answer(work, params), client=client_id)
                else:
                    total = client.vector(work, params, self.vector)
                    yield PartialReply(total, 0, 1, asked.clip_norm)
            except Refused as refusal:
                yield Failure(client_id, "refused", str(refusal))


@dataclass(frozen=True, eq=False)
class UnmaskedSum:
    """Secure aggregation in one process: the same integers and the same noise, without masks.
    `transport` asks virtual clients, whose replies are sums of noised vectors; a sum of at least
    `fewest` = n - d clients is opened."""

    transport: Transport
    vector: SecureSum
    fewest: int

    makes_sums: ClassVar[bool] = True

    def available_clients(self) -> Sequence[int]:
        """See `Transport`."""
        return self.transport.available_clients()

    def ask(
        self, asked: TrainRequest, params: Tensor, cohort: Sequence[int]
    ) -> Iterator[Failure | UnopenedSum]:
        """See `Transport`."""
        total = torch.zeros(self.vector.length, dtype=torch.int64)
        replies = 0
        failures = []
        for reply in self.transport.ask(asked, params, cohort):
            if isinstance(reply, Failure):
                failures.append(reply)
                continue
            assert isinstance(reply, PartialReply)
            total += reply.values
            replies += reply.replies
        if replies < self.fewest:
            raise RoundAbandoned(
                f"{replies} of {len(cohort)} clients are left, and {self.fewest} must be", failures
            )
        yield from failures
        yield UnopenedSum(lambda: self.vector.centred(total), replies)


def simulate(
    config: Settings,
    call: Call | None = None,
    *,
    decided: PrivacyConfig | None = None,
    progress: TextIO | None = None,
    on_round: OnRound | None = None,
) -> Outcome:
    """One whole run in this process, by the engine that `engine` names.

    Args:
      config: the settings of the run.
      call: the folder, by default one that is named by the time, and the device.
      decided: the guarantees with their noise, if a target has chosen it before.
      progress: a terminal that shows the progress.
      on_round: is called with the row of metrics.csv of each round.

    Raises:
      ConfigError, LedgerError: before the start.
    """
    if call is None:
        call = Call()
    _check_engine(client_settings(config), config.engine, call.device)
    if config.training.batch_size < LARGE_BATCH:
        torch.set_num_threads(1)
    with ExitStack() as stack:
        session = prepare(config, call, simulated=True, held=stack, decided=decided)
        session = normalised(session, lambda: data_answers(NORMALISE, session.plan, session.task))
        transport = virtual_clients(session, stack)
        text = config.operations.log_format == "text"
        rounds = training_run(session, transport, on_round=on_round)
        outcome = rounds.run(progress=progress if text else None)
        finish(session, outcome)
    return outcome


def virtual_clients(session: Session, held: ExitStack) -> Transport:
    """The transport to the clients of a run that is ready to start, by the engine that `engine`
    names. `held` ends its workers. Raises ConfigError: the engine does not support the run."""
    plan = session.plan
    run = session.plan.run
    if run.needs_normaliser:
        raise ConfigError(
            "data.normalise=private is of discreet simulate: nobody has been asked what to "
            "normalise by"
        )
    session.model.to(session.context.device)
    vector = masked_vector(plan)
    uncovered = _not_batched(run, plan.engine)
    transport: Transport
    if plan.engine == "sequential" or uncovered:
        logger.info(
            "clients are trained sequentially%s",
            f": {uncovered} is not batched" if uncovered else "",
        )
        transport = InProcessTransport(plan, str(session.folder.path), vector)
    else:
        transport = held.enter_context(_batched(session, held))
    if vector is None:
        return transport
    return UnmaskedSum(transport, vector, fewest=run.user.population_size - run.secure.dropouts)


def check(config: Settings, call: Call) -> Plan:
    """The plan of a run; starts nothing and opens no folder. Raises ConfigError: `simulate` would
    refuse the configuration."""
    _check_engine(client_settings(config), config.engine, call.device)
    return resolve(config)[0]


def _check_engine(run: ClientSettings, engine: str, device: str) -> None:
    if run.statistics.only:
        raise ConfigError(
            "statistics.only must be false here: discreet statistics asks simulated clients"
        )
    _not_batched(run, engine)
    if engine == "ray":
        require_extra("ray", why="engine=ray")
        check_value(
            device, "device", Rule("cpu with engine=ray: tasks ask for ray.num_gpus", "cpu".__eq__)
        )
    check_device(device)


def check_device(device: str) -> None:
    """Raises ConfigError unless PyTorch can use a device of `Call`."""
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return
    if not torch.cuda.is_available():
        raise ConfigError(f"device={device} needs a GPU that PyTorch can use, and there is none")
    most = torch.cuda.device_count() - 1
    if int(number or 0) > most:
        raise ConfigError(f"device must be cpu, cuda or up to cuda:{most} (got {device})")


def _not_batched(run: ClientSettings, engine: str) -> str | None:
    """The setting because of which clients can't be trained in batches, or None. Raises ConfigError
    if `engine` requires batches."""
    if run.masked:
        uncovered = "privacy.example.unit=owner" if run.example.by_owner else None
    else:
        ways = (each.participation.one_by_one for each in mechanisms_of(run).values())
        uncovered = next(filter(None, ways), None)
    if engine in ("batched", "ray") and uncovered:
        raise ConfigError(f"engine={engine} does not cover {uncovered}: take engine=auto")
    return uncovered


def _batched(session: Session, held: ExitStack) -> BatchedTransport:
    plan = session.plan
    accounts = None
    workers = None
    if plan.accounts_itself:
        accounts = Accounts(
            DurableLedger(session.folder.clients_ledger_path), plan.run.delta, plan.run.accountant
        )
    engine = engine_of(plan, session.task, session.context.device)
    if plan.engine == "ray":
        # Importing Ray takes seconds.
        from discreet.simulation.ray_cluster import RayWorkers, connected

        cluster = held.enter_context(connected(plan.ray.address, models=[plan.model.name]))
        workers = partial(RayWorkers, cluster=cluster, num_gpus=plan.ray.num_gpus)
        logger.info("clients are trained on a Ray cluster with %d CPUs", cluster.has("CPU"))
    else:
        alone = isinstance(engine.model, MappedModel) and not engine.model.together
        if alone:
            at_a_time = 1
        else:
            at_a_time = engine.chunk
        who = "1 process trains" if engine.workers == 1 else f"{engine.workers} processes train"
        each = f"up to {at_a_time} clients" if at_a_time > 1 else "1 client"
        logger.info("%s %s at a time", who, each)
    return BatchedTransport(plan, engine, accounts=accounts, workers=workers)


def data_answers(name: str, plan: Plan, task: Task) -> Iterator[TrainReply]:
    """Each client's answer to a query about its data, from its training examples. `task` is as
    loaded, not normalised."""
    run = plan.run
    query = query_of(name, plan.run, task.shape)
    clients = trained_on(client_examples_of(task, run.data), run.evaluation)
    for client in range(run.data.num_clients):
        held = task.train.subset(torch.from_numpy(clients.examples(client)))
        yield TrainReply(
            1,
            torch.zeros(0),
            False,
            answer=query.answer(held.inputs, held.targets).to(torch.float32),
        )
