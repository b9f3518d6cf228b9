"""Four hospitals: accuracy by epsilon, with the true epsilon of each hospital from its own ledger.

    python -m benchmarks.heart_curve FOLDER --out docs/results/heart.csv --picture docs/systems/heart_curve.svg
    python -m benchmarks.heart_curve --from docs/results/heart.csv --picture docs/systems/heart_curve.svg
    python -m benchmarks.heart_curve FOLDER --own docs/results/heart_choice.csv --out docs/results/heart_own.csv

FOLDER holds the four processed.*.data files. Each row is a run of experiment=heart at a target epsilon or without noise
(same steps, same clip); with --own, at the settings that were the best for this epsilon alone in the cross-validation
of heart_choice, if it was tried there. Accuracies are those of the last model on the pooled test set and on each
hospital's.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from discreet.client_settings import EXAMPLE
from discreet.config import load_config
from discreet.federated.durable_ledger import CLIENTS_LEDGER, DurableLedger
from discreet.federated.predictions import load_model, own_test_set, predict
from discreet.federated.run_folder import RunFolder
from discreet.reporting.drawing import (
    INK,
    MUTED,
    Picture,
    alone,
    canvas,
    draw_line,
    draw_spread,
    log_axis,
    place_ticks,
    to_svg,
)
from discreet.simulation.in_process import simulate
from discreet.tasks.heart import HOSPITALS, load_hospitals

EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, math.inf)
SEEDS = (31013, 47129, 58211, 60617, 73009)
WITHOUT_NOISE = ("privacy.example.target_epsilon=null", "privacy.example.noise_multiplier=0")
FLAMBY_BEST = 77.9  # per cent on the pooled test set: FedAdam, FedYogi and FedAdagrad, without any privacy
COLUMNS = (
    *("target", "seed", "accuracy", *(f"accuracy {name}" for name in HOSPITALS)),
    *(f"epsilon {name}" for name in HOSPITALS),
)
TRIED = {  # the columns of heart_choice, as settings
    "rounds": "rounds",
    "momentum": "server.momentum",
    "learning_rate": "training.learning_rate",
    "clip": "privacy.example.l2_norm_clip",
}

Row = dict[str, str]


def measured(data: Path, target: float, seed: int, *, more: Sequence[str] = ()) -> Row:
    """One run; `more` are further overrides."""
    noise = WITHOUT_NOISE if math.isinf(target) else (f"privacy.example.target_epsilon={target:g}",)
    with tempfile.TemporaryDirectory() as scratch:
        run = Path(scratch) / "run"
        words = ("experiment=heart", f"data.path={data}", f"seed={seed}", f"output_dir={run}")
        simulate(load_config([*words, *noise, *more]))
        accuracies, epsilons = accuracies_of(run, data), epsilons_of(run)
    values = (*(f"{value:.4f}" for value in accuracies), *(f"{value:.4g}" for value in epsilons))
    return dict(zip(COLUMNS, (f"{target:g}", str(seed), *values), strict=True))


def accuracies_of(run: Path, data: Path) -> list[float]:
    """The share of patients whom a run's model tells right: in the pooled test set, then in each hospital's."""
    saved, pooled = load_model(run), own_test_set(run)
    tables = [pooled, *(hospital.examples(hospital.split()[1]) for hospital in load_hospitals(str(data)))]
    return [float((predict(saved, each.inputs).argmax(dim=1) == each.targets).double().mean()) for each in tables]


def epsilons_of(run: Path) -> list[float]:
    """What each hospital has spent on a patient by its own ledger, at the run's delta."""
    privacy, ledger = RunFolder(run).read_config().privacy, DurableLedger(run / CLIENTS_LEDGER)
    spent = [ledger.spent(EXAMPLE, holder=str(client)) for client in range(len(HOSPITALS))]
    return [each.epsilon(privacy.delta, privacy.accountant) for each in spent]


def means(rows: Sequence[Row], column: str = "accuracy") -> list[tuple[float, float]]:
    """(target, mean over seeds in per cent), ascending; without noise last."""
    return [(target, fmean(values)) for target, values in by_target(rows, column)]


def by_target(rows: Sequence[Row], column: str) -> list[tuple[float, list[float]]]:
    """(target, the values of all seeds in per cent), ascending."""
    found: dict[float, list[float]] = {}
    for row in rows:
        found.setdefault(float(row["target"]), []).append(100 * float(row[column]))
    return sorted(found.items())


def picture_of(rows: Sequence[Row]) -> Picture:
    """Accuracy over the epsilon of each hospital: pooled with its spread over seeds, and each hospital's test set."""
    title = "Accuracy by the epsilon of each hospital"
    series = ["all four test sets together", *HOSPITALS]
    with canvas(height=3.6) as (figure, (axes,)):
        for place, column in enumerate(COLUMNS[2:7]):
            found = by_target(rows, column)
            draw_line(axes, [(target, fmean(values)) for target, values in found if math.isfinite(target)], place)
            for target, values in found if place == 0 else ():
                draw_spread(axes, target, values)
        axes.axhline(dict(means(rows))[math.inf], color=INK, linestyle="dashed", linewidth=0.9)
        axes.axhline(FLAMBY_BEST, color=MUTED, linestyle="dotted", linewidth=1.2)
        targets = [target for target, _ in means(rows) if math.isfinite(target)]
        log_axis(axes, "x", targets)
        place_ticks(axes, targets)
        axes.set_xlabel("epsilon of each hospital, delta 0.001")
        axes.set_ylabel("accuracy, %")
        note = "dashed: without noise, all four; dotted: FLamby's best without privacy"
        return Picture(title, to_svg(figure, title), (*enumerate(series), (-1, note)))


def summary(rows: Sequence[Row]) -> list[str]:
    """A line of the page's table for each target: the mean and deviation over seeds, then the hospitals' means."""
    lines = []
    for target, values in by_target(rows, "accuracy"):
        own = [dict(means(rows, column))[target] for column in COLUMNS[3:7]]
        true = {row[column] for row in rows if float(row["target"]) == target for column in COLUMNS[7:]}
        cells = (f"{target:g}", ", ".join(sorted(true)), f"{fmean(values):.1f} ({stdev(values):.1f})")
        lines.append(f"| {' | '.join((*cells, *(f'{value:.1f}' for value in own)))} |")
    return lines


def main(words: Sequence[str]) -> int:
    """Runs every target and seed, or reads such runs, and draws them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.heart_curve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("folder", type=Path, nargs="?", help="with the four processed.*.data files")
    parser.add_argument("--out", type=Path, help="a row for each run, as CSV")
    parser.add_argument("--from", dest="read", type=Path, help="draw these rows instead of running anything")
    parser.add_argument("--own", type=Path, help="the CSV of heart_choice: settings for each epsilon by itself")
    parser.add_argument("--picture", type=Path, help="draw there, as SVG")
    arguments = parser.parse_args(words)
    if (arguments.folder is None) == (arguments.read is None):
        parser.error("give either FOLDER or --from")
    settings = own_settings(arguments.own) if arguments.own else dict.fromkeys(EPSILONS, ())
    rows = read_rows(arguments.read) if arguments.read else run_all(arguments.folder.resolve(), settings)
    if arguments.out:
        write_rows(arguments.out, rows)
    if arguments.picture:
        arguments.picture.write_text(alone(picture_of(rows)))
    print("\n".join(summary(rows)))
    return 0


def run_all(data: Path, settings: Mapping[float, Sequence[str]]) -> list[Row]:
    """Every target that has settings (further overrides, or none) with every seed."""
    return [measured(data, target, seed, more=more) for target, more in settings.items() for seed in SEEDS]


def own_settings(choice: Path) -> dict[float, list[str]]:
    """Overrides for each epsilon that the cross-validation tried: its best row for that epsilon."""
    tried, found = read_rows(choice), {}
    for target in EPSILONS:
        column = f"epsilon {target:g}"
        if column in tried[0]:
            best = max(tried, key=lambda row: float(row[column]))
            found[target] = [f"{setting}={best[name]}" for name, setting in TRIED.items()]
    return found


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV of such runs."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """The rows as CSV."""
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
