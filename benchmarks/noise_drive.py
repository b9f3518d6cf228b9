"""What noise does to the default experiment: accuracy over rounds for each epsilon, and where a run is refused.

    python -m benchmarks.noise_drive --out docs/results/noise_drive.csv --picture docs/pictures/noise_drive.svg
    python -m benchmarks.noise_drive --from docs/results/noise_drive.csv --picture docs/pictures/noise_drive.svg

Every setting runs, also those that would be refused. The accuracy is that of the run's model: the last one, or the one
with the best accuracy if the run was lost.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from discreet.config import RunConfig, load_config
from discreet.federated.guarantees import resolve_noise
from discreet.federated.noise_outlook import NoiseOutlook, noise_outlook
from discreet.federated.run_folder import RunFolder
from discreet.reporting.drawing import INK, Picture, alone, canvas, draw_line, log_axis, to_svg
from discreet.simulation.in_process import simulate

DEFAULT_PARAMS = 9610  # of the multilayer perceptron on digits
SEEDS = (31013, 47129)
EPSILONS = {8: (10, 30, 60, 100, 200, 400), 2: (10, 30, 60), 1: (10, 30, 60), 0.5: (10, 30, 60)}
SHRINK = "server.shrink_with_noise=true"
COLUMNS = ("settings", "seed", "drive", "refused", "rounds", "accuracy", "best_accuracy", "loss", "clip_norm")

Row = dict[str, str]


def settings_of_grid() -> Iterator[str]:
    """The settings of every run, as overrides in one string."""
    for epsilon, numbers in EPSILONS.items():
        for rounds in numbers:
            for more in ("", f" {SHRINK}"):
                yield f"rounds={rounds} privacy.user.target_epsilon={epsilon}{more}"


def config_of(settings: str) -> RunConfig:
    """The configuration of a row's settings, with its noise resolved."""
    return resolve_noise(load_config([*settings.split(), "privacy.user.too_noisy=warn"]))


def outlook_of(settings: str) -> NoiseOutlook:
    """What is expected of a row's settings."""
    config = config_of(settings)
    return noise_outlook(config, num_params=650 if config.model.name == "logistic_regression" else DEFAULT_PARAMS)


def measured(settings: str, seed: int) -> Row:
    """One run."""
    outlook = outlook_of(settings)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        outcome = simulate(replace(config_of(settings), seed=seed, output_dir=str(folder)))
        rows = RunFolder(folder).read_metrics()
    accuracies = [row["accuracy"] or 0.0 for row in rows]
    values = (
        *(settings, seed, f"{outlook.drive:.3g}", outlook.drowned, len(rows)),
        *(f"{accuracies[outcome.model.round - 1]:.4f}", f"{max(accuracies):.4f}"),
        *(f"{rows[-1]['loss']:.4g}", f"{rows[-1]['clip_norm']:.4g}"),
    )
    return dict(zip(COLUMNS, map(str, values), strict=True))


def picture_of(rows: Sequence[Row]) -> Picture:
    """Accuracy over planned rounds, a line for each epsilon with and without shrinking; a cross is a refused run."""
    title, lines = "Accuracy of the model by the number of rounds", lines_of(rows)
    with canvas(height=3.6) as (figure, (axes,)):
        for place, found in enumerate(lines.values()):
            draw_line(axes, means(found), place)
            crossed = means([row for row in found if row["refused"] == "True"])
            axes.plot([x for x, _ in crossed], [y for _, y in crossed], "x", color=INK, markersize=9)
        log_axis(axes, "x", [rounds for found in lines.values() for rounds, _ in means(found)])
        axes.set_xlabel("planned rounds (crossed out: refused)")
        axes.set_ylabel("accuracy")
        return Picture(title, to_svg(figure, title), tuple(enumerate(lines)))


def lines_of(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of the grid by what is drawn as one line."""
    lines: dict[str, list[Row]] = {}
    for row in rows:
        words = dict(word.split("=") for word in row["settings"].split())
        if row["settings"] in set(settings_of_grid()):
            more = ", server.shrink_with_noise" if SHRINK in row["settings"] else ""
            lines.setdefault(f"epsilon {words['privacy.user.target_epsilon']}{more}", []).append(row)
    return lines


def means(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """(planned rounds, accuracy averaged over seeds), in the order of rounds."""
    found: dict[float, list[float]] = {}
    for row in rows:
        planned = float(row["settings"].split()[0].removeprefix("rounds="))
        found.setdefault(planned, []).append(float(row["accuracy"]))
    return sorted((planned, fmean(values)) for planned, values in found.items())


def main(words: Sequence[str]) -> int:
    """Runs the grid, or reads it, and draws it."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.noise_drive",
        description=__doc__,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    parser.add_argument("settings", nargs="*", help="further runs, each the overrides of one in quotes")
    parser.add_argument("--only", action="store_true", help="leave the grid out")
    parser.add_argument("--out", type=Path, help="add a row a run there, as CSV")
    parser.add_argument("--from", dest="read", type=Path, help="draw these rows instead of running anything")
    parser.add_argument("--picture", type=Path, help="draw there, as SVG")
    arguments = parser.parse_args(words)
    grid = [] if arguments.only else list(settings_of_grid())
    rows = read_rows(arguments.read) if arguments.read else []
    for settings, seed in [] if arguments.read else itertools.product([*grid, *arguments.settings], SEEDS):
        rows.append(measured(settings, seed))
        print(" ".join(rows[-1].values()), flush=True)
        if arguments.out:
            add_row(arguments.out, rows[-1])
    if arguments.picture:
        arguments.picture.write_text(alone(picture_of(rows)))
    return 0


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV of such runs."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def add_row(path: Path, row: Row) -> None:
    """Appends a row, after the names of the columns if it is the first."""
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
