"""This very app on Flower's Ray simulation, beside the same rounds in one process: clients per second, and start-up.

    DISCREET_TEST_DATA=/folder/with/mnist discreet benchmark flower

The work: Poisson cohorts of 100 of 1000 clients, batches of 10, one epoch, learning rate 0.1, updates clipped, added up
and noised; the first round of each way is not counted. With MNIST, in the folder `mnist` of the one that the variable
names, a client has 60 examples; without it the built-in digits are shared out, one or two for each. `flower` is the
ClientApp in Ray's workers, asked through Flower's grid as `scripts/run` does; `empty` the same with a ClientApp that
sends back what it was sent; `one by one` our clients in one process; `batched` what `discreet simulate` does. Times are
medians of rounds by the clock: Ray's workers are other processes. The last row is from the command `scripts/run` to
its first cohort, and to the end of the first round.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from flwr.app import Context
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from discreet.config import RunConfig, load_config
from discreet.deployment.flower_run import REPOSITORY, nodes_of
from discreet.federated.grid_transport import GridTransport, VirtualClients
from discreet.federated.opened_run import first_clip_norm
from discreet.federated.round import dp_fedavg_round, initial_state
from discreet.federated.run_plan import cohort_sampling, round_settings
from discreet.federated.server_messages import OwnMessages
from discreet.federated.simulated_clients import leave_ticket
from discreet.federated.transport import RoundReport, Transport
from discreet.privacy.randomness import secure_source
from discreet.settings import client_settings
from discreet.simulation.cohort import BatchedTransport
from discreet.simulation.engine import engine_of
from discreet.simulation.in_process import InProcessTransport
from discreet.tasks.datasets import load_task
from discreet.tasks.models import build_model, flatten_parameters

Row = dict[str, Any]
Rounds = Callable[[Sequence[str], int], list[tuple[float, int]]]

MODELS = ("logistic_regression", "mlp", "cnn")
DATA_VARIABLE = "DISCREET_TEST_DATA"  # the folder with MNIST, as for the tests
CLIENTS = 1000
WORK = (
    "training.epochs=1",
    "training.batch_size=10",
    "training.learning_rate=0.1",
    "sampling.probability=0.1",
    "privacy.delta=1e-9",
    "privacy.user.noise_multiplier=1.0",
)
SEED = 20731
BATCHED_TIMES = 20  # its rounds take milliseconds: five of them say little


def rows(
    *, models: Sequence[str] = MODELS, rounds: int = 5, clients: int = CLIENTS, start_up: Sequence[str] = ("rounds=1",)
) -> list[Row]:
    """A row for each data set and model, and one for the start of `scripts/run`."""
    found = []
    for data in data_sets():
        for model in models if data != ("data.name=digits",) else [name for name in models if name != "cnn"]:
            words = [*WORK, *data, f"data.num_clients={clients}", f"model.name={model}"]
            found.append(compared(words, rounds))
    return [*found, start_of(start_up)]


def data_sets() -> list[tuple[str, ...]]:
    """The overrides that choose each data set: the digits, and MNIST if its folder is named."""
    folder = os.environ.get(DATA_VARIABLE)
    mnist = None if folder is None else Path(folder) / "mnist"
    digits: tuple[str, ...] = ("data.name=digits",)
    return [digits] if mnist is None or not mnist.is_dir() else [digits, ("data.name=mnist", f"data.path={mnist}")]


def compared(words: Sequence[str], rounds: int) -> Row:
    """Clients per second each way, medians of `rounds` rounds (batched: of more), and what follows from them."""
    speeds, seconds = {}, {}
    for name, way in WAYS.items():
        count = rounds * BATCHED_TIMES if name == "batched" else rounds
        counted = call_alone(way, words, count + 1)[1:]
        speeds[name] = median(cohort / time for time, cohort in counted)
        seconds[name] = median(time for time, _ in counted)
    run = load_config(words)
    return {
        "what": f"{run.data.name} {run.model.name}, clients per second",
        **speeds,
        "batched / flower": speeds["batched"] / speeds["flower"],
        "a round, s": seconds["flower"],
        "of an empty one": seconds["flower"] / seconds["empty"],
        "not training, s": seconds["flower"] - seconds["one by one"] / (os.cpu_count() or 1),
    }


def call_alone(way: Rounds, words: Sequence[str], count: int) -> list[tuple[float, int]]:
    """Rounds in a process of their own: what one way leaves behind does not slow the next."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(way, words, count).result()


def _timed_rounds(run: RunConfig, exchange: Transport, count: int) -> list[tuple[float, int]]:
    """Seconds and cohort of each round: what the server does from drawing the cohort to the new parameters."""
    task = load_task(run.data.name, path=run.data.path)
    model = build_model(run.model.name, task.input_shape, task.num_classes, seed=SEED)
    state, source, found = initial_state(flatten_parameters(model), clip_norm=first_clip_norm(run)), secure_source(), []
    for number in range(1, count + 1):
        started = time.perf_counter()
        cohort = cohort_sampling(run).draw(exchange.members(), source)
        replies = exchange.ask(round_number=number, params=state.params, clip_norm=state.clip_norm, cohort=cohort)
        updates = RoundReport().accept(replies)
        state, metrics = dp_fedavg_round(state, updates, round_settings(run), source=source, charge=lambda _: None)
        if metrics.replies != len(cohort):
            raise RuntimeError(f"{metrics.replies} of {len(cohort)} clients replied")
        found.append((time.perf_counter() - started, len(cohort)))
    return found


def _batched(words: Sequence[str], count: int) -> list[tuple[float, int]]:
    torch.set_num_threads(1)
    run = load_config([*words, f"rounds={count}"])
    task = load_task(run.data.name, path=run.data.path)
    with BatchedTransport(run, engine_of(run, task), accounts=None) as exchange:
        return _timed_rounds(run, exchange, count)


def _one_by_one(words: Sequence[str], count: int) -> list[tuple[float, int]]:
    torch.set_num_threads(1)
    run = load_config([*words, f"rounds={count}"])
    with TemporaryDirectory() as folder:
        return _timed_rounds(run, InProcessTransport(run, folder), count)


def _flower(words: Sequence[str], count: int) -> list[tuple[float, int]]:
    from client_app.client_app import app

    return _under_ray(words, count, app)


def _empty(words: Sequence[str], count: int) -> list[tuple[float, int]]:
    from benchmarks.empty_app.empty_client import app

    return _under_ray(words, count, app)


def _under_ray(words: Sequence[str], count: int, client_app: ClientApp) -> list[tuple[float, int]]:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    run, found, server_app = load_config([*words, f"rounds={count}"]), [], ServerApp()
    with TemporaryDirectory() as folder:

        @server_app.main()
        def main(grid: Grid, context: Context) -> None:
            virtual = VirtualClients(run.data.num_clients, folder, leave_ticket(Path(folder)), run.seed, run.data.path)
            settings, clients = OwnMessages(client_settings(run)), run.population_size
            timeout = run.server.round_timeout
            exchange = GridTransport(grid, settings, timeout=timeout, population_size=clients, virtual=virtual)
            found.extend(_timed_rounds(run, exchange, count))

        resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
        run_simulation(server_app, client_app, nodes_of(run), backend_config=resources)  # type: ignore[arg-type]
    return found


WAYS: dict[str, Rounds] = {"flower": _flower, "empty": _empty, "one by one": _one_by_one, "batched": _batched}


def start_of(words: Sequence[str]) -> Row:
    """Seconds from the command `scripts/run` to what it says when it starts, and to its first round."""
    with TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "discreet.deployment.flower_run", *words, f"output_dir={folder}/run"]
        started, seen = time.perf_counter(), dict[str, float]()
        with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            assert process.stdout is not None
            for line in process.stdout:
                for name, sign in (("first cohort", b"expected cohort"), ("first round", b"round 1/")):
                    if sign in line:
                        seen.setdefault(f"start to the {name}, s", time.perf_counter() - started)
        whole = time.perf_counter() - started
    return {"what": f"scripts/run {' '.join(words)}", **seen, "whole run, s": whole}
