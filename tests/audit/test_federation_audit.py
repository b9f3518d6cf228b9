"""The audit of a real federation: a SuperLink, its gate and a ServerApp as processes, asked by nodes that are canaries.

Each canary node is in, or is never started, by a coin. The auditor sees what every node sees: the model of each round.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from flwr.app import Message, RecordDict
from scipy import stats
from torch import Tensor

from discreet.audit.canaries import Canaries, draw_canaries
from discreet.audit.canary_scores import CanaryScores, Claim, Experiment, Observation
from discreet.audit.verdict import judge
from discreet.deployment.local_federation import Federation, make_secrets
from discreet.federated.durable_ledger import DurableLedger
from discreet.federated.messages import TrainReply, decode_request, encode_reply
from discreet.privacy.privacy_ledger import PrivacyLedger
from discreet.privacy.randomness import seeded_source
from tests.deployment.raw_node import Behaviour, raw_node

pytestmark = pytest.mark.slow

CANARIES, ROUNDS, Z, C, DELTA = 16, 4, 1.0, 0.5, 1e-3
NAMES = [f"canary-{number}" for number in range(CANARIES)]
PARAMS = 650  # of the linear model of the digits
RUN = (
    *(f"rounds={ROUNDS}", "model.name=linear", f"data.num_clients={CANARIES}", f"privacy.delta={DELTA}"),
    *("sampling.kind=everyone", "server.momentum=0", "server.learning_rate=1", "server.round_timeout=240"),
    *(f"privacy.user.noise_multiplier={Z}", "privacy.user.clip.kind=fixed", f"privacy.user.clip.norm={C}"),
    "privacy.user.too_noisy=warn",
)


def behaviour(direction: Tensor, seen: dict[int, Tensor]) -> Behaviour:
    """Sends its direction, and takes down the model that it is sent."""

    def answer(message: Message) -> RecordDict:
        request, params = decode_request(message.content)
        seen[request.round] = params
        update = (10 * request.clip_norm * direction).float()  # the server is to clip it
        return encode_reply(TrainReply(request.round, update, below=False))

    return answer


def federate(folder: Path, canaries: Canaries) -> tuple[Tensor, PrivacyLedger]:
    """What the rounds together have released, and what the ledger says of it."""
    federation, seen = Federation(folder, make_secrets(folder / "secrets", NAMES)), dict[int, Tensor]()
    there = np.flatnonzero(canaries.included).tolist()
    try:
        federation.start_superlink()
        with ExitStack() as nodes:
            for number in there:
                key, address = (
                    federation.secrets / "nodes" / f"{NAMES[number]}.key",
                    f"127.0.0.1:{federation.gate_port}",
                )
                act = behaviour(canaries.direction(number), seen)
                nodes.enter_context(raw_node(address, authority=federation.authority, key=key, behaviour=act))
            run = federation.run("audited", *RUN, f"sampling.min_nodes={len(there)}")
            federation.finish(run)
        assert [row["replies"] for row in run.read_metrics()] == [len(there)] * ROUNDS
        checkpoint = run.load_checkpoint()
        assert checkpoint is not None
        return (checkpoint.params - seen[1]) * CANARIES, DurableLedger(run.ledger_path).spent("user")
    finally:
        federation.stop()


def experiment(scores: CanaryScores, spent: PrivacyLedger) -> Experiment:
    claim = Claim(spent.epsilon(DELTA), DELTA, "add or remove one client")
    return Experiment("a federation of processes", (Observation("run", claim, scores),), {"rounds": ROUNDS})


def test_a_federation_of_processes_shows_its_canaries_and_no_more_than_it_claims(tmp_path: Path) -> None:
    # The coins are fixed, for no node at all may come of them; the noise is the federation's own, and secure.
    canaries = draw_canaries(CANARIES, PARAMS, seeded_source(7951))
    released, spent = federate(tmp_path, canaries)
    scores = CanaryScores(canaries.along(released) / (C * Z**2), canaries.included)
    left = (scores.scores - ROUNDS / Z**2 * scores.included) / (ROUNDS**0.5 / Z)
    # Without the canaries independent standard Gaussians are left. False-alarm rate 1e-9.
    assert min(stats.chi2.sf(left @ left, CANARIES), stats.chi2.cdf(left @ left, CANARIES)) > 5e-10
    assert not judge(experiment(scores, spent), false_alarm=1e-9).refuted
