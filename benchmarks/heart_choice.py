"""How the settings of experiment=heart were chosen: by cross-validation on the training parts of the four hospitals.

    python -m benchmarks.heart_choice FOLDER --out docs/results/heart_choice.csv

The test parts are not looked at. Each setting is trained at epsilon 8, 2 and 1 and without noise on four fifths of the
486 training patients, stratified by hospital and label, and judged on the last fifth; four divisions into fifths, and
five draws of noise for each. What is chosen has the highest mean over the four. The choice itself is not private: it
looks at patients, and no epsilon covers that.

The model is a logistic regression whose steps are those of the experiment: each hospital's clipped sum over all its
patients, its own noise, the public constant 200, momentum at the server.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from discreet.privacy.calibration import noise_multiplier_for_epsilon
from discreet.privacy.events import poisson_round_event
from discreet.tasks.heart import HOSPITALS, load_hospitals

DIVISOR, DELTA = 200, 1e-3  # training.batch_size and privacy.delta of the experiment
EPSILONS = (math.inf, 8.0, 2.0, 1.0)
DIVISIONS, FIFTHS, NOISES = 4, 5, 5
ROUNDS, MOMENTA = (20, 40, 60, 100), (0.0, 0.5, 0.8, 0.9)
PACES, CLIPS = (3.0, 10.0, 30.0), (0.3, 0.5, 1.0, 2.0)  # a pace is learning_rate / (1 - momentum)
COLUMNS = ("rounds", "momentum", "learning_rate", "clip", *(f"epsilon {each:g}" for each in EPSILONS), "mean")

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Settings:
    """One way to train: rounds, the server's momentum, the clients' learning rate, the clip norm."""

    rounds: int
    momentum: float
    learning_rate: float
    clip: float


@dataclass(frozen=True, eq=False)
class Patients:
    """Inputs (n, 14), of which the last is 1, labels (n,), and whose patient each is (n,)."""

    inputs: Array
    labels: Array
    hospitals: Array

    def of(self, rows: Array) -> Patients:
        """Those rows."""
        return Patients(self.inputs[rows], self.labels[rows], self.hospitals[rows])


def training_patients(folder: str) -> Patients:
    """The training parts of all hospitals."""
    parts = [hospital.examples(hospital.split()[0]) for hospital in load_hospitals(folder)]
    inputs = np.concatenate([part.inputs.double().numpy() for part in parts])
    labels = np.concatenate([part.targets.numpy() for part in parts])
    owners = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    return Patients(np.column_stack([inputs, np.ones(len(inputs))]), labels, owners)


@cache
def noise_multiplier(epsilon: float, rounds: int) -> float:
    """What a hospital draws for `rounds` steps over all its patients."""
    if math.isinf(epsilon):
        return 0.0
    return noise_multiplier_for_epsilon(
        epsilon,
        make_event=lambda noise: poisson_round_event(1.0, noise_multiplier=noise),
        count=rounds,
        delta=DELTA,
        accountant="pld",
    )


def trained(patients: Patients, how: Settings, epsilon: float, generator: np.random.Generator) -> Array:
    """The difference of the two classes' weights, (draws of noise, 14).

    A patient's gradient is (p - y) x for one class and its opposite for the other: its norm is sqrt(2) |p - y| |x|.
    """
    x, sizes = patients.inputs, np.sqrt(2) * np.linalg.norm(patients.inputs, axis=1)
    deviation = noise_multiplier(epsilon, how.rounds) * how.clip
    weights = velocity = np.zeros((NOISES if deviation else 1, x.shape[1]))
    for _ in range(how.rounds):
        errors = 1 / (1 + np.exp(-np.clip(weights @ x.T, -30, 30))) - patients.labels
        shares = np.minimum(1, how.clip / np.maximum(np.abs(errors) * sizes, 1e-12))
        # Two classes at each of four hospitals: the difference has the noise of eight draws.
        noise = generator.normal(0, np.sqrt(2 * len(HOSPITALS)) * deviation, weights.shape)
        gradient = (2 * (shares * errors) @ x + noise) / (DIVISOR * len(HOSPITALS))
        velocity = how.momentum * velocity - how.learning_rate * gradient
        weights = weights + velocity
    return weights


def fifths(patients: Patients) -> Iterator[tuple[Array, Array]]:
    """The divisions into training and judging rows."""
    from sklearn.model_selection import StratifiedKFold

    strata = 2 * patients.hospitals + patients.labels  # all training patients of Switzerland have the disease
    for seed in range(DIVISIONS):
        yield from StratifiedKFold(FIFTHS, shuffle=True, random_state=seed).split(patients.inputs, strata)


def judged(patients: Patients, how: Settings, epsilon: float) -> float:
    """The share of patients, in per cent, whom a model that did not see them tells right."""
    generator, right = np.random.default_rng(70921), 0.0
    for train, rest in fifths(patients):
        weights, judge = trained(patients.of(train), how, epsilon, generator), patients.of(rest)
        right += float(((weights @ judge.inputs.T > 0) == judge.labels).mean(axis=0).sum())
    return 100 * right / (DIVISIONS * len(patients.labels))


def grid() -> Iterator[Settings]:
    """Everything that is tried."""
    for rounds, momentum, pace, clip in itertools.product(ROUNDS, MOMENTA, PACES, CLIPS):
        yield Settings(rounds, momentum, round(pace * (1 - momentum), 6), clip)


def main(words: Sequence[str]) -> int:
    """Tries the grid, writes it, and says which is the best."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.heart_choice", description=__doc__.splitlines()[0])
    parser.add_argument("folder", help="with the four processed.*.data files")
    parser.add_argument("--out", type=Path, required=True, help="a row for each setting, as CSV")
    arguments = parser.parse_args(words)
    patients, best = training_patients(arguments.folder), [""] * len(COLUMNS)
    with arguments.out.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for how in grid():
            found = [judged(patients, how, epsilon) for epsilon in EPSILONS]
            values = (*vars(how).values(), *found, float(np.mean(found)))
            row = [f"{value:.6g}" if place < 4 else f"{value:.2f}" for place, value in enumerate(values)]
            writer.writerow(row)
            file.flush()
            best = max(best, row, key=lambda each: float(each[-1] or 0))
    print(" ".join(f"{name}={value}" for name, value in zip(COLUMNS, best, strict=True)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
