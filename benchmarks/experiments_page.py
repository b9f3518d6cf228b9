"""The page of all experiments, made from result files: `python -m benchmarks.experiments_page [FOLDER]`.

FOLDER holds run folders, each named like its experiment (`default` for the one that conf/config.yaml describes): what
they measured goes into docs/results/experiments.csv first. tests/test_experiments_page.py holds the page to the files.
"""

from __future__ import annotations

import csv
import math
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from discreet.config import load_config
from discreet.federated.guarantees import guarantees_of
from discreet.reporting.records import RunRecord, find_runs, read_runs
from discreet.settings import RunConfig

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "results"
PAGE = ROOT / "docs" / "experiments.md"
DEFAULT, SWEEP = "default", "_sweep"
COLUMNS = ("run", "measured", "accuracy", "r2", "epsilon user", "epsilon example", "epsilon local", "seconds", "noise")
HEAD = """# All experiments

`python -m benchmarks.experiments_page` made this page from the files in `docs/results`, and a test holds it to them.

- Protected is all data of a client, or one example of a client, by the guarantee in brackets.
- Accuracy is that of the run's model on the public test set; R2 stands there if numbers are predicted.
- Epsilon is that of the guarantee in the row, by PLD (secure aggregation: RDP); with two each is named.
  Epsilons of different guarantees describe different things and cannot be compared ([what is guaranteed](privacy.md)).
- Seconds are those of the rounds, in one process on two cores beside other work.
- `-` means that no result file has this experiment: it was never measured in full.
"""
BUILT_IN = """
## On built-in data

One run each, without a seed, so that yours will differ a little. These need nothing but the checkout: `scripts/run`
runs them on Flower, `discreet simulate` in one process. They were measured in one process.
"""
MNIST = """
## On MNIST

Means of three runs with the seeds 31013, 47129 and 58211, each listed in [results/mnist.csv](results/mnist.csv); of
`mnist_users` one run without a seed. [Published tables](results.md) has what others published beside them. `FOLDER`
holds the four IDX files.
"""
HOSPITALS = """
## On four hospitals

One run without a seed. [Four hospitals](systems/heart.md) has means of five seeds at six epsilons, and what others
published beside them. `FOLDER` holds the four files of the UCI heart disease data.
"""
SWEEPS = """
## Sweeps

The least and the largest accuracy and epsilon of all runs, and the seconds of all rounds together; seeds repeat every
setting three times. The settings that are compared include some that learn nothing: the page of each system says what
was learned.
"""
TABLE = ("command", "task", "clients", "protected", "epsilon", "delta", "accuracy", "seconds", "measured")
FROM_FILES = ("mnist", "heart")  # the data sets that need data.path
UNITS = {"all data of one client": "client", "one example of one client": "example"}


@dataclass(frozen=True)
class Measured:
    """What the result files say of an experiment, as they are shown; `-` if they say nothing."""

    epsilon: str = "-"
    accuracy: str = "-"
    seconds: str = "-"
    day: str = "-"


def row_of(record: RunRecord) -> dict[str, str]:
    """A run as a line of experiments.csv."""
    ended = datetime.fromtimestamp((record.path / "metrics.csv").stat().st_mtime, UTC)
    return {
        "run": record.path.name,
        "measured": ended.date().isoformat(),
        **{name: "" if (score := record.of_model(name)) is None else f"{score:.4f}" for name in ("accuracy", "r2")},
        **{f"epsilon {name}": f"{record.epsilon(name):.4g}" for name in ("user", "example", "local")},
        "seconds": f"{record.total('seconds'):.1f}",
        "noise": "secure" if record.config.seed is None else f"seed {record.config.seed}",
    }


def write_results(folder: Path) -> None:
    """Puts the runs below a folder into docs/results/experiments.csv, in place of earlier ones of the same names."""
    path = RESULTS / "experiments.csv"
    rows = {row["run"]: row for row in read_table(path)}
    rows |= {row["run"]: row for row in map(row_of, read_runs(find_runs([folder])))}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[name] for name in sorted(rows))


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a result file; none if there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def experiments() -> list[str]:
    """The default and every overlay, by name."""
    return [DEFAULT, *sorted(path.stem for path in (ROOT / "conf" / "experiment").glob("*.yaml"))]


@cache
def config_of(name: str) -> RunConfig:
    """The settings of an experiment; of a sweep those that its runs share."""
    return load_config([] if name == DEFAULT else [f"experiment={name}"], of_sweep=name.endswith(SWEEP))


def results_of(name: str) -> list[dict[str, str]]:
    """The rows of the result files that belong to an experiment."""
    if name.endswith(SWEEP):
        return read_table(RESULTS / f"{name.removesuffix(SWEEP)}.csv")
    own = [row for row in read_table(RESULTS / "experiments.csv") if row["run"] == name]
    return own or [row for row in read_table(RESULTS / "mnist.csv") if _without_seed(row["run"]) == name]


def _without_seed(run: str) -> str:
    name, _, seed = run.rpartition("_")
    return name if seed.isdigit() else run


def measured(name: str, rows: Sequence[Mapping[str, str]]) -> Measured:
    """Rows of an experiment in the words of the page."""
    if not rows:
        return Measured()
    sweep = name.endswith(SWEEP)
    seconds = [float(row["seconds"]) for row in rows]
    return Measured(
        epsilon=_epsilons(rows),
        accuracy=_scores(rows, spread=sweep),
        seconds=f"{sum(seconds) if sweep else statistics.mean(seconds):.0f}",
        day=rows[0].get("measured") or "-",
    )


def _scores(rows: Sequence[Mapping[str, str]], *, spread: bool) -> str:
    """Accuracies in per cent, or R2 if the runs have that."""
    if all(row.get("r2") for row in rows):
        return f"R2 {statistics.mean(float(row['r2']) for row in rows):.2f}"
    values = [100 * float(row["accuracy"] or math.nan) for row in rows]
    if not all(map(math.isfinite, values)):
        return "-"
    return f"{min(values):.0f} to {max(values):.0f} %" if spread else f"{statistics.mean(values):.1f} %"


def _epsilons(rows: Sequence[Mapping[str, str]]) -> str:
    found = {}
    for name in ("user", "example", "local"):
        values = [float(row[f"epsilon {name}"]) for row in rows]
        finite = [value for value in values if math.isfinite(value)]
        if finite:
            ends = list(dict.fromkeys(f"{value:.3g}" for value in (min(finite), max(finite))))
            found[name] = " to ".join(ends) + (", none" if len(finite) < len(values) else "")
    if len(found) == 1:
        return next(iter(found.values()))
    return "; ".join(f"{value} ({name})" for name, value in found.items()) or "none"


def protected(config: RunConfig) -> str:
    """What a configuration hides, and by which guarantee."""
    on = [guarantee for guarantee in guarantees_of(config) if guarantee.enabled]
    return "; ".join(f"{UNITS[guarantee.unit]} ({guarantee.name})" for guarantee in on) or "nothing"


def command(name: str, config: RunConfig) -> str:
    """What runs an experiment."""
    files = config.data.name in FROM_FILES
    in_process = name.endswith(SWEEP) or files or config.privacy.user.secure
    program = "discreet simulate" if in_process else "scripts/run"
    words = [program, *([] if name == DEFAULT else [f"experiment={name}"])]
    return " ".join([*words, "data.path=FOLDER"] if files else words)


def line(name: str) -> str:
    """An experiment as a row of the page's table."""
    config = config_of(name)
    found = measured(name, results_of(name))
    cells = (
        f"`{command(name, config)}`",
        f"{config.data.name}, {config.model.name}",
        str(config.data.num_clients),
        protected(config),
        found.epsilon,
        f"{config.privacy.delta:g}",
        found.accuracy,
        found.seconds,
        found.day,
    )
    return f"| {' | '.join(cells)} |"


def table(names: Iterable[str]) -> str:
    """The rows of experiments, below their head."""
    return "\n".join([f"| {' | '.join(TABLE)} |", "|---" * len(TABLE) + "|", *map(line, names)]) + "\n"


def page() -> str:
    """The whole page."""
    names = experiments()
    sweeps = [name for name in names if name.endswith(SWEEP)]
    mnist, heart = (
        [name for name in names if name not in sweeps and config_of(name).data.name == data] for data in FROM_FILES
    )
    others = [name for name in names if name not in (*sweeps, *mnist, *heart)]
    parts = ((BUILT_IN, others), (MNIST, mnist), (HOSPITALS, heart), (SWEEPS, sweeps))
    return HEAD + "".join(f"{text}\n{table(members)}" for text, members in parts)


def main(words: Sequence[str]) -> int:
    """Reads run folders if one is named, and writes the page."""
    for word in words:
        write_results(Path(word))
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
