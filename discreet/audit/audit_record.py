"""The files of an audit: audit.json and audit.svg."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm

from discreet import __version__
from discreet.audit.canary_scores import Experiment
from discreet.audit.verdict import ASSUMES, SIGNIFICANCE, Judgement, Verdict
from discreet.reporting.drawing import INK, SERIES, Picture, picture
from discreet.server.run_folder import replace_file, write_json

RECORD, PICTURE = "audit.json", "audit.svg"
BINS = 40
_NOTE = "Filled: how often a score was seen, in the whole run. Lines: the Gaussians that were fitted to the scores."


def record_of(experiment: Experiment, verdict: Verdict) -> dict[str, Any]:
    """The content of audit.json."""
    return {
        "discreet": __version__,
        "mechanism": verdict.mechanism,
        "settings": experiment.settings,
        "power": verdict.outlook,
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
    edges = np.histogram_bin_edges(scores.values, BINS)

    def draw(axes: Any) -> str:
        for number, (name, values) in enumerate({"out": scores.unseen, "in": scores.seen}.items()):
            axes.hist(values, edges, density=True, color=SERIES[number], alpha=0.35, label=f"{name}: {len(values)}")
        axes.axhline(0, color=INK, linewidth=0.6)
        axes.set_xlabel("score: what all releases say of a canary")
        axes.set_ylabel("density")
        at = np.linspace(edges[0], edges[-1], 200)
        for number, normal in enumerate((fit.unseen, fit.seen) if fit else ()):
            axes.plot(at, norm.pdf(at, normal.mean, normal.spread), color=SERIES[number])
        return _NOTE if fit else ""

    return picture(f"Scores of canaries, {experiment.mechanism}", draw)


def write_audit(folder: Path, experiment: Experiment, verdict: Verdict) -> None:
    """Writes both files into a folder, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / RECORD, record_of(experiment, verdict))
    replace_file(folder / PICTURE, score_picture(experiment, verdict.judgements[-1]).svg.encode())
