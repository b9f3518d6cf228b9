"""The Ray cluster of a simulation: connecting, checking the nodes, running tasks, and ending it if
it was started here.

Every machine must compute the same numbers as this one. So a node is used only after it has
reported the same code of Discreet, the same PyTorch, and the same files of custom models. Ray
compares its own version and Python's when a machine, or this process, joins the cluster.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import signal
import socket
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
import torch
from numpy.typing import NDArray
from ray._private import ray_constants
from ray._raylet import (  # type: ignore[attr-defined]
    AuthenticationMode,
    AuthenticationTokenLoader,
    Config,
    get_authentication_mode,
)
from ray.exceptions import RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as _Only
from torch import Tensor

import discreet
from discreet.mechanisms.sums import PartialReply
from discreet.models.models import OWN, own_builder
from discreet.run_files.places import PACKED
from discreet.settings.rules import ConfigError
from discreet.settings.training import HF
from discreet.simulation.chunk import read_only
from discreet.simulation.processes import RunLostError, ray_environment, scratch_folder
from discreet.simulation.workers import QUEUED, Train

if TYPE_CHECKING:
    from discreet.simulation.cohort import Engine

Task = ray.ObjectRef[Any]

ANY = "auto"
RETRIES = 3  # of a task whose process or machine was lost
REACH_SECONDS = 10.0  # a machine that answers accepts a connection in less
TELL_SECONDS = 180.0  # a node starts a process and imports PyTorch before it reports its versions


@dataclass
class RayCluster:
    """A cluster to which this process is connected.

    Attributes:
      own_models: the names of custom models, which must be the same on all machines.
      versions: digests or versions of the code, which must be the same on all machines.
      token: a file in a folder that all machines share; None if they share none.
      checked: the nodes that have passed the check.
    """

    own_models: tuple[str, ...]
    versions: Mapping[str, str]
    token: Path | None = None
    checked: set[str] = field(default_factory=set)

    def check(self) -> None:
        """Raises RunLostError, in one line, if this process has other versions, or does not see the
        folder.

        Each task begins with this check, since Ray may give it to a node that has just joined.
        """
        found = versions(self.own_models)
        here = socket.gethostname()
        for what, one in self.versions.items():
            if one != found[what]:
                raise RunLostError(
                    f"{here} has another version of {what}: {found[what]} there, {one} here"
                )
        if self.token is not None and not self.token.is_file():
            raise RunLostError(
                f"{self.token.parent} must be on a path that all machines share: {here} does not "
                "see it"
            )

    def check_nodes(self) -> None:
        """Checks the nodes that have joined since the last call; called before each round. Raises
        RunLostError: a node has other versions, lacks a file, or does not answer."""
        joined = _alive().keys() - self.checked
        # A task that does nothing else.
        of = {
            node: _task.options(num_cpus=0, scheduling_strategy=_Only(node, soft=False))
            for node in joined
        }
        asked = {node: task.remote(self, bool) for node, task in of.items()}
        for node, answer in asked.items():
            try:
                ray.get(answer, timeout=TELL_SECONDS)
            except RayError as error:
                if name := _alive().get(node):
                    raise RunLostError(
                        f"the Ray node {name} can't run this: {one_line(error)}"
                    ) from error
            else:
                self.checked.add(node)

    def has(self, kind: str) -> int:
        """The number of CPUs, or of GPUs, that Ray may use on the nodes that are alive now."""
        return int(ray.cluster_resources().get(kind, 0))  # type: ignore[no-untyped-call]

    def check_gpus(self, num_gpus: float) -> None:
        """Raises ConfigError if a task asks for a share of a GPU, and there is none."""
        if num_gpus and not self.has("GPU"):
            raise ConfigError(
                f"ray.num_gpus must be 0 on this cluster, which has no GPU (got {num_gpus})"
            )

    def start(
        self, function: Callable[..., Any], *args: object, num_gpus: float = 0.0, here: bool = False
    ) -> Task:
        """A task with one CPU: a call of the function on any machine, or on this one. If its
        process or machine is lost it is repeated, up to `RETRIES` times."""
        strategy = _Only(ray.get_runtime_context().get_node_id(), soft=False) if here else "DEFAULT"
        task = _task.options(num_gpus=num_gpus, max_retries=RETRIES, scheduling_strategy=strategy)
        return task.remote(self, function, *args)  # type: ignore[no-any-return]


@cache
def versions(own_models: tuple[str, ...] = ()) -> Mapping[str, str]:
    """The versions of this process, as of the first call. Raises ValueError if a model can't be
    imported."""
    package = Path(discreet.__file__).parent
    modules = [
        path for path in sorted(package.rglob("*.py")) if package / PACKED.name not in path.parents
    ]
    found = {"Discreet's code": _digest(modules, package), "PyTorch": torch.__version__}
    files = {name: Path(inspect.getfile(own_builder(name))) for name in own_models}
    return found | {
        f"the file of model.name={name}": _digest([file], file.parent)
        for name, file in files.items()
    }


def result(task: Task, what: str) -> Any:
    """The result of a task; an error of the task is raised. Raises RunLostError: the task, named
    `what`, was lost too often."""
    try:
        return ray.get(task)
    except RayTaskError as error:
        raise error.cause from error
    except RayError as error:
        raise RunLostError(
            f"Ray gave up {what}, whose processes or machines were lost one after the other: is "
            f"there enough memory? {one_line(error)}"
        ) from error


@ray.remote(num_cpus=1)
def _task(cluster: RayCluster, function: Callable[..., Any], *args: object) -> Any:
    cluster.check()
    torch.set_num_threads(1)
    return function(*args)


class RayWorkers:
    """Workers like `discreet.simulation.workers.LocalWorkers`, where a chunk of clients is a task
    on any free CPU. Results of an exact engine come in the order of completion, others in the order
    of the work, so that a seed gives the same last bits each time.

    The engine is put into Ray's object store once, and the parameters once a round. No state of a
    random generator is sent: a task makes the sources of its clients from the seed, or without one
    from the operating system. So a task that Ray repeats, after a process or a machine was lost,
    gives the same sum, or one with fresh draws that nobody has seen.

    A task asks for the share `num_gpus` of a GPU. Raises ConfigError: the cluster has none.
    """

    count = 1

    def __init__(self, engine: Engine, *, cluster: RayCluster, num_gpus: float = 0.0) -> None:
        self._cluster = cluster
        self._num_gpus = num_gpus
        self._is_exact = engine.is_exact
        cluster.check_gpus(num_gpus)
        # In a container, so that each process, not each task, fetches the engine once.
        self._engine = ray.put(engine), "cuda" if num_gpus else "cpu"
        self._waiting: list[Task] = []

    def replies(self, params: Tensor, works: Iterable[Any]) -> Iterator[PartialReply]:
        """The replies of each piece of work, from the same initial parameters. Raises RunLostError:
        one was lost more than `RETRIES` times."""
        self.close()
        self._use_machines_that_joined()
        held = ray.put(params.cpu().numpy())
        for work in works:
            self._waiting.append(
                self._cluster.start(_train, self._engine, held, work, num_gpus=self._num_gpus)
            )
            if len(self._waiting) >= QUEUED * self.count:
                yield self._result()
        while self._waiting:
            yield self._result()

    def _use_machines_that_joined(self) -> None:
        """If machines are lost, the chunks stay the same, so that the sums do not depend on the
        loss."""
        self._cluster.check_nodes()
        cpus = self._cluster.has("CPU")
        if self._num_gpus:
            by_gpu = int(self._cluster.has("GPU") / self._num_gpus)
        else:
            by_gpu = cpus
        self.count = max(self.count, min(cpus, by_gpu))

    def _result(self) -> PartialReply:
        done = ray.wait(self._waiting if self._is_exact else self._waiting[:1])[0][0]
        self._waiting.remove(done)
        replies: PartialReply
        replies, values = result(done, "a chunk of clients")
        return replace(replies, values=read_only(values))

    def close(self) -> None:
        """Cancels the remaining tasks."""
        for task in self._waiting:
            ray.cancel(task)
        self._waiting.clear()


def _train(
    held: tuple[Task, str], params: NDArray[Any], work: Any
) -> tuple[PartialReply, NDArray[Any]]:
    """Replies without their sum, and the sum."""
    replies = _loaded(held)(torch.from_numpy(params.copy()), work)
    values = replies.values
    return replace(replies, values=torch.empty(0, dtype=values.dtype)), values.numpy()


@lru_cache(maxsize=1)
def _loaded(held: tuple[Task, str]) -> Train:
    engine, device = held
    return ray.get(engine).on(torch.device(device)).replies  # type: ignore[no-any-return]


@contextmanager
def connected(
    address: str | None, *, models: Iterable[str] = (), token: Path | None = None
) -> Iterator[RayCluster]:
    """A context with a connection to the cluster at an address. Its nodes are checked.

    Args:
      address: `host:port` of its head, or `auto` for the one to which this machine belongs. None
        starts one here, with as many CPUs as this process may use. It ends with the block, however
        that ends, and with this process.
      models: the names of the models that tasks build.
      token: see `RayCluster`.

    Raises:
      ConfigError: there is no such cluster, it can't be reached, or a node has other versions than
        this machine.
    """
    own = tuple(sorted({name for name in models if OWN in name and not name.startswith(HF)}))
    with ExitStack() as held:
        if not ray.is_initialized():  # otherwise the caller ends it
            if address is None:
                # Ray's logs, and data that do not fit into memory, are removed with it.
                held.enter_context(_for_this_machine(held.enter_context(scratch_folder())))
            held.callback(ray.shutdown)
            _start() if address is None else _join(address)
        cluster = RayCluster(own, versions(own), token)
        try:
            cluster.check_nodes()
        except RunLostError as error:
            raise ConfigError(str(error)) from error
        yield cluster


@contextmanager
def _for_this_machine(folder: Path) -> Iterator[None]:
    """A context in which a started cluster is private to this process. Ray reads its settings only
    once, so they are reloaded, also afterwards, since this process may join another cluster."""
    settings = ray_environment(folder)
    kept = {name: os.environ.get(name) for name in settings}
    before = ray_constants.ENABLE_RAY_CLUSTER
    _set(settings, several_machines=False)
    try:
        yield
    finally:
        _set(kept, several_machines=before)


def _set(settings: Mapping[str, str | None], *, several_machines: bool) -> None:
    for name, value in settings.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})
    ray_constants.ENABLE_RAY_CLUSTER = several_machines
    AuthenticationTokenLoader.instance().reset_cache()
    Config.initialize("")


def _start() -> None:
    try:
        _connect("local", num_cpus=len(os.sched_getaffinity(0)), include_dashboard=False)
    except Exception as error:  # Ray has no error class for a process that did not start
        raise ConfigError(
            f"engine=ray can't start Ray on this machine: {one_line(error)}"
        ) from error
    address = ray.get_runtime_context().gcs_address
    if not address.startswith("127.") or get_authentication_mode() != AuthenticationMode.TOKEN:
        raise ConfigError(
            f"engine=ray: Ray {ray.__version__} can be reached from other machines, at {address}"
        )


def _join(address: str) -> None:
    if address == ANY:
        named = os.environ.get("RAY_ADDRESS", ANY)
    else:
        named = address
    if named != ANY:
        _reach(named)
    try:
        _connect(named)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"ray.address={address} can't be joined: {one_line(error.__cause__ or error)}"
        ) from error


def _reach(address: str) -> None:
    """Checks that a host can be reached, as Ray itself would try for a minute."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        raise ConfigError(
            f"ray.address must be null, {ANY} or host:port of a cluster's head (got {address})"
        )
    try:
        socket.create_connection((host, int(port)), REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(f"ray.address={address} can't be reached: {error}") from error


def _connect(address: str, **settings: Any) -> None:
    # Ray counts retries of tasks that it kills for lack of memory separately.
    os.environ.setdefault("RAY_task_oom_retries", str(RETRIES))
    with _own_sigterm(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # from Ray, on possible future changes
        ray.init(address, log_to_driver=False, logging_level=logging.WARNING, **settings)


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """A context that keeps this process's handler of SIGTERM, which Ray replaces when it connects.
    A signal that arrives in the meantime is not lost."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:
        signal.signal(signal.SIGTERM, handler)
        signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, handler)


def _alive() -> dict[str, str]:
    """The names of the living nodes, by their Ray ids."""
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return {node["NodeID"]: node["NodeManagerHostname"] for node in nodes if node["Alive"]}


def one_line(error: BaseException) -> str:
    """An error in one line; for a task, the error that was raised in it."""
    if isinstance(error, RayTaskError):
        told = error.cause
    else:
        told = error
    return " ".join(str(told).split()) or type(told).__name__


def _digest(paths: Iterable[Path], folder: Path) -> str:
    digest = hashlib.sha256()
    for path in paths:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(folder)} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]
