"""The data and the policy of a hospital's own node, from its own file of the UCI heart disease
data: docs/results.md.

    python examples/heart/make_nodes.py processed.va.data --out nodes

makes nodes/va with `train.csv`, the hospital's training part as raw numbers; `data.toml`, their
scaling; and `policy.json`, the hospital's limits. No other hospital's file is read.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from discreet.data.description import DESCRIPTION
from discreet.data.heart import HEART_RANGES, read_hospital, train_and_test
from discreet.deployment.local_federation import POLICY

TABLE, TARGET = "train.csv", "disease"


def write_node(file: Path, out: Path, *, max_epsilon: float, max_delta: float) -> Path:
    """The folder of a hospital's node, below `out`, by the hospital's name.

    Raises:
      FileNotFoundError, ValueError: as `read_hospital`.
    """
    features, labels = read_hospital(file)
    folder = out / file.name.split(".")[1]
    folder.mkdir(parents=True, exist_ok=True)
    rows, _ = train_and_test(labels)
    with (folder / TABLE).open("w", newline="") as table:
        writer = csv.writer(table, lineterminator="\n")
        writer.writerow([*HEART_RANGES, TARGET])
        for values, label in zip(features[rows], labels[rows], strict=True):
            writer.writerow([*map(float, values), int(label)])
    low, high = zip(*HEART_RANGES.values(), strict=True)
    facts = {
        "format": "csv",
        "file": TABLE,
        "target": TARGET,
        "inputs": [*HEART_RANGES],
        "task": "heart",
    }
    lines = [
        f"{key} = {json.dumps(value)}"
        for key, value in (facts | {"low": low, "high": high}).items()
    ]
    # Strings and lists have the same syntax in JSON and TOML.
    (folder / DESCRIPTION).write_text("\n".join(lines) + "\n")
    policy = {"require": ["example"], "max-epsilon": max_epsilon, "max-delta": max_delta}
    (folder / POLICY).write_text(json.dumps(policy) + "\n")
    return folder


def main(words: Sequence[str]) -> int:
    """Makes a folder for each file; exit code 2 if one can't be read."""
    parser = argparse.ArgumentParser(
        prog="python examples/heart/make_nodes.py", description=__doc__
    )
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("files", type=Path, nargs="+", help="processed.NAME.data")
    parser.add_argument(
        "--out", type=Path, required=True, help="the folder with a folder for each hospital"
    )
    parser.add_argument(
        "--max-epsilon", type=float, default=8.0, help="of one patient, over all runs (default: 8)"
    )
    parser.add_argument(
        "--max-delta", type=float, default=1e-3, help="the delta of that epsilon (default: 0.001)"
    )
    arguments = parser.parse_args(words)
    try:
        for file in arguments.files:
            print(
                write_node(
                    file,
                    arguments.out,
                    max_epsilon=arguments.max_epsilon,
                    max_delta=arguments.max_delta,
                )
            )
    except (FileNotFoundError, ValueError) as error:
        print(f"discreet: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
