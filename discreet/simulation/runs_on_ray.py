"""Several runs at a time: each is a task of a Ray cluster, with one CPU and a log beside its folder.

A run whose process or machine is killed goes on after its last checkpoint, on whatever machine has room. So the run
folders lie on a path that all machines share. A machine charges only ledgers that it knows (`rollback_guard`): this
process, which has seen them grow, lets the next machine go on with them.
"""

from __future__ import annotations

import logging
import multiprocessing
import secrets
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import ray
import torch
from ray.exceptions import RayError, RayTaskError

from discreet.ledger.durable_ledger import DurableLedger, LedgerError
from discreet.logs import log_to
from discreet.server.plan import Plan
from discreet.server.run_folder import RunFolder, only_writer
from discreet.settings.rules import ConfigError
from discreet.simulation.job import TOLD, Ended, Job, first_line
from discreet.simulation.ray_cluster import Versions, alive, ask, connected, own_model_of, versions

logger = logging.getLogger("discreet")

MOST_RESTARTS = 3  # of a run whose process was killed
END_SECONDS = 10.0  # in which a process that is killed ends
LOOK_SECONDS = 180.0  # in which a machine tells whether it sees a folder
WAKE_SECONDS = 1.0


@dataclass(frozen=True)
class Place:
    """The folders and the machine that tasks work with.

    Attributes:
      folder: the working folder, for paths that are relative to it.
      shared: the folder that all run folders lie in.
      token: a file in it that machines must see; None if all of them are this one.
      machine: the name of this one.
    """

    folder: Path
    shared: Path
    token: str | None
    machine: str

    def check(self) -> None:
        """Raises ConfigError if this process does not see the shared folder."""
        if self.token is not None and not (self.shared / self.token).is_file():
            raise ConfigError(
                f"{self.shared} must be on a path that all machines share: {socket.gethostname()} does not see it"
            )

    def answer(self) -> str:
        """The name of a file that this process puts into the shared folder.

        Raises:
          ConfigError: it does not see the folder.
        """
        self.check()
        name = f"{self.token}-{secrets.token_hex(4)}"
        (self.shared / name).touch()
        return name


@dataclass(frozen=True)
class Ticket:
    """The words of a task. `known`: the ledgers of the run, if it has some, are known to be its own."""

    job: Job
    place: Place
    versions: Versions
    known: bool

    def prepare(self) -> None:
        """Raises ConfigError, LedgerError or RunLostError if the run can't be done on this machine."""
        self.place.check()
        self.versions.check()
        _refuse_account(self.job.plan, {socket.gethostname()}, self.place.machine)
        if self.known:
            for ledger in _ledgers(self.job.folder):
                ledger.adopt()


def run_on_ray(jobs: Sequence[Job], *, at_a_time: int, shared: Path, ended: Ended) -> None:
    """Does runs as tasks of the cluster that `ray.address` names, so many at a time, or as many as there is room for.

    If this process is asked to end, the tasks are killed, and a cluster that was started here ends: the runs can be
    resumed.

    Args:
      jobs: the runs.
      at_a_time: at most.
      shared: the folder that all run folders lie in.
      ended: is told of each.

    Raises:
      ConfigError: the cluster can't be used, or a machine does not see the folder; nothing has started.
    """
    address, names = jobs[0].plan.ray.address, [own_model_of(job.plan.model.name) for job in jobs]
    with connected(address, own_model=max(names)) as cluster:
        cluster.check_gpus(max(job.plan.ray.num_gpus for job in jobs))
        logger.info("%d runs at a time on a Ray cluster with %d CPUs", at_a_time, cluster.cpus)
        with _place(shared, jobs, is_own=address is None) as place:
            waiting, tasks = deque(jobs), _Tasks(place)
            try:
                while waiting or tasks.running:
                    while waiting and len(tasks.running) < at_a_time:
                        tasks.start(waiting.popleft())
                    for job, reason in tasks.ended():
                        ended(job, reason)
            finally:
                tasks.end()


@dataclass
class _Tasks:
    """The tasks that run, each with how often it was started again."""

    place: Place
    running: dict[ray.ObjectRef[str | None], tuple[Job, int]] = field(default_factory=dict)

    def start(self, job: Job, restarts: int = 0) -> None:
        known = restarts > 0 or _knows(job.folder)
        # A copy of the plan holds no mechanism of one's own, which another machine finds only where the run is.
        sent, found = replace(job, plan=replace(job.plan)), versions(own_model_of(job.plan.model.name))
        num_gpus = 0.0 if job.plan.engine == "ray" else job.plan.ray.num_gpus
        task = ray.remote(num_cpus=1, num_gpus=num_gpus, max_retries=0)(_attempt)
        self.running[task.remote(Ticket(sent, self.place, found, known))] = job, restarts

    def ended(self) -> Iterator[tuple[Job, str | None]]:
        """The runs that have ended, with the reason if they failed. A run that was killed is started again."""
        for task in ray.wait([*self.running], timeout=WAKE_SECONDS)[0]:
            job, restarts = self.running.pop(task)
            try:
                reason = ray.get(task)
            except RayTaskError as error:
                reason = first_line(error.cause)
            except RayError as error:
                if restarts < MOST_RESTARTS:
                    logger.warning("%s: its process was killed; it goes on", job.name)
                    self.start(job, restarts + 1)
                    continue
                reason = f"its process was killed {restarts + 1} times: {first_line(error)}"
                job.note(reason)
            yield job, reason or self._fault_of(job)

    def end(self) -> None:
        """Kills the tasks that run, and waits until nobody writes their files."""
        for task in self.running:
            ray.cancel(task, force=True)
        if self.running:
            ray.wait([*self.running], num_returns=len(self.running), timeout=END_SECONDS)
        for job, _ in self.running.values():
            if job.folder.path.exists():
                with suppress(*TOLD), only_writer(job.folder.path, patience=END_SECONDS):
                    self._fault_of(job)

    def _fault_of(self, job: Job) -> str | None:
        """Makes the ledgers of a run, which grew elsewhere, known to this machine; gives what is wrong with them."""
        try:
            if self.place.token is not None:
                for ledger in _ledgers(job.folder):
                    ledger.adopt()
        except LedgerError as error:
            return first_line(error)
        return None


def _attempt(ticket: Ticket) -> str | None:
    """The task: does the run, and gives the reason for which it failed, in one line, or None."""
    try:
        ticket.prepare()
    except TOLD as error:
        return first_line(error)
    torch.set_num_threads(1)
    folder = ticket.place.folder
    with _as_a_task(ticket.job), chdir(folder) if folder.is_dir() else nullcontext():
        return ticket.job.attempt()


@contextmanager
def _as_a_task(job: Job) -> Iterator[None]:
    """Writes the log beside the run folder; forks no workers, as a process of a pool: a task has one CPU."""
    path, process = job.folder.path.with_name(f"{job.folder.path.name}.log"), multiprocessing.current_process()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        log_to(stream, log_format=job.plan.operations.log_format)
        process.daemon = True
        try:
            yield
        finally:
            process.daemon = False
            logging.getLogger("discreet").handlers = []


@contextmanager
def _place(shared: Path, jobs: Sequence[Job], *, is_own: bool) -> Iterator[Place]:
    if is_own:
        yield Place(Path.cwd(), shared, None, socket.gethostname())
        return
    nodes = alive()
    for job in jobs:
        _refuse_account(job.plan, {*nodes.values()}, socket.gethostname())
    place = Place(Path.cwd(), shared, f".seen-{secrets.token_hex(8)}", socket.gethostname())
    try:
        (shared / str(place.token)).touch()
        for node, name in nodes.items():
            _look(place, node, name)
        yield place
    finally:
        for path in shared.glob(f"{place.token}*"):
            path.unlink(missing_ok=True)


def _look(place: Place, node: str, name: str) -> None:
    """Raises ConfigError if a node does not see the shared folder, or this machine not what the node writes there."""
    try:
        answer = ray.get(ask(node, Place.answer, place), timeout=LOOK_SECONDS)
    except RayTaskError as error:
        raise ConfigError(first_line(error.cause)) from error
    except RayError as error:
        raise ConfigError(f"the Ray node {name} does not tell whether it sees {place.shared}: {error}") from error
    if not (place.shared / answer).is_file():
        raise ConfigError(f"{place.shared} must be on a path that all machines share: {name} has another folder there")


def _ledgers(folder: RunFolder) -> list[DurableLedger]:
    return [DurableLedger(path) for path in (folder.ledger_path, folder.clients_ledger_path) if path.is_file()]


def _knows(folder: RunFolder) -> bool:
    """True if this machine knows the ledgers of a run, and has seen no more of them than is there."""
    try:
        for ledger in _ledgers(folder):
            ledger.check()
    except LedgerError:
        return False
    return True


def _refuse_account(plan: Plan, machines: set[str], allowed: str) -> None:
    """An account is an SQLite file in WAL mode: processes of several machines can't share it."""
    others = sorted(machines - {allowed})
    if plan.account is not None and others:
        raise ConfigError(
            f"privacy.user.account can be charged on one machine alone, {allowed}: with --jobs take a Ray cluster "
            f"without {', '.join(others)}"
        )
