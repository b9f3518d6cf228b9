"""Many runs, one after the other in this process or several at a time as tasks of a Ray cluster.

A failure is told in a line, and ends no other run. A run whose process or machine is killed goes on
after its last checkpoint, on whatever machine has room. So the run folders lie on a path that all
machines share. A machine charges only ledgers that it knows (`rollback_guard`): this process, which
has seen them grow, lets the next machine go on with them.
"""

from __future__ import annotations

import logging
import multiprocessing
import secrets
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import chdir, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from discreet.ledger.durable_ledger import DurableLedger, LedgerError
from discreet.logs import log_to
from discreet.planning.plan import Plan
from discreet.run_files.run_folder import (
    CONFIG,
    OVER,
    RunFolder,
    note_interruption,
    only_writer,
    state_of,
)
from discreet.settings.call import Call
from discreet.settings.privacy import PrivacyConfig
from discreet.settings.rules import ConfigError, require_extra
from discreet.settings.settings import Settings
from discreet.simulation.in_process import simulate
from discreet.simulation.processes import RunLostError

if TYPE_CHECKING:  # Ray takes seconds to import
    from discreet.simulation.ray_cluster import RayCluster

logger = logging.getLogger("discreet")

TOLD = (ConfigError, LedgerError, RunLostError)  # they say in one line what is wrong, and where
# What a run may meet, in code of one's own too. Anything else is no failure of a run: it ends them
# all.
FAILURES = (
    ValueError,
    ArithmeticError,
    LookupError,
    RuntimeError,
    MemoryError,
    OSError,
    TypeError,
    AttributeError,
    AssertionError,
    ImportError,
)
END_SECONDS = 10.0  # in which a process that is killed ends
WAKE_SECONDS = 1.0


@dataclass(frozen=True)
class Job:
    """A run that is to be done, with its name in messages. `work` starts it, resumes it, or leaves
    it if it is over."""

    name: str
    folder: RunFolder
    plan: Plan
    work: Callable[[], object]
    device: str = "cpu"

    def attempt(self) -> str | None:
        """Does the run; gives the reason for which it failed, in one line, or None."""
        try:
            self.work()
        except BrokenPipeError:  # the output is no longer read, which is no fault of the run
            raise
        except FAILURES as error:
            reason = first_line(error)
            logger.error(
                "%s failed: %s",
                self.name,
                reason,
                exc_info=None if isinstance(error, TOLD) else error,
            )
            self.note(reason)
            return reason
        return None

    def note(self, reason: str) -> None:
        """Writes in the run folder, if it holds a run that nobody writes, that the run was
        interrupted."""
        if (self.folder.path / CONFIG).exists():
            with suppress(*TOLD), only_writer(self.folder.path, patience=0.0):
                note_interruption(self.folder, reason)

    def ledgers(self) -> list[DurableLedger]:
        """Those that the run has so far."""
        files = (self.folder.ledger_path, self.folder.clients_ledger_path)
        return [DurableLedger(path) for path in files if path.is_file()]

    def is_known(self) -> bool:
        """True if this machine knows the run's ledgers, and has seen no more of them than is
        there."""
        try:
            for ledger in self.ledgers():
                ledger.check()
        except LedgerError:
            return False
        return True

    def adopt(self) -> str | None:
        """Makes the run's ledgers, which grew elsewhere, known to this machine; gives what is wrong
        with them."""
        try:
            for ledger in self.ledgers():
                ledger.adopt()
        except LedgerError as error:
            return first_line(error)
        return None


def go_on(
    files: RunFolder,
    name: str,
    asked: Settings,
    *,
    device: str = "cpu",
    decided: PrivacyConfig | None = None,
) -> None:
    """Does a run with these settings: from its start, after its last whole round, or not at all if
    it is over. `decided`: their guarantees with the noise, if a target has chosen it before."""
    if state_of(files) in OVER and (files.path / "privacy.json").exists():
        logger.info("%s has ended already, and is kept", name)
        return
    logger.info("%s", name)
    begun = files.ledger_path.exists() or (files.path / CONFIG).exists()
    call = Call(str(files.path), begun, device)
    simulate(asked, call, decided=decided, progress=sys.stdout)


def first_line(error: BaseException) -> str:
    """An error in one line, with its type unless the message was written for people.

    >>> first_line(TypeError("no\\nnumber")), first_line(ConfigError("rounds must be at least 1"))
    ('TypeError: no', 'rounds must be at least 1')
    """
    said = str(error).strip().splitlines()[:1]
    if isinstance(error, TOLD) and said:
        return "".join(said)
    return ": ".join([type(error).__name__, *said])


def run_all(jobs: Sequence[Job], *, at_a_time: int, shared: Path) -> dict[str, str]:
    """Does all runs, goes on if one fails, and gives the reasons of those that failed, by their
    names. `shared` is the folder that all their folders lie in.

    One at a time: in this process. Else each is a task of the Ray cluster that `ray.address` names,
    so many at a time, or as many as there is room for. If this process is asked to end, the tasks
    are killed, and a cluster that was started here ends: the runs can be resumed.

    Raises:
      ConfigError: the cluster can't be used, or a machine does not see the folder; nothing has
        started.
    """
    failed = dict[str, str]()
    on_ray = at_a_time > 1 and jobs
    if on_ray:
        ended = _run_on_ray(jobs, at_a_time=at_a_time, shared=shared)
    else:
        ended = ((job, job.attempt()) for job in jobs)
    for number, (job, reason) in enumerate(ended, start=1):
        if reason is not None:
            failed[job.name] = reason
        if reason is None:
            how = "has ended"
        else:
            how = "failed"
        if failed:
            lost = f", {len(failed)} failed"
        else:
            lost = ""
        logger.info("%s %s: %d of %d runs%s", job.name, how, number, len(jobs), lost)
    return failed


def check_parallel(plans: Sequence[Plan], devices: Sequence[str]) -> None:
    """Raises ConfigError if these runs, on their devices, can't be tasks of one Ray cluster."""
    require_extra("ray", extra="simulation", why="--jobs")
    if len({plan.settings.ray.address for plan in plans}) > 1:
        raise ConfigError("ray.address must be the same for all runs with --jobs")
    on = zip(plans, devices, strict=True)
    if any(device != "cpu" and not plan.settings.ray.num_gpus for plan, device in on):
        raise ConfigError(
            "device=cuda with --jobs needs ray.num_gpus: a run asks for that share of a GPU"
        )


def _run_on_ray(
    jobs: Sequence[Job], *, at_a_time: int, shared: Path
) -> Iterator[tuple[Job, str | None]]:
    """The runs as they end, with the reason if they failed."""
    import ray

    from discreet.simulation.ray_cluster import connected

    address = jobs[0].plan.settings.ray.address
    models = [job.plan.settings.model.name for job in jobs]
    with (
        _token(shared, address) as token,
        connected(address, models=models, token=token) as cluster,
    ):
        cluster.check_gpus(max(job.plan.settings.ray.num_gpus for job in jobs))
        logger.info(
            "%d runs at a time on a Ray cluster with %d CPUs", at_a_time, cluster.has("CPU")
        )
        waiting = deque(jobs)
        running = dict[Any, Job]()
        try:
            while waiting or running:
                while waiting and len(running) < at_a_time:
                    job = waiting.popleft()
                    running[_started(job, cluster)] = job
                for task in ray.wait([*running], timeout=WAKE_SECONDS)[0]:
                    job = running.pop(task)
                    yield job, _reason(job, task, adopts=token is not None)
        finally:
            for task in running:
                ray.cancel(task, force=True)
            if running:
                ray.wait([*running], num_returns=len(running), timeout=END_SECONDS)
            for job in running.values():
                if token is not None and job.folder.path.exists():
                    with suppress(*TOLD), only_writer(job.folder.path, patience=END_SECONDS):
                        job.adopt()


@contextmanager
def _token(shared: Path, address: str | None) -> Iterator[Path | None]:
    """A file that all machines of a cluster must see; None if all of them are this one."""
    if address is None:
        yield None
        return
    token = shared / f".seen-{secrets.token_hex(8)}"
    token.touch()
    try:
        yield token
    finally:
        token.unlink(missing_ok=True)


def _started(job: Job, cluster: RayCluster) -> Any:
    """The task of a run. One that charges an account, an SQLite file in WAL mode, runs here:
    processes of several machines can't share it."""
    known = job.is_known()
    if job.plan.settings.engine == "ray":
        num_gpus = 0.0
    else:
        num_gpus = job.plan.settings.ray.num_gpus
    # A copy of the plan holds no mechanism of one's own, which another machine finds only where the
    # run is.
    sent = replace(job, plan=replace(job.plan))
    here = job.plan.account is not None
    return cluster.start(_attempt, sent, Path.cwd(), known, num_gpus=num_gpus, here=here)


def _reason(job: Job, task: Any, *, adopts: bool) -> str | None:
    """The reason for which a run that has ended failed, in one line, or None."""
    from discreet.simulation.ray_cluster import result

    try:
        reason = result(task, "the run")
    except FAILURES as error:
        reason = first_line(error)
        job.note(reason)
    return reason or (job.adopt() if adopts else None)


def _attempt(job: Job, folder: Path, known: bool) -> str | None:
    """The task, in a working folder: does the run, and gives the reason for which it failed, in one
    line, or None. `known`: where it was started from, its ledgers are known to be its own. So they
    are here."""
    if known:
        fault = job.adopt()
    else:
        fault = None
    if fault is not None:
        return fault
    with _as_a_task(job), chdir(folder) if folder.is_dir() else nullcontext():
        return job.attempt()


@contextmanager
def _as_a_task(job: Job) -> Iterator[None]:
    """Writes the log beside the run folder; forks no workers, as a process of a pool: a task has
    one CPU."""
    path = job.folder.path.with_name(f"{job.folder.path.name}.log")
    process = multiprocessing.current_process()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        log_to(stream, log_format=job.plan.settings.operations.log_format)
        process.daemon = True
        try:
            yield
        finally:
            process.daemon = False
            logging.getLogger("discreet").handlers = []
