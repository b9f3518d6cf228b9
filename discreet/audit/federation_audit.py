"""The audit of a real federation: a SuperLink, its gate and a ServerApp as processes, and nodes that are canaries.

Each canary is a node of the auditor with a key of its own, which connects to the gate or, by a secret coin, never does.
It takes part as any node does, but sends its direction, ten times as long as the clip norm: the server is to clip it.
What is looked at are files that the run writes for people to read: each checkpoint, and the rows of metrics.csv. The
auditor knows that no honest client takes part, as the adversary of the definition knows what they send.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Message, RecordDict

from discreet.audit.auditor import Auditor
from discreet.audit.canaries import Canaries, draw_canaries
from discreet.audit.canary_scores import Experiment
from discreet.audit.user_audit import SeenRun, check_noised, facts_of, observations_of, releases_of
from discreet.audit.verdict import outlook
from discreet.config import ConfigError, RunConfig
from discreet.deployment.interruption import override
from discreet.deployment.local_federation import SERVERS, START_SECONDS, Federation, make_secrets
from discreet.deployment.raw_node import raw_node
from discreet.extras import require
from discreet.federated.durable_ledger import DurableLedger
from discreet.federated.guarantees import USER
from discreet.federated.messages import TrainReply, decode_request, encode_reply
from discreet.federated.round import empty_sum
from discreet.federated.run_folder import RunFolder
from discreet.federated.run_lost import RunLostError
from discreet.federated.run_plan import round_settings
from discreet.federated.session import check_secure, checked
from discreet.federated.state import State
from discreet.privacy.randomness import secure_source
from discreet.settings import client_settings
from discreet.tasks.model_check import num_params_of

logger = logging.getLogger("discreet")

LONG = 10.0  # times the clip norm: what a canary sends
FEWEST = 20  # canaries: that no coin at all falls "in", so that no node would come, has probability 1e-6
LOOK_SECONDS = 0.005  # a round takes longer: it writes its ledger, its row and its checkpoint to disk
NODE_PAUSE = 0.1  # times the number of nodes: the seconds between two looks of each


@dataclass(frozen=True)
class FederationAudit:
    """What is put to the test: `canaries` nodes of each of `runs` runs, each in or out by a coin of its own."""

    canaries: int = 40
    runs: int = 1


def audit_federation(config: RunConfig, audit: FederationAudit) -> Experiment:
    """Runs what `config` says in a federation of processes whose nodes are canaries, and scores them.

    Everything lies in a folder that is thrown away; the account of a population is not charged.

    Raises:
      ConfigError: the configuration can't run in a real federation, gives no user-level guarantee by noise at the
        server for clients that are added or removed, or has no room for the canaries.
      RunLostError: a run has not ended as planned, or a release was not seen.
      TimeoutError: a process or a node did not start.
    """
    config = in_federation(config, audit)
    resolved, task = checked(config)
    num_params = num_params_of(resolved.model.name, task)
    require(*SERVERS, extra="deployment", why="the gate of a federation")
    releases = releases_of(resolved)
    logger.info("%s", outlook(releases, audit.canaries * audit.runs, rounds=resolved.rounds))
    with tempfile.TemporaryDirectory(prefix="discreet-audit-") as folder, _started(Path(folder), audit) as federation:
        seen = [_one_run(federation, config, resolved, number, num_params=num_params) for number in range(audit.runs)]
    facts = {"canaries": audit.canaries, "runs": audit.runs, "honest clients": 0}
    found = observations_of(resolved, seen)
    return Experiment("a federation of processes", found, facts | facts_of(resolved, seen), releases)


def in_federation(config: RunConfig, audit: FederationAudit) -> RunConfig:
    """The configuration as the audited runs have it: without what would leave traces outside their folder, and without
    a public test set, for whether a model learns is not what is asked.

    Raises:
      ConfigError: see `audit_federation`.
    """
    check_noised(config)
    check_secure(config)
    if config.sampling.kind == "fixed" or config.evaluation.private or client_settings(config).accounts_itself:
        raise ConfigError(
            "an audit of a federation needs sampling.kind=poisson or everyone, evaluation.kind=public or none, and "
            "privacy.user alone, with aggregation=plain"
        )
    if not FEWEST <= audit.canaries <= config.population_size or audit.runs < 1:
        raise ConfigError(
            f"an audit of a federation needs {FEWEST} .. {config.population_size} canaries, nodes of the population, "
            f"and at least one run (got {audit.canaries} and {audit.runs})"
        )
    path = None if config.data.path is None else str(Path(config.data.path).expanduser().resolve())
    user = replace(config.privacy.user, account=None, too_noisy="warn")
    return replace(
        config,
        output_dir=None,
        resume=False,
        tracking="none",
        data=replace(config.data, path=path),
        evaluation=replace(config.evaluation, kind="none"),
        operations=replace(config.operations, metrics_port=None, predictions=False),
        privacy=replace(config.privacy, user=user),
    )


def words_of(section: Any, prefix: str = "") -> list[str]:
    """A configuration as overrides that Hydra reads back, one for each setting."""
    words = []
    for item in fields(section):
        value, name = getattr(section, item.name), prefix + item.name
        words += words_of(value, f"{name}.") if is_dataclass(value) else [f"{name}={_as_hydra(value)}"]
    return words


def _as_hydra(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list):
        return f"[{','.join(_as_hydra(each) for each in value)}]"
    return override("", Path(value)).removeprefix("=") if isinstance(value, str) else repr(value)


@contextmanager
def _started(folder: Path, audit: FederationAudit) -> Iterator[Federation]:
    """A SuperLink and its gate, which know the keys of all canaries; every process ends with the block."""
    federation = Federation(folder, make_secrets(folder / "secrets", map(_name, range(audit.canaries))))
    try:
        federation.start_superlink()
        yield federation
    finally:
        federation.stop()


def _name(canary: int) -> str:
    return f"canary-{canary}"


def _one_run(
    federation: Federation, config: RunConfig, resolved: RunConfig, number: int, *, num_params: int
) -> SeenRun:
    canaries = draw_canaries(len(list(federation.secrets.glob("nodes/*.key"))), num_params, secure_source())
    there = np.flatnonzero(canaries.included).tolist()
    run = RunFolder(federation.folder / f"audited-{number}")
    with ExitStack() as held:
        for canary in there:
            held.enter_context(_connected(federation, canaries, canary, pause=NODE_PAUSE * len(there)))
        logger.info("run %d: %d of %d canaries are in", number + 1, len(there), len(canaries.included))
        kept = held.enter_context(kept_checkpoints(run, federation.folder / f"kept-{number}"))
        federation.run(run.path.name, *words_of(config), f"sampling.min_nodes={len(there)}", output=run.path)
        with suppress(TimeoutError):  # told below: with fewer releases than are planned, and what was written last
            federation.finish(run, seconds=START_SECONDS + resolved.rounds * resolved.server.round_timeout)
    if len(kept) != resolved.rounds:
        said = federation.says(f"run-{run.path.name}").strip().splitlines()
        raise RunLostError(
            f"{len(kept)} of {resolved.rounds} releases of run {number + 1} were seen: {said[-1] if said else ''}"
        )
    return scored(run, kept, canaries)


def _connected(federation: Federation, canaries: Canaries, index: int, *, pause: float) -> AbstractContextManager[None]:
    """A node that answers as its canary does."""

    def answer(message: Message) -> RecordDict:
        request, params = decode_request(message.content)
        update = (LONG * request.clip_norm * canaries.direction(index)).float()
        assert update.shape == params.shape
        return encode_reply(TrainReply(request.round, update, below=bool(canaries.bits[index])))

    address, key = f"127.0.0.1:{federation.gate_port}", federation.secrets / "nodes" / f"{_name(index)}.key"
    return raw_node(address, authority=federation.authority, key=key, behaviour=answer, pause=pause)


@contextmanager
def kept_checkpoints(run: RunFolder, folder: Path) -> Iterator[list[State]]:
    """Each checkpoint that a run writes while the block runs, in order; the list is filled when the block ends.

    A thread looks for a new file and links it into `folder`: one that is replaced a moment later is still whole.
    """
    ended, kept, found = threading.Event(), list[RunFolder](), list[State]()

    def look() -> None:
        last = 0
        while not ended.wait(LOOK_SECONDS):
            last = _link(run, folder, kept, last)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()
    found.extend(checkpoint for each in kept if (checkpoint := each.load_checkpoint()) is not None)


def _link(run: RunFolder, folder: Path, kept: list[RunFolder], last: int) -> int:
    """Links the checkpoint unless it is the file `last`, an inode; a file that is linked keeps its number."""
    try:
        if os.stat(run.checkpoint_path).st_ino == last:
            return last
        new = RunFolder(folder / str(len(kept)))
        new.checkpoint_path.parent.mkdir(parents=True, exist_ok=True)
        os.link(run.checkpoint_path, new.checkpoint_path)
    except FileNotFoundError:
        return last  # before the first round
    kept.append(new)
    return os.stat(new.checkpoint_path).st_ino


def scored(run: RunFolder, releases: Sequence[State], canaries: Canaries) -> SeenRun:
    """Scores the canaries by the checkpoints after each round and by the rows of metrics.csv."""
    config = run.read_config()
    settings, zeros = round_settings(config), torch.zeros_like(releases[0].params)
    start = State(0, zeros, zeros, config.privacy.user.clip.norm)
    auditor = Auditor(settings, canaries, lambda: empty_sum(len(zeros), auditor.before.clip_norm, settings.user), start)
    for after, row in zip(releases, run.read_metrics(), strict=True):
        auditor.evaluate(after)
        auditor.row(row)
    return SeenRun(auditor.rounds, canaries.included, DurableLedger(run.ledger_path).spent(USER))
