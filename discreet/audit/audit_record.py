"""The files of an audit: audit.json and audit.svg."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import norm

from discreet import __version__
from discreet.audit.canary_scores import Experiment
from discreet.audit.gaussian_fit import fit_gaussians
from discreet.audit.verdict import ASSUMES, SIGNIFICANCE, Verdict
from discreet.reporting.drawing import INK, SERIES, Picture, picture
from discreet.server.run_folder import replace_file, write_json

RECORD, PICTURE = "audit.json", "audit.svg"
BINS = 40
_NOTE = "Filled: how often a score was seen, in the whole run. Lines: the Gaussians that were fitted to the scores."


def score_picture(experiment: Experiment) -> Picture:
    """Two histograms as densities, of the scores of the whole run, in and out, and the Gaussians that are fitted."""
    scores = experiment.observations[-1].scores
    edges = np.histogram_bin_edges(scores.values, BINS)

    def draw(axes: Any) -> str:
        for number, (name, values) in enumerate({"out": scores.unseen, "in": scores.seen}.items()):
            axes.hist(values, edges, density=True, color=SERIES[number], alpha=0.35, label=f"{name}: {len(values)}")
        axes.axhline(0, color=INK, linewidth=0.6)
        axes.set_xlabel("score: what all releases say of a canary")
        axes.set_ylabel("density")
        fit = None if experiment.releases.noise_multiplier is None else fit_gaussians(scores)
        at = np.linspace(edges[0], edges[-1], 200)
        for number, normal in enumerate((fit.unseen, fit.seen) if fit else ()):
            axes.plot(at, norm.pdf(at, normal.mean, normal.spread), color=SERIES[number])
        return _NOTE if fit else ""

    return picture(f"Scores of canaries, {experiment.mechanism}", draw)


def write_audit(folder: Path, experiment: Experiment, verdict: Verdict) -> None:
    """Writes both files into a folder, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    facts = {"discreet": __version__, "settings": experiment.settings, "level": 1 - SIGNIFICANCE, "assumes": ASSUMES}
    write_json(folder / RECORD, facts | asdict(verdict) | {"refuted": verdict.refuted})
    replace_file(folder / PICTURE, score_picture(experiment).svg.encode())
