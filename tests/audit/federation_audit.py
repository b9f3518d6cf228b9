"""The audit of a real federation: processes of a SuperLink, node proxy and ServerApp, and nodes
that are canaries.

Each canary is a node of the auditor with a key of its own, which connects to the node proxy or, by
a secret coin, never does. It takes part as any node does, but sends its direction, ten times as
long as the clip norm: the server is to clip it. What is looked at are files that the run writes for
people to read: each checkpoint, and the rows of metrics.csv. The auditor knows that no honest
client takes part, as the adversary of the definition knows what they send.
"""

from __future__ import annotations

import json
import logging
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path

import numpy as np
import torch
from flwr.app import Message, RecordDict

from benchmarks.raw_node import raw_node
from discreet.audit.canaries import Canaries, Experiment, draw_canaries
from discreet.audit.user_audit import SeenRun, check_noised, power_of, scored, together
from discreet.deployment.flower_home import wait_until
from discreet.deployment.local_federation import (
    SERVERS,
    START_SECONDS,
    Federation,
    empty_federation,
)
from discreet.planning.plan import Plan
from discreet.planning.state import State
from discreet.privacy.randomness import secure_source
from discreet.protocol.messages import TrainReply, decode_request
from discreet.run_files.run_folder import OVER, RunFolder, state_of
from discreet.server.resolve import forbid_seed
from discreet.settings.rules import ConfigError, require_extra
from discreet.settings.settings import Settings, flat
from discreet.simulation.processes import RunLostError
from tests.node.clients import encode_reply

logger = logging.getLogger("discreet")

LONG = 10.0  # times the clip norm: what a canary sends
FEWEST = (
    20  # canaries: that no coin at all falls "in", so that no node would come, has probability 1e-6
)
LOOK_SECONDS = (
    0.005  # a round takes longer: it writes its ledger, its row and its checkpoint to disk
)
QUIET = (
    "resume=false",
    "evaluation.kind=none",
    "operations.predictions=false",
    "privacy.user.account=null",
    "privacy.user.too_noisy=warn",
)
NODE_PAUSE = 0.1  # times the number of nodes: the seconds between two looks of each


def audit_federation(plan: Plan, *, canaries: int = 40, runs: int = 1) -> Experiment:
    """Runs a plan in a federation of processes, in a folder that is thrown away, and scores its
    nodes: `canaries` of each run, each in or out by a coin of its own.

    Raises:
      ConfigError: the configuration can't run in a real federation, gives no user-level guarantee
        by noise at the server for clients that are added or removed, or has no room for the
        canaries.
      RunLostError: a run has not ended as planned, or a release was not seen.
      TimeoutError: a process or a node did not start.
    """
    check_federation(plan, canaries, runs)
    require_extra(*SERVERS, why="the node proxy of a federation")
    releases = power_of(plan, canaries * runs)
    names = [str(number) for number in range(canaries)]
    with (
        tempfile.TemporaryDirectory(prefix="discreet-audit-") as folder,
        empty_federation(Path(folder), names) as started,
    ):
        drawn = [draw_canaries(canaries, plan.num_params, secure_source()) for _ in range(runs)]
        seen = [_one_run(started, plan, f"audited-{n}", each) for n, each in enumerate(drawn, 1)]
    facts = {"canaries": canaries, "runs": runs, "honest clients": 0}
    return together("a federation of processes", plan, releases, seen, facts)


def check_federation(plan: Plan, canaries: int, runs: int) -> None:
    """Raises ConfigError if a run can't be audited in a federation, see `audit_federation`."""
    check_noised(plan)
    forbid_seed(plan.settings.seed)
    user = plan.run.user
    in_turns = plan.mechanism.participation.turns is not None
    if user.sampling == "fixed" or in_turns or plan.run.evaluation.private or plan.accounts_itself:
        raise ConfigError(
            "an audit of a federation needs sampling.kind=poisson or everyone, "
            "evaluation.kind=public or none, and privacy.user alone, with aggregation=plain and "
            "independent noise"
        )
    if not FEWEST <= canaries <= user.population_size or runs < 1:
        raise ConfigError(
            f"an audit of a federation needs {FEWEST} .. {user.population_size} canaries, nodes "
            f"of the population, and at least one run (got {canaries} and {runs})"
        )


def words_of(asked: Settings) -> list[str]:
    """Settings as overrides that Hydra reads back, one for each, as JSON; without what would leave
    traces outside the folder of an audited run, and without a public test set, for whether a model
    learns is not what is asked."""
    settings = flat(asdict(asked))
    if settings["data.path"] is not None:
        settings["data.path"] = str(Path(settings["data.path"]).expanduser().resolve())
    return [
        *(f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in settings.items()),
        *QUIET,
    ]


def _one_run(federation: Federation, plan: Plan, name: str, canaries: Canaries) -> SeenRun:
    there, run = np.flatnonzero(canaries.included).tolist(), RunFolder(federation.folder / name)
    with ExitStack() as held:
        for index in there:
            node = raw_node(
                f"127.0.0.1:{federation.proxy_port}",
                authority=federation.authority,
                key=federation.secrets / "nodes" / f"{index}.key",
                behaviour=partial(_answer, canaries, index),
                pause=NODE_PAUSE * len(there),
            )
            held.enter_context(node)
        logger.info("%s: %d of %d canaries are in", name, len(there), len(canaries.included))
        words = *words_of(plan.asked or plan.settings), f"sampling.min_nodes={len(there)}"
        federation.run(name, *words, output=run.path)
        seconds = START_SECONDS + plan.run.rounds * plan.settings.server.round_timeout
        kept = kept_checkpoints(federation, run, seconds=seconds)
    if len(kept) != plan.run.rounds:
        said = federation.says(f"run-{name}").strip().splitlines()
        raise RunLostError(
            f"{len(kept)} of {plan.run.rounds} releases of {name} were seen: "
            f"{said[-1] if said else ''}"
        )
    zeros, ran = torch.zeros_like(kept[0].params), Plan(run.read_config())
    return scored(ran, run, [State(0, zeros, zeros, ran.clip.norm), *kept], canaries)


def _answer(canaries: Canaries, index: int, message: Message) -> RecordDict:
    """The reply of a canary's node."""
    request, params = decode_request(message.content, allowed=lambda _: None)
    update = (LONG * request.clip_norm * canaries.direction(index)).float()
    assert update.shape == params.shape
    return encode_reply(TrainReply(request.round, update, below=bool(canaries.bits[index])))


def kept_checkpoints(federation: Federation, run: RunFolder, *, seconds: float) -> list[State]:
    """The checkpoints that a run writes until it is over, in order; fewer than planned if it fails
    or takes longer."""
    kept, written = list[State](), [0]

    def is_over() -> bool:
        over = (
            state_of(run) in OVER or federation.processes[f"run-{run.path.name}"].poll() is not None
        )
        now = run.checkpoint_path.stat().st_mtime_ns if run.checkpoint_path.exists() else 0
        if now != written[-1] and (found := run.load_checkpoint()) is not None:
            written.append(now)
            kept.extend([found] if not kept or found.round > kept[-1].round else [])
        return over

    with suppress(TimeoutError):  # the caller tells of it
        wait_until(is_over, seconds, "the run is over", every=LOOK_SECONDS)
    return kept
