"""The files of an audit: audit.json and audit.svg."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm

from discreet import __version__
from discreet.audit.canary_scores import Experiment
from discreet.audit.verdict import ASSUMES, SIGNIFICANCE, Judgement, Verdict
from discreet.logs import json_ready
from discreet.reporting.drawing import INK, SERIES, Picture, canvas, to_svg
from discreet.server.run_folder import replace_file

RECORD, PICTURE = "audit.json", "audit.svg"
BINS = 40
_NOTE = "Filled: how often a score was seen, in the whole run. Lines: the Gaussians that were fitted to the scores."


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
        "observations": [
            {
                "name": found.name,
                "claimed": found.claim.epsilon,
                "delta": found.claim.delta,
                "adjacency": found.claim.adjacency,
                "estimate": found.estimate,
                "interval": found.interval,
                "bounds": {bound.method: {"epsilon": bound.epsilon, "strict": bound.strict} for bound in found.bounds},
                "refuted_by": found.refuted_by,
            }
            for found in verdict.judgements
        ],
    }


def score_picture(experiment: Experiment, run: Judgement) -> Picture:
    """Two histograms as densities, of the scores of the whole run, in and out, and the Gaussians that are fitted."""
    scores, fit = experiment.observations[-1].scores, run.fit
    title = f"Scores of canaries, {experiment.mechanism}"
    edges = np.histogram_bin_edges(scores.values, BINS)
    with canvas() as (figure, (axes,)):
        for number, (name, values) in enumerate({"out": scores.unseen, "in": scores.seen}.items()):
            axes.hist(values, edges, density=True, color=SERIES[number], alpha=0.35, label=f"{name}: {len(values)}")
        if fit is not None:
            at = np.linspace(edges[0], edges[-1], 200)
            for number, normal in enumerate((fit.unseen, fit.seen)):
                axes.plot(at, norm.pdf(at, normal.mean, normal.spread), color=SERIES[number])
        axes.axhline(0, color=INK, linewidth=0.6)
        axes.set_xlabel("score: what all releases say of a canary")
        axes.set_ylabel("density")
        return Picture(title, to_svg(figure, title), _NOTE if fit is not None else "")


def write_audit(folder: Path, experiment: Experiment, verdict: Verdict) -> None:
    """Writes both files into a folder, which is made if it is not there.

    Raises:
      OSError: it can't be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(json_ready(record_of(experiment, verdict)), indent=2, allow_nan=False)
    replace_file(folder / RECORD, f"{text}\n".encode())
    replace_file(folder / PICTURE, score_picture(experiment, verdict.judgements[-1]).svg.encode())
