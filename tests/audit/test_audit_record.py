"""What an audit leaves behind."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np

from discreet.audit.audit_record import RECORD, write_audit
from discreet.audit.canary_scores import Claim, Experiment, Observation, Releases, Scores
from discreet.audit.verdict import judge
from tests.audit.made import gaussian_scores

CLAIM = Claim(3.139, 1e-3, "add or remove one client")
EXPERIMENT = Experiment(
    "user level",
    (
        Observation("round 1", CLAIM, gaussian_scores(np.random.default_rng(1), canaries=300, noise=1.0)),
        Observation("run", CLAIM, gaussian_scores(np.random.default_rng(2), canaries=300, noise=0.5)),
    ),
    {"canaries": 300},
    Releases(2, 1.0, 1.0, CLAIM),
)


def test_the_record_holds_the_claim_beside_what_was_found(tmp_path: Path) -> None:
    verdict = judge(EXPERIMENT)
    write_audit(tmp_path / "new", EXPERIMENT, verdict)
    record = json.loads((tmp_path / "new" / RECORD).read_text())
    first, run = record["observations"]
    assert (first["name"], first["claimed"], first["delta"]) == ("round 1", 3.139, 1e-3)
    assert run["interval"][0] < run["estimate"] < run["interval"][1]
    assert record["power"].startswith("what it could have found")
    assert (first["refuted_by"], run["refuted_by"], record["refuted"]) == ([], ["Gaussian fit"], True)
    assert set(run["bounds"]) <= set(record["assumes"])


def test_what_is_infinite_or_not_known_is_written_as_json_can(tmp_path: Path) -> None:
    included = np.arange(400) % 2 == 0
    scores = Scores(np.random.default_rng(3).laplace(size=400) + included, included)
    claim = Claim(math.inf, 1e-5, "replace")
    experiment = Experiment("Laplace", (Observation("run", claim, scores),), {}, Releases(1, 1.0, 1.0, claim))
    write_audit(tmp_path, experiment, judge(experiment))
    found = json.loads((tmp_path / RECORD).read_text())["observations"][0]
    assert (found["claimed"], found["estimate"], found["interval"]) == ("inf", None, None)
