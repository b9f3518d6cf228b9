"""What an audit leaves behind: audit.json and audit.svg."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from discreet import __version__
from discreet.audit.audit_picture import score_picture
from discreet.audit.canary_scores import Experiment
from discreet.audit.verdict import ASSUMES, SIGNIFICANCE, Judgement, Verdict
from discreet.federated.run_folder import replace_file
from discreet.json_numbers import json_ready
from discreet.reporting.drawing import alone

RECORD, PICTURE = "audit.json", "audit.svg"


def record_of(experiment: Experiment, verdict: Verdict) -> dict[str, Any]:
    """The content of audit.json."""
    return {
        "discreet": __version__,
        "mechanism": verdict.mechanism,
        "settings": experiment.settings,
        "power": verdict.power.says,
        "refuted": verdict.refuted,
        "false_alarm": verdict.false_alarm,
        "level": 1 - SIGNIFICANCE,
        "assumes": ASSUMES,
        "observations": [_judged(judgement) for judgement in verdict.judgements],
    }


def _judged(found: Judgement) -> dict[str, Any]:
    return {
        "name": found.name,
        "claimed": found.claimed,
        "delta": found.delta,
        "adjacency": found.adjacency,
        "estimate": found.estimate,
        "interval": found.interval,
        "bounds": {bound.method: {"epsilon": bound.epsilon, "strict": bound.strict} for bound in found.bounds},
        "refuted_by": list(found.refuted_by),
    }


def write_audit(folder: Path, experiment: Experiment, verdict: Verdict) -> None:
    """Writes both files into a folder, which is made if it is not there.

    Raises:
      OSError: it can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(json_ready(record_of(experiment, verdict)), indent=2, allow_nan=False)
    replace_file(folder / RECORD, f"{text}\n".encode())
    replace_file(folder / PICTURE, alone(score_picture(experiment, verdict.judgements[-1])).encode())
