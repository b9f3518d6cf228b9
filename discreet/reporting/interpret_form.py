"""Shapes in the form of the package interpret, as the arguments of its FeatureValueExplanation."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from discreet.run_files.shapes import FLAGS


def interpret_form(found: Mapping[str, Any]) -> dict[str, Any]:
    """The explanation of the first target: a curve is shown as steps around its places. Pairs are
    in shapes.csv alone."""
    target = next(iter(found["intercepts"]))
    shapes = [
        each for each in found["shapes"] if each["target"] == target and each["kind"] != "map"
    ]
    names = [each["columns"][0] for each in shapes]
    kinds = ["continuous" if _steps(each) else "nominal" for each in shapes]
    sizes = [sum(map(abs, each["effect"])) / len(each["effect"]) for each in shapes]
    return {
        "explanation_type": "global",
        "internal_obj": {
            "overall": {"type": "univariate", "names": names, "scores": sizes},
            "specific": [_specific(each) for each in shapes],
            "mli": [],
        },
        "feature_names": names,
        "feature_types": kinds,
        "name": target,
    }


def _steps(shape: Mapping[str, Any]) -> bool:
    return not isinstance(shape["places"][0][0], str)


def _specific(shape: Mapping[str, Any]) -> dict[str, Any]:
    kept = [row for row, labels in enumerate(shape["places"]) if labels[0] not in FLAGS]
    places = [shape["places"][row][0] for row in kept]
    effects = [shape["effect"][row] for row in kept]
    noise = [(shape["noise"] or [0.0] * len(shape["effect"]))[row] for row in kept]
    if _steps(shape):
        middles = [(one + other) / 2 for one, other in pairwise(places)]
        places = [places[0], *middles, places[-1]]
    return {
        "type": "univariate",
        "names": places,
        "scores": effects,
        "scores_range": [min(effects), max(effects)],
        "upper_bounds": [effect + each for effect, each in zip(effects, noise, strict=True)],
        "lower_bounds": [effect - each for effect, each in zip(effects, noise, strict=True)],
        "density": {"names": [], "scores": []},
    }
