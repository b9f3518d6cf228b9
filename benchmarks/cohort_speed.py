"""The speed of training virtual clients: whole cohorts in one computation, against one client after
the other.

The work: 1000 clients of 60 examples of MNIST's shape, 100 of them a round, batches of 10, one
epoch, learning rate 0.1, every update clipped and added up. All compared ways run in turns, so that
a busy machine slows them alike. Times are medians of wall-clock times of rounds. Whole cohorts are
trained by one process for each core; sequential training uses PyTorch's default number of threads.
pfl-research is compared if it is installed, and otherwise named as skipped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from importlib import import_module, util
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.own_models import OWN
from benchmarks.side_by_side import Row
from discreet.data.examples import SHAPES, Examples, Task
from discreet.data.partition import ClientExamples, PartitionedExamples, partition_indices
from discreet.ledger.durable_ledger import DurableLedger
from discreet.mechanisms.round_state import RoundStart
from discreet.models.models import build_model, flatten_parameters, load_parameters
from discreet.node.account import Accounts
from discreet.node.client import Client
from discreet.node.policy import ClientPolicy
from discreet.node.work import work_of
from discreet.planning.plan import planned
from discreet.privacy.clipping import ClippedSum
from discreet.privacy.randomness import secure_source
from discreet.protocol.messages import TrainRequest
from discreet.run_files.compose import load_config
from discreet.server.transport import ReplyStats
from discreet.settings.data import DataConfig
from discreet.settings.settings import Settings, client_settings
from discreet.simulation.cohort import BatchedTransport, engine_of

Rounds = Callable[[Sequence[int]], None]

MODELS = ("logistic_regression", "mlp", "cnn", *OWN)
EXAMPLES, CLIENTS, COHORT, SEED, CLIP_NORM = 60_000, 1000, 100, 20731, 0.1
TURN_SECONDS = 0.3
WORK = (
    "training.epochs=1",
    "training.batch_size=10",
    "training.learning_rate=0.1",
    "training.momentum=0",
    "privacy.delta=1e-9",
    "privacy.user.noise_multiplier=1.0",
)
DP_SGD = ("privacy.example.enabled=true", "privacy.example.noise_multiplier=1.0")


def digits_like(count: int = EXAMPLES) -> Task:
    """Random images of MNIST's shape. Their content does not affect the time of training."""
    generator = torch.Generator().manual_seed(SEED)
    pixels, targets = (
        torch.randint(256, (count, 1, 28, 28), generator=generator),
        torch.arange(count) % 10,
    )
    inputs = pixels.float().div_(255)
    return Task(
        "digits-like",
        Examples(inputs, targets),
        Examples(inputs[:10], targets[:10]),
        SHAPES["mnist"],
    )


def rows(
    *,
    models: Sequence[str] = MODELS,
    examples: int = EXAMPLES,
    clients: int = CLIENTS,
    repetitions: int = 7,
) -> list[Row]:
    """Clients a second for each model and way, and ratios to sequential training and to
    pfl-research."""
    task = digits_like(examples)
    parts = partition_indices(
        task.train.targets, DataConfig(num_clients=clients, partition_seed=SEED)
    )
    found = []
    with TemporaryDirectory() as folder:
        for name in models:
            for ways in (_sgd_ways, _dp_sgd_ways):
                compared = ways(name, task, PartitionedExamples.of(parts), Path(folder))
                found += _compared(name, compared, clients=clients, repetitions=repetitions)
    return found


def device_ways(name: str, *, clients: int, device: str) -> dict[str, Rounds]:
    """Rounds of `clients` clients of 60 images on a device: trained together, and by a loop over
    the clients there."""
    task = digits_like(EXAMPLES * clients // CLIENTS)
    held = PartitionedExamples.of(
        partition_indices(task.train.targets, DataConfig(num_clients=clients, partition_seed=SEED))
    )
    run = load_config([*WORK, f"model.name={name}", "privacy.noise=float", f"device={device}"])
    return {
        "together": _batched(run, task, held, None),
        "loop": _plain_loop(run, task, held, device=device),
    }


def _sgd_ways(name: str, task: Task, held: ClientExamples, folder: Path) -> dict[str, Rounds]:
    run, exact = (
        load_config([*WORK, f"model.name={name}", f"privacy.noise={noise}"])
        for noise in ("float", "grid")
    )
    ways = {
        "plain loop of PyTorch": _plain_loop(run, task, held),
        "sequential": _sequential(run, task, held, None),
        "batched": _batched(run, task, held, None),
        "batched, sums on the grid": _batched(exact, task, held, None),
    }
    if util.find_spec("pfl"):
        ways["pfl-research"] = _pfl_research(run, task, held)
    return ways


def _dp_sgd_ways(name: str, task: Task, held: ClientExamples, folder: Path) -> dict[str, Rounds]:
    run = load_config([*WORK, *DP_SGD, "privacy.noise=float", f"model.name={name}"])
    ledgers = [DurableLedger.create(folder / f"{name}-{number}.db") for number in range(2)]
    return {
        "DP-SGD, sequential": _sequential(run, task, held, ledgers[0]),
        "DP-SGD, batched": _batched(run, task, held, ledgers[1]),
    }


def _compared(name: str, ways: dict[str, Rounds], *, clients: int, repetitions: int) -> list[Row]:
    times: dict[str, list[float]] = {way: [] for way in ways}
    cohort = min(COHORT, clients)
    for repetition in range(repetitions + 1):
        for way, rounds in ways.items():
            # With sequential training the cost of a round is that of its clients.
            few = max(1, cohort // 10) if "sequential" in way or "plain" in way else cohort
            # Several rounds a turn, as the first one starts with the caches of another way. Turn 0
            # warms up.
            turn, number = time.perf_counter(), repetition
            while (started := time.perf_counter()) < turn + TURN_SECONDS:
                rounds([(number * cohort + client) % clients for client in range(few)])
                number += 1
                if repetition:
                    times[way].append((time.perf_counter() - started) / few)
    speeds = {way: 1 / median(values) for way, values in times.items()}
    base, peer = (
        next(speed for way, speed in speeds.items() if "sequential" in way),
        speeds.get("pfl-research"),
    )
    return [
        {"model": name, "way": way, "clients_per_second": speed, "ratio": speed / base}
        | ({"to_pfl": speed / peer} if peer else {})
        for way, speed in speeds.items()
    ]


def _plain_loop(run: Settings, task: Task, held: ClientExamples, *, device: str = "cpu") -> Rounds:
    """A plain loop without any library: SGD on each client, whose update is clipped and added."""
    model = build_model(
        run.model.name, task.shape.input_shape, task.shape.num_classes, seed=SEED
    ).to(device)
    inputs, targets = task.train.inputs.to(device), task.train.targets.to(device)
    start, generator = flatten_parameters(model), np.random.default_rng(SEED)

    def rounds(clients: Sequence[int]) -> None:
        total = torch.zeros_like(start)
        for client in clients:
            load_parameters(model, start)
            optimizer = torch.optim.SGD(model.parameters(), lr=run.training.learning_rate)
            order = torch.from_numpy(generator.permutation(held.examples(client)))
            for batch in order.split(run.training.batch_size):  # type: ignore[no-untyped-call]
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(inputs[batch]), targets[batch])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            update = flatten_parameters(model) - start
            total += update * (CLIP_NORM / update.norm()).clamp(max=1)

    return rounds


def _sequential(
    run: Settings, task: Task, held: ClientExamples, ledger: DurableLedger | None
) -> Rounds:
    """The clients that Flower runs, called one after the other."""
    model = build_model(run.model.name, task.shape.input_shape, task.shape.num_classes, seed=SEED)
    start, request = flatten_parameters(model), TrainRequest(1, CLIP_NORM, client_settings(run))

    def rounds(clients: Sequence[int]) -> None:
        total = ClippedSum(len(start), CLIP_NORM)
        for client in clients:
            examples = task.train.subset(torch.from_numpy(held.examples(client)))
            accounts = (
                None
                if ledger is None
                else Accounts(ledger, run.privacy.delta, run.privacy.accountant)
            )
            who = Client(model, examples, accounts, ClientPolicy(), secure_source(), str(client))
            reply = who.answer(work_of(request), start)
            total.add(reply.update.unsqueeze(0))

    return rounds


def _batched(
    run: Settings, task: Task, held: ClientExamples, ledger: DurableLedger | None
) -> Rounds:
    """The cohort as one computation."""
    model = build_model(run.model.name, task.shape.input_shape, task.shape.num_classes, seed=SEED)
    accounts = (
        None if ledger is None else Accounts(ledger, run.privacy.delta, run.privacy.accountant)
    )
    plan = planned(run)
    exchange = BatchedTransport(plan, engine_of(plan, task, dealt=held), accounts=accounts)
    start = RoundStart(0, flatten_parameters(model), CLIP_NORM)

    def rounds(clients: Sequence[int]) -> None:
        replies = exchange.ask(TrainRequest(1, CLIP_NORM, plan.run), start.params, clients)
        plan.mechanism.add_up(filter(None, map(ReplyStats().count, replies)), start)

    return rounds


class _Classifier(nn.Module):
    """A model with the loss and metrics that pfl-research requires."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def loss(self, inputs: Tensor, targets: Tensor, **_: Any) -> Tensor:
        """The mean cross entropy."""
        return nn.functional.cross_entropy(self.layers(inputs), targets)

    def metrics(self, inputs: Tensor, targets: Tensor, **_: Any) -> dict[str, Any]:
        """No metrics: only training is timed."""
        return {}


_PFL_MODULES = (
    "aggregate.simulate",
    "data",
    "data.pytorch",
    "hyperparam",
    "algorithm",
    "model.pytorch",
    "privacy",
)


def _pfl_research(run: Settings, task: Task, held: ClientExamples) -> Rounds:
    """Federated averaging with central Gaussian noise, by Apple's simulator."""
    pfl = {name: import_module(f"pfl.{name}") for name in _PFL_MODULES}
    data = pfl["data"]
    hyperparam = pfl["hyperparam"]
    algorithm = pfl["algorithm"]
    privacy = pfl["privacy"]

    def examples(client: int) -> Any:
        numbers = torch.from_numpy(held.examples(client))
        return pfl["data.pytorch"].PyTorchTensorDataset(
            (task.train.inputs[numbers], task.train.targets[numbers])
        )

    waiting: list[int] = []
    layers = build_model(run.model.name, task.shape.input_shape, task.shape.num_classes, seed=SEED)
    classifier = _Classifier(layers)
    model = pfl["model.pytorch"].PyTorchModel(
        classifier, torch.optim.SGD, torch.optim.SGD(classifier.parameters(), lr=1.0)
    )
    noise = privacy.CentrallyAppliedPrivacyMechanism(privacy.GaussianMechanism(CLIP_NORM, 1.0))
    users = data.FederatedDataset(examples, lambda: waiting.pop())
    backend = pfl["aggregate.simulate"].SimulatedBackend(users, None, postprocessors=[noise])
    sizes = {
        "local_batch_size": run.training.batch_size,
        "local_learning_rate": run.training.learning_rate,
    }
    local = hyperparam.NNTrainHyperParams(local_num_epochs=1, **sizes)
    rated = hyperparam.NNEvalHyperParams(local_batch_size=None)

    def rounds(clients: Sequence[int]) -> None:
        waiting[:] = clients
        counts = {
            "train_cohort_size": len(clients),
            "val_cohort_size": 0,
            "evaluation_frequency": 1000,
        }
        plan = algorithm.NNAlgorithmParams(central_num_iterations=1, **counts)
        algorithm.FederatedAveraging().run(
            plan, backend, model, local, rated, send_metrics_to_platform=False
        )

    return rounds
