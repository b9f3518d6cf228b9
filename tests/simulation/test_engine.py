"""What an engine is built with: how many clients at once, and whose examples."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.own_models import OWN
from discreet.data.datasets import load_task
from discreet.data.examples import Examples
from discreet.mechanisms.sums import PartialReply
from discreet.models.fixed_part import behind_fixed
from discreet.models.models import MODELS, build_model, flatten_parameters
from discreet.per_example.objective import cross_entropy
from discreet.server.plan import plan_of, planned
from discreet.settings.compose import load_config
from discreet.settings.rules import ConfigError
from discreet.settings.training import TaskConfig
from discreet.simulation.client_examples import shared_examples
from discreet.simulation.cohort import BatchedTransport
from discreet.simulation.engine import LARGEST_CHUNK, chunk_size, client_floats, engine_of, trains_together
from discreet.simulation.in_process import simulate
from discreet.simulation.layer_sequence import sequence_of
from discreet.simulation.mapped_model import MappedModel, mapped_model


def test_large_models_are_trained_fewer_at_a_time() -> None:
    sizes = [
        chunk_size(client_floats(build_model(name, (1, 28, 28), 10, seed=5), torch.rand(1, 1, 28, 28), batch_size=10))
        for name in ("logistic_regression", "mlp", "mlp200")
    ]
    assert sizes == sorted(sizes, reverse=True)
    assert 1 <= sizes[2] < sizes[1] < sizes[0] <= LARGEST_CHUNK["cpu"]


@pytest.mark.parametrize("name", sorted({*MODELS} - {"lstm"}))
def test_every_model_of_images_has_its_passes_by_hand(name: str) -> None:
    images = Examples(torch.zeros(1, 1, 28, 28), torch.zeros(1, dtype=torch.int64))
    learned, features = behind_fixed(build_model(name, (1, 28, 28), 10, seed=5), images)
    assert sequence_of(learned, features.inputs.shape[1:]) is not None


@pytest.mark.parametrize("level", ["user", "example"])
@pytest.mark.parametrize("name", OWN)
def test_own_models_are_trained_together_unless_their_steps_would_be_many_calls(name: str, level: str) -> None:
    words = [f"privacy.{level}.enabled=true", f"privacy.{level}.noise_multiplier=1", "training.batch_size=10"]
    engine = engine_of(planned(load_config([*words, f"model.name={name}"])), load_task("digits"))
    assert isinstance(engine.model, MappedModel)
    assert engine.model.together == ("Recurrent" not in name)


def test_what_vmap_follows_otherwise_than_one_client_goes_alone() -> None:
    """Its forward reads a weight that was made beforehand, which is no client's."""
    task = load_task("digits")
    model, data = Aliased(), shared_examples(task.train, torch.device("cpu"))
    assert mapped_model(model, cross_entropy).together
    assert not trains_together(mapped_model(model, cross_entropy), data, TaskConfig(), by_example=False)


class Aliased(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.exit = nn.Linear(64, 10)
        self.kept = [self.exit.weight]

    def forward(self, images: Tensor) -> Tensor:
        return functional.linear(images.flatten(1), self.kept[0], self.exit.bias)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_updates() -> None:
    task, found = load_task("digits"), []
    for device in ("cpu", "cuda"):
        words = ["privacy.noise=float", "privacy.user.noise_multiplier=1", f"device={device}"]
        run = plan_of(load_config(["seed=90001", "data.num_clients=40", "model.name=cnn", *words]))
        start = flatten_parameters(build_model("cnn", task.shape.input_shape, task.shape.num_classes, seed=5))
        with BatchedTransport(run, engine_of(run, task), accounts=None) as exchange:
            replies = list(exchange.ask(round_number=1, params=start, clip_norm=0.1, cohort=range(9)))
        found.append(sum(part.values for part in replies if isinstance(part, PartialReply)))
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-5)


def test_a_device_that_is_not_there_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, said in (("cuda", "device=cuda needs a GPU"), ("tpu", r"device must be cpu or cuda \(got tpu\)")):
        with pytest.raises(ConfigError, match=said):
            simulate(load_config([f"device={device}"]))
