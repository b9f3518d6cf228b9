"""Many runs, one after the other in this process or several at a time as tasks of a Ray cluster.

A failure is reported in one line, and does not end other runs. A run whose process or machine is
killed resumes from its last checkpoint, on any machine with room. So the run folders must be on a
path that all machines share. A machine charges only ledgers that it knows (`rollback_guard`): this
process, which knows their positions, lets the next machine adopt them.
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
from discreet.run_files.call import Call
from discreet.run_files.opening import holds_run, only_writer
from discreet.run_files.run_folder import CONFIG, OVER, RunFolder, note_interruption, state_of
from discreet.settings.privacy import PrivacyConfig
from discreet.settings.rules import ConfigError, require_extra
from discreet.settings.settings import Settings
from discreet.simulation.in_process import simulate
from discreet.simulation.processes import RunLostError

if TYPE_CHECKING:  # Ray takes seconds to import
    from discreet.simulation.ray_cluster import RayCluster

logger = logging.getLogger("discreet")

TOLD = (ConfigError, LedgerError, RunLostError)  # their messages are one line for users
# Errors that a run may raise, also from a user's code. Any other error ends all runs.
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
END_SECONDS = 10.0  # time for a killed process to end
WAKE_SECONDS = 1.0


@dataclass(frozen=True)
class Job:
    """A run to be done, with its name in messages. `work` starts or resumes it, or does nothing if
    it is over."""

    name: str
    folder: RunFolder
    plan: Plan
    work: Callable[[], object]
    device: str = "cpu"

    def attempt(self) -> str | None:
        """Does the run. Returns the reason of a failure, in one line, or None."""
        try:
            self.work()
        except BrokenPipeError:  # nobody reads the output any more: not a failure of the run
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
        """Notes in the run folder that the run was interrupted, if no process is writing it."""
        if (self.folder.path / CONFIG).exists():
            with suppress(*TOLD), only_writer(self.folder.path, patience=0.0):
                note_interruption(self.folder, reason)

    def ledgers(self) -> list[DurableLedger]:
        """The ledgers that the run has so far."""
        files = (self.folder.ledger_path, self.folder.clients_ledger_path)
        return [DurableLedger(path) for path in files if path.is_file()]

    def is_known(self) -> bool:
        """True if this machine knows the run's ledgers, and they lack no rows that it knows."""
        try:
            for ledger in self.ledgers():
                ledger.check()
        except LedgerError:
            return False
        return True

    def adopt(self) -> str | None:
        """Lets this machine adopt the run's ledgers, which grew elsewhere. Returns the fault of a
        ledger, or None."""
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
    """Starts a run with these settings, resumes it after its last complete round, or does nothing
    if it is over. `decided`: the guarantees with their noise, if a target has chosen it before."""
    if state_of(files) in OVER and (files.path / "privacy.json").exists():
        logger.info("%s has ended already, and is kept", name)
        return
    logger.info("%s", name)
    call = Call(str(files.path), holds_run(files), device)
    simulate(asked, call, decided=decided, progress=sys.stdout)


def first_line(error: BaseException) -> str:
    """An error in one line, with its type unless the message is meant for users.

    >>> first_line(TypeError("no\\nnumber")), first_line(ConfigError("rounds must be at least 1"))
    ('TypeError: no', 'rounds must be at least 1')
    """
    said = str(error).strip().splitlines()[:1]
    if isinstance(error, TOLD) and said:
        return "".join(said)
    return ": ".join([type(error).__name__, *said])


def run_all(jobs: Sequence[Job], *, at_a_time: int, shared: Path) -> dict[str, str]:
    """Does all runs, also after one fails, and returns the reasons of failures by name. `shared` is
    the folder that holds all their folders.

    With `at_a_time` = 1 the runs are done in this process. Otherwise each is a task of the Ray
    cluster at `ray.address`, and as many run at a time as asked for, or as there is room for. If
    this process is asked to end, the tasks are killed, and a cluster that was started here ends:
    the runs can be resumed.

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
    require_extra("ray", why="--jobs")
    if len({plan.ray.address for plan in plans}) > 1:
        raise ConfigError("ray.address must be the same for all runs with --jobs")
    on = zip(plans, devices, strict=True)
    if any(device != "cpu" and not plan.ray.num_gpus for plan, device in on):
        raise ConfigError(
            "device=cuda with --jobs needs ray.num_gpus: a run asks for that share of a GPU"
        )


def _run_on_ray(
    jobs: Sequence[Job], *, at_a_time: int, shared: Path
) -> Iterator[tuple[Job, str | None]]:
    """The runs as they end, with the reason if they failed."""
    import ray

    from discreet.simulation.ray_cluster import connected

    address = jobs[0].plan.ray.address
    models = [job.plan.model.name for job in jobs]
    with (
        _token(shared, address) as token,
        connected(address, models=models, token=token) as cluster,
    ):
        cluster.check_gpus(max(job.plan.ray.num_gpus for job in jobs))
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
    """A file that all machines of a cluster must see; None if there is only this machine."""
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
    """The task of a run. A run that charges an account, an SQLite file in WAL mode, runs on this
    machine, as several machines can't share it."""
    known = job.is_known()
    if job.plan.engine == "ray":
        num_gpus = 0.0
    else:
        num_gpus = job.plan.ray.num_gpus
    # A copy of the plan holds no custom mechanism, which another machine could import only in the
    # run's folder.
    sent = replace(job, plan=replace(job.plan))
    here = job.plan.account is not None
    return cluster.start(_attempt, sent, Path.cwd(), known, num_gpus=num_gpus, here=here)


def _reason(job: Job, task: Any, *, adopts: bool) -> str | None:
    """The reason of a failed run, in one line, or None."""
    from discreet.simulation.ray_cluster import result

    try:
        reason = result(task, "the run")
    except FAILURES as error:
        reason = first_line(error)
        job.note(reason)
    return reason or (job.adopt() if adopts else None)


def _attempt(job: Job, folder: Path, known: bool) -> str | None:
    """The task, in a working folder: does the run, and returns the reason of a failure, in one
    line, or None. `known`: the starting process has checked the run's ledgers, so this machine may
    adopt them."""
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
    """A context that writes the log beside the run folder and forks no workers, as in a process
    pool: a task has one CPU."""
    path = job.folder.path.with_name(f"{job.folder.path.name}.log")
    process = multiprocessing.current_process()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        log_to(stream, log_format=job.plan.log_format)
        process.daemon = True
        try:
            yield
        finally:
            process.daemon = False
            logging.getLogger("discreet").handlers = []
