"""What an audit leaves behind."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from discreet.audit.audit_record import RECORD, write_audit
from discreet.audit.canary_scores import Claim, Experiment, Observation, Releases
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
