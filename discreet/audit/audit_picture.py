"""The picture of an audit: how the scores of canaries that were in lie beside those of canaries that were out."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.stats import norm

from discreet.audit.canary_scores import Experiment
from discreet.audit.gaussian_fit import fit_gaussians
from discreet.audit.verdict import Judgement
from discreet.reporting.drawing import INK, SERIES, Picture, canvas, to_svg

BINS = 40
_NOTE = "Filled: how often a score was seen, in the whole run. Lines: the Gaussians that were fitted to the scores."


def score_picture(experiment: Experiment, judgement: Judgement) -> Picture:
    """Two histograms as densities, of the scores of the whole run, and the fitted Gaussians if there is an estimate.

    Args:
      judgement: of the last observation.
    """
    seen = experiment.observations[-1].scores
    title = f"Scores of canaries, {experiment.mechanism}"
    edges = np.linspace(*_ends(seen.seen, seen.unseen), BINS + 1)
    with canvas() as (figure, (axes,)):
        for number, values in enumerate((seen.unseen, seen.seen)):
            label = f"{('out', 'in')[number]}: {len(values)}"
            axes.hist(values, edges, density=True, color=SERIES[number], alpha=0.35, label=label)
        if judgement.estimate is not None:
            fit, at = fit_gaussians(seen), np.linspace(edges[0], edges[-1], 200)
            for number, normal in enumerate((fit.unseen, fit.seen)):
                axes.plot(at, norm.pdf(at, normal.mean, normal.spread), color=SERIES[number])
        axes.axhline(0, color=INK, linewidth=0.6)
        axes.set_xlabel("score: what all releases say of a canary")
        axes.set_ylabel("density")
        return Picture(title, to_svg(figure, title), _NOTE if judgement.estimate is not None else "")


def _ends(*groups: NDArray[np.float64]) -> tuple[float, float]:
    """The lowest and the highest score; apart, also if all are one."""
    low, high = min(values.min() for values in groups), max(values.max() for values in groups)
    return float(low), float(high) if high > low else float(low) + 1.0
