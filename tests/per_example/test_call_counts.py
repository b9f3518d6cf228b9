"""The number of calls that compute. On a GPU they are kernels, whose launches take longer than
their arithmetic."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from benchmarks.loop_speed import clipped_sum, peak_bytes, plain_gradient, seeded
from benchmarks.people_models import CASES, Case
from benchmarks.zoo_speed import ONCE_SLOW
from tests.per_example.call_counts import Calls, as_on


class Block(nn.Module):
    """A basic block of a ResNet (He et al. 2015), with GroupNorm and activations in place."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(32, after) for _ in range(2))
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1:
            narrow = nn.Conv2d(before, after, 1, stride, bias=False)
            self.shortcut = nn.Sequential(narrow, nn.GroupNorm(32, after))

    def forward(self, x: Tensor) -> Tensor:
        """(n, before, h, w) to (n, after, h / stride, w / stride)."""
        found = self.norms[1](self.second(self.relu(self.norms[0](self.first(x)))))
        found += self.shortcut(x)
        activated: Tensor = self.relu(found)
        return activated


def resnet_18() -> Case:
    """ResNet-18 as torchvision builds it, for images of 32 pixels."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.GroupNorm(32, 64)]
    layers += [nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    before = 64
    for after in (64, 128, 256, 512):
        layers += [Block(before, after, 1 if after == before else 2), Block(after, after, 1)]
        before = after
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))
    return Case(model, torch.randn(8, 3, 32, 32), torch.randint(10, (8,)))


def counted(build: Callable[[], Case]) -> tuple[int, int]:
    """The calls of a plain gradient, and of a clipped sum of a batch after the first."""
    case = seeded(build)
    clipped_sum(case, 1.0)
    with Calls() as plain:
        plain_gradient(case)
    with Calls() as ours:
        clipped_sum(case, 1.0)
    return plain.computing, ours.computing


def test_a_clipped_sum_of_resnet_18_makes_at_most_450_calls_on_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    as_on("cuda", monkeypatch)
    _, ours = counted(resnet_18)
    assert ours <= 450


# The calls of a clipped sum over those of a plain gradient.
MOST = {"nanoGPT": 2.5, "BERT": 1.9, "BERT, LoRA": 1.2, "GPT-2, LoRA": 1.2}


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("name", MOST)
def test_a_clipped_sum_makes_few_calls_for_those_of_a_plain_gradient(
    name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    as_on(device, monkeypatch)
    plain, ours = counted(CASES[name])
    assert ours <= MOST[name] * plain


def test_a_clipped_sum_of_t5_holds_at_most_1_6_times_the_memory_of_a_plain_gradient() -> None:
    """Of its many short gradients, 3.0 times if all were built before the first is summed."""
    case = seeded(ONCE_SLOW["T5"])
    clipped_sum(case, 1.0)
    plain = peak_bytes(lambda: plain_gradient(case))
    assert peak_bytes(lambda: clipped_sum(case, 1.0)) <= 1.6 * plain


def test_the_choices_of_a_gpu_change_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, norms = clipped_sum(seeded(resnet_18), 1.0)
    as_on("cuda", monkeypatch)
    total, others = clipped_sum(seeded(resnet_18), 1.0)
    torch.testing.assert_close(total, expected, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(others, norms, rtol=1e-4, atol=0)
