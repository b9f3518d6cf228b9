"""Flower's own adaptive clipping beside ours, in the setting of `experiment=adaptive_clipping`, from two first norms.

    python -m benchmarks.flower_clipping --out flower.csv --picture flower.svg

The same clients, data, model, local training and noise multiplier. Flower samples half of the clients without
replacement, and its FedAvg has no momentum, so ours runs without momentum too.
"""

from __future__ import annotations

import argparse
import csv
import logging
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from discreet.client.admission import local_settings
from discreet.client.nodes import model_of, share_of
from discreet.config import RunConfig, load_config
from discreet.federated.run_folder import RunFolder
from discreet.privacy.randomness import RandomSource, secure_source
from discreet.reporting.drawing import Picture, alone, canvas, draw_line, log_axis, to_svg
from discreet.settings import client_settings
from discreet.simulation.in_process import simulate
from discreet.tasks.datasets import load_task
from discreet.tasks.metrics import evaluate
from discreet.tasks.models import flatten_parameters, load_parameters
from discreet.training.local_training import local_update

COLUMNS = ("strategy", "first_norm", "round", "clip_norm", "accuracy")
FIRST_NORMS = (0.1, 10.0)

Row = tuple[str, float, int, float, float]


def flower_rounds(config: RunConfig, *, source: RandomSource) -> Iterator[Row]:
    """A row a round of Flower's `DifferentialPrivacyServerSideAdaptiveClipping` around its FedAvg."""
    from flwr.app import ArrayRecord
    from flwr.serverapp.strategy import DifferentialPrivacyServerSideAdaptiveClipping, FedAvg

    logging.getLogger("flwr").setLevel(logging.ERROR)
    user, cohort = config.privacy.user, round(config.expected_cohort)
    strategy = DifferentialPrivacyServerSideAdaptiveClipping(
        FedAvg(),
        noise_multiplier=user.noise_multiplier or 0.0,
        num_sampled_clients=cohort,
        initial_clipping_norm=user.clip.norm,
        target_clipped_quantile=user.clip.target_quantile,
        clip_norm_lr=user.clip.learning_rate,
        clipped_count_stddev=user.clip.count_stddev,
    )
    model = model_of(client_settings(config), path=config.data.path)
    task = load_task(config.data.name, path=config.data.path)
    params = flatten_parameters(model)
    for number in range(1, config.rounds + 1):
        draw = source.child("round", number)
        clients = draw.child("cohort").permutation(config.data.num_clients)[:cohort].tolist()
        clipped_at = strategy.clipping_norm
        # What `configure_train` keeps of a round; it also asks the nodes, of which there are none here.
        strategy.current_arrays = ArrayRecord([params.numpy()])
        replies = [_reply(config, params, client, draw.child("client", client)) for client in clients]
        arrays, _ = strategy.aggregate_train(number, replies)
        params = torch.from_numpy(arrays.to_numpy_ndarrays()[0]).float() if arrays else params
        load_parameters(model, params)
        yield "flower", user.clip.norm, number, clipped_at, evaluate(model, task.test).accuracy


def _reply(config: RunConfig, params: Tensor, client: int, source: RandomSource) -> Any:
    from flwr.app import ArrayRecord, Message, Metadata, MetricRecord, RecordDict

    run, path = client_settings(config), config.data.path
    examples = share_of(run.data, client, path=path)
    settings = local_settings(run, len(examples))
    update = local_update(model_of(run, path=path), params, examples, settings=settings, source=source)
    content = RecordDict()
    content["arrays"] = ArrayRecord([(params + update).numpy()])
    content["metrics"] = MetricRecord({"num-examples": len(examples)})
    return cast(Any, Message)(content, metadata=Metadata(1, "", client, 1, "", "", 0.0, 60.0, "train"))


def discreet_rounds(config: RunConfig) -> Iterator[Row]:
    """The rows of our own run."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "run"
        simulate(replace(config, output_dir=str(folder)))
        for row in RunFolder(folder).read_metrics():
            clip, accuracy = row["clip_norm"] or 0.0, row["accuracy"] or 0.0
            yield "discreet", config.privacy.user.clip.norm, int(row["round"] or 0), clip, accuracy


def picture_of(rows: Sequence[Row]) -> Picture:
    """The clip norm of every strategy and first norm, round by round."""
    title = "Clip norm after each round"
    lines: dict[str, list[tuple[float, float]]] = {}
    for strategy, first_norm, number, clip_norm, _ in rows:
        lines.setdefault(f"{strategy}, from {first_norm:g}", []).append((float(number), clip_norm))
    with canvas() as (figure, (axes,)):
        for place, pairs in enumerate(lines.values()):
            draw_line(axes, pairs, place)
        log_axis(axes, "y", [clip_norm for *_, clip_norm, _ in rows])
        axes.set_xlabel("round")
        axes.set_ylabel("clip norm")
        return Picture(title, to_svg(figure, title), tuple(enumerate(lines)))


def main(words: Sequence[str]) -> int:
    """Runs both from every first norm, prints where each ends, and writes what is asked for."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.flower_clipping",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", metavar="OVERRIDE", help="further settings, for instance rounds=60")
    parser.add_argument("--out", type=Path, help="write a row a round there, as CSV")
    parser.add_argument("--picture", type=Path, help="draw the clip norms there, as SVG")
    arguments = parser.parse_args(words)
    rows: list[Row] = []
    for norm in FIRST_NORMS:
        setting = ["experiment=adaptive_clipping", "server.momentum=0", f"privacy.user.clip.norm={norm}"]
        config = load_config([*setting, *arguments.overrides])
        for found in (list(flower_rounds(config, source=secure_source())), list(discreet_rounds(config))):
            strategy, _, number, clip_norm, accuracy = found[-1]
            print(f"{strategy:9} from {norm:<5g} round {number}: clip norm {clip_norm:.4g}, accuracy {accuracy:.4f}")
            rows += found
    if arguments.out:
        with arguments.out.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *rows])
    if arguments.picture:
        arguments.picture.write_text(alone(picture_of(rows)))
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
