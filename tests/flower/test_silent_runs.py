"""A run of another app whose clients all go wrong ends after two rounds, and says what is wrong
with their replies."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
from flwr.app import Array, ArrayRecord, Message, MessageType, MetricRecord, RecordDict

from discreet.flower.strategy_settings import PrivateEvaluation
from discreet.ledger.durable_ledger import DurableLedger
from discreet.run_files.run_folder import RunFolder
from discreet.server.transport import NobodyAnswers
from tests.flower.flower_apps import (
    START,
    Answer,
    Nodes,
    changed_by,
    replying,
    run,
    status_of,
    strategy,
)

WRONG_ARRAYS = {
    "each array has the prefix '_module.' before its name": {
        f"_module.net.{name}": START[name] for name in START
    },
    "each array lacks the prefix 'net.' that its name has in initial_arrays": START,
    "2 arrays in place of 3; missing: 'net.steps'": {
        f"net.{name}": START[name] for name in ("weight", "bias")
    },
    "4 arrays in place of 3; not asked for: 'net.scale'": {
        f"net.{name}": START["bias"] for name in (*START, "scale")
    },
    "missing: 'net.bias' and 2 more; not asked for: 'embedding' and 1 more": {
        "embedding": START["bias"],
        "z": START["bias"],
    },
}


@pytest.mark.parametrize("said", WRONG_ARRAYS)
def test_a_run_whose_clients_all_send_other_arrays_ends_after_two_rounds(
    said: str, tmp_path: Path
) -> None:
    sends = replying(
        RecordDict(
            {
                "arrays": ArrayRecord(
                    {name: Array(each) for name, each in WRONG_ARRAYS[said].items()}
                )
            }
        )
    )
    made, begins = (
        strategy(tmp_path / "run"),
        {f"net.{name}": Array(values) for name, values in START.items()},
    )
    with pytest.raises(NobodyAnswers, match=f"in 2 rounds in a row .*{re.escape(said)}"):
        made.start(
            Nodes(dict.fromkeys(range(1, 7), sends)),
            ArrayRecord(begins),
            num_rounds=30,
            timeout=2.0,
        )
    assert DurableLedger(tmp_path / "run" / "ledger.db").spent("user").num_releases == 2
    assert status_of(tmp_path / "run").state == "interrupted"


def rating(**metrics: float) -> Answer:
    """A client that trains, and that says this of a model."""

    def answer(message: Message) -> RecordDict:
        evaluates = message.metadata.message_type.startswith(MessageType.EVALUATE)
        return (
            RecordDict({"metrics": MetricRecord(metrics)})
            if evaluates
            else changed_by(0.01)(message)
        )

    return answer


@pytest.mark.parametrize(
    ("metrics", "said"),
    [
        ({"accuracy": 87.5}, r"a number from 0 to 1 \(got 87.5\)"),
        ({"accuracy": -0.1}, r"a number from 0 to 1 \(got -0.1\)"),
        ({"accuracy": math.nan}, r"a number from 0 to 1 \(got nan\)"),
        ({"acc": 0.9, "loss": 1.0}, r"\(got none; there are acc, loss\)"),
    ],
)
def test_ratings_that_no_client_gives_in_its_range_end_the_run_and_are_called_noise(
    metrics: dict[str, float], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    grid = Nodes(dict.fromkeys(range(1, 7), rating(**metrics)))
    with pytest.raises(
        NobodyAnswers, match=f"in 2 ratings in a row no client gave a usable reply; .*{said}"
    ):
        run(tmp_path / "run", grid, num_rounds=20, private_evaluation=PrivateEvaluation(every=2))
    assert "the model after round 2, rated by 0 of 6 clients: accuracy" in caplog.text
    assert caplog.text.count("No client gave a usable answer: these numbers are noise alone") == 2
    assert len(RunFolder(tmp_path / "run").read_metrics()) == 4
