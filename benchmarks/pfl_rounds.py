"""Rounds of pfl-research (Apple's simulator), if it is installed: the peer of `benchmarks.cohort_speed`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from discreet.data.examples import Task
from discreet.data.partition import ClientExamples
from discreet.settings.training import TrainingConfig

NOISE_MULTIPLIER = 1.0


class _Classifier(nn.Module):
    """What pfl-research asks of a model: a loss and metrics."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def loss(self, inputs: Tensor, targets: Tensor, **_: Any) -> Tensor:
        """The mean cross entropy."""
        return nn.functional.cross_entropy(self.layers(inputs), targets)

    def metrics(self, inputs: Tensor, targets: Tensor, **_: Any) -> dict[str, Any]:
        """None: what is timed is training."""
        return {}


def pfl_rounds(
    layers: nn.Module, task: Task, held: ClientExamples, *, training: TrainingConfig, clip_norm: float
) -> Callable[[Sequence[int]], None]:
    """A function that trains one round of the clients it is given: federated averaging with central Gaussian noise.

    Raises:
        ImportError: pfl-research is not installed.
    """
    simulate, data, hyperparam = (_part(name) for name in ("aggregate.simulate", "data", "hyperparam"))
    algorithm, models, privacy = (_part(name) for name in ("algorithm", "model.pytorch", "privacy"))

    def examples(client: int) -> Any:
        numbers = torch.from_numpy(held.examples(client))
        return _part("data.pytorch").PyTorchTensorDataset((task.train.inputs[numbers], task.train.targets[numbers]))

    waiting: list[int] = []
    classifier = _Classifier(layers)
    model = models.PyTorchModel(classifier, torch.optim.SGD, torch.optim.SGD(classifier.parameters(), lr=1.0))
    noise = privacy.CentrallyAppliedPrivacyMechanism(privacy.GaussianMechanism(clip_norm, NOISE_MULTIPLIER))
    users = data.FederatedDataset(examples, lambda: waiting.pop())
    backend = simulate.SimulatedBackend(users, None, postprocessors=[noise])
    local = hyperparam.NNTrainHyperParams(
        local_batch_size=training.batch_size, local_num_epochs=1, local_learning_rate=training.learning_rate
    )

    def rounds(clients: Sequence[int]) -> None:
        waiting[:] = clients
        plan = algorithm.NNAlgorithmParams(
            central_num_iterations=1, evaluation_frequency=1000, train_cohort_size=len(clients), val_cohort_size=0
        )
        rated = hyperparam.NNEvalHyperParams(local_batch_size=None)
        run = algorithm.FederatedAveraging().run
        run(plan, backend, model, local, rated, send_metrics_to_platform=False)

    return rounds


def _part(name: str) -> Any:
    return import_module(f"pfl.{name}")
