"""Clipping at every scale of a float: nothing is hidden below the smallest square or behind the
largest."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from discreet.layers.terms import Outer, Slot
from discreet.per_example.objective import cross_entropy
from discreet.per_example.per_example import (
    clipped_gradient_sum,
    l1_clipped_gradient_sum,
)
from discreet.per_example.trial import FLOAT32, PARTS, PRECISION, exact_products
from discreet.privacy.quantile import LARGEST_NUMBER, LEAST_NUMBER
from discreet.simulation.chunk import SecureDraws
from discreet.training.local_training import LocalSettings
from tests.per_example.in_turn import sequential_sum
from tests.per_example.layers_cases import DATA_OWNERS, SEQUENCES, WEIGHTS, Case, encoder
from tests.per_example.layers_table import inputs_of, model_of
from tests.simulation.chunks import Clients
from tests.simulation.test_chunk import MODELS, secure

SCALES = (1e-40, 1e-32, 1e-27, 1e-22, 1e-9, 1.0, 1e25, 1e38)
NOTHING = 1e-18  # to the least clip norm
SUMS = {2: clipped_gradient_sum, 1: l1_clipped_gradient_sum}
# Many positions, so that their norms come from Gram matrices.
LONG = [
    Case(lambda: nn.Linear(40, 30), (3, 40)),
    Case(lambda: encoder(batch_first=True, dropout=0.0), (2, 6)),
]
CASES = [*WEIGHTS, *SEQUENCES, *DATA_OWNERS, *LONG]


class ScaledLoss:
    """One object for all scales: what a loss does to examples is looked at once."""

    by = 1.0

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return self.by * cross_entropy(outputs, targets)


Made = list[tuple[Case, nn.Module, ScaledLoss]]


@pytest.fixture(scope="module")
def models() -> Made:
    """The model of each case and its loss: made once, so that what they do is tried once."""
    torch.manual_seed(1009)
    return [(case, model_of(case), ScaledLoss()) for case in CASES]


def sums_of(
    model: nn.Module, one: Tensor, order: int, loss: ScaledLoss
) -> list[tuple[float, float, float]]:
    """For one example, and its loss at all scales: the norm that is reported, the clip norm (for
    small gradients one that leaves them alone), and the norm of the clipped sum in float64."""
    targets, found = torch.tensor([1]), []
    for loss.by in SCALES:
        clip = LARGEST_NUMBER if loss.by < 1 else LEAST_NUMBER
        how = {"clip_norm": clip, "loss": loss}
        total, norms = SUMS[order](model, one, targets=targets, **how)  # type: ignore[operator]
        found.append(
            (float(norms[0]), clip, float(torch.linalg.vector_norm(total.double(), order)))
        )
    return found


@pytest.mark.parametrize(("order", "inputs"), [(2, 1.0), (2, 1e15), (1, 1e15)])
def test_one_example_adds_at_most_the_clip_norm_and_its_reported_norm(
    order: int, inputs: float, models: Made
) -> None:
    for case, model, loss in models:
        one = inputs_of(case)[:1] * (1 if case.ids else inputs)
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch on padding
            try:
                found = sums_of(model, one, order, loss)
            except ValueError:  # a layer that is refused
                continue
        for norm, clip, added in found:
            assert added <= min(clip, norm + NOTHING) * (1 + 1e-5), case
            assert added == 0 or math.isfinite(norm)


@pytest.mark.parametrize("way", ["parameters", "autocast"])
def test_bfloat16_rounds_what_the_model_computes_and_not_what_is_clipped(
    way: str, models: Made
) -> None:
    for case, model, _ in models:
        inputs, targets = inputs_of(case)[:1], torch.tensor([1])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of PyTorch on padding
            try:
                _, (true,) = clipped_gradient_sum(
                    model, inputs, targets=targets, clip_norm=LARGEST_NUMBER
                )
            except ValueError:  # a layer that is refused
                continue
            clip = float(true) / 2 or 1.0
            if way == "parameters":
                model = copy.deepcopy(model).bfloat16()
                inputs = inputs if case.ids else inputs.bfloat16()
            with torch.autocast("cpu", torch.bfloat16, enabled=way == "autocast"):
                try:
                    model(inputs)
                except RuntimeError:  # bilinear is not for autocast
                    continue
                total, (norm,) = clipped_gradient_sum(
                    model, inputs, targets=targets, clip_norm=clip
                )
        assert total.dtype == torch.float32
        assert total.double().norm() <= clip * (1 + 1e-5), case
        torch.testing.assert_close(norm, true, rtol=0.1, atol=1e-6)


@pytest.mark.parametrize("model", MODELS)
def test_what_one_example_of_a_simulated_client_adds_is_at_most_the_clip_norm(model: str) -> None:
    clients = Clients(model, MODELS[model], (1,))
    chunk = clients.chunk([LocalSettings(1, 1, 0.1, 0.0)], SecureDraws(secure()))
    params = chunk.model.layout.copies(clients.start, 1)
    batch = chunk.read(chunk.table, mean=False)
    for scale in SCALES:
        for clip in (1e-27, LEAST_NUMBER, 1.0, LARGEST_NUMBER):
            total = chunk.model.clipped_sums(
                params, replace(batch, weights=batch.weights * scale), clip
            )
            assert float(total.double().norm()) <= clip * (1 + 1e-5)


@pytest.mark.parametrize("clip", [1e-10, 1e-36, 1e10, 0.0, math.nan, math.inf])
def test_a_clip_norm_that_float32_does_not_bear_is_refused(clip: float) -> None:
    for clipped in SUMS.values():
        with pytest.raises(ValueError, match=r"clip_norm must be within \[1e-09, 1e\+09\], not"):
            clipped(nn.Linear(2, 2), torch.ones(1, 2), targets=torch.tensor([0]), clip_norm=clip)  # type: ignore[operator]


def test_a_gram_matrix_of_small_numbers_hides_no_gradient_whose_other_factor_is_huge() -> None:
    draws = torch.Generator().manual_seed(15013)
    inputs, grads = (
        1e-24 * torch.rand(1, 2, 40, generator=draws),
        1e18 * torch.rand(1, 2, 30, generator=draws),
    )
    term = Outer(Slot(0, torch.Size([30, 40])), inputs, grads)
    true = float(torch.bmm(grads.double().transpose(1, 2), inputs.double()).norm())
    assert float(term.mass(2).sqrt()) >= true


def test_in_l1_the_rounding_of_the_smallest_floats_is_not_multiplied_by_a_huge_input() -> None:
    loss = lambda outputs, targets: 1e-30 * cross_entropy(outputs, targets)  # noqa: E731
    inputs = torch.tensor([[3.1e38]])
    model = nn.Linear(1, 2)
    nn.init.zeros_(model.weight)
    total, _ = l1_clipped_gradient_sum(
        model, inputs, targets=torch.tensor([0]), clip_norm=LEAST_NUMBER, loss=loss
    )
    assert float(total.abs().sum()) <= LEAST_NUMBER


class Tied(nn.Module):
    """A table that is looked up and multiplied by."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)

    def forward(self, ids: Tensor) -> Tensor:
        return nn.functional.linear(3 * self.table(ids).sum(1), self.table.weight)


def test_the_clipped_gradient_of_a_tied_table_is_no_longer_than_its_clip_norm() -> None:
    draws = torch.Generator().manual_seed(5107)
    longest = 0.0
    for seed in range(8):
        with torch.random.fork_rng():
            torch.default_generator.manual_seed(seed)
            model = Tied()
        ids = torch.randint(0, 11, (8, 3), generator=draws)
        targets = torch.randint(0, 11, (8,), generator=draws)
        for row in range(8):
            one = slice(row, row + 1)
            total, _ = clipped_gradient_sum(model, ids[one], targets=targets[one], clip_norm=0.01)
            longest = max(longest, float(total.double().norm()) / 0.01)
    assert longest <= 1.0001


def found_for(kind: str) -> list[str]:
    """By how much products of float32 may be rounded on a kind of device."""
    return [getattr(part, PRECISION) for part in PARTS[kind]]


class Exact(nn.Module):
    """Is zero where products of float32 are not rounded further while a model is computed."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * sum(each != FLOAT32 for each in found_for("cpu"))


@pytest.mark.parametrize("how", [clipped_gradient_sum, l1_clipped_gradient_sum, sequential_sum])
def test_products_are_of_float32_though_the_caller_allows_fewer_bits(
    how: Callable[..., object],
) -> None:
    if not PARTS["cpu"]:
        pytest.skip("needs PyTorch 2.9, which tells by how much products are rounded")
    model = nn.Sequential(nn.Conv2d(1, 2, 3), Exact(), nn.Flatten(), nn.Linear(8, 2))
    inputs, targets = torch.randn(6, 1, 4, 4), torch.tensor([0, 1] * 3)
    torch.set_float32_matmul_precision("medium")
    before = found_for("cpu")
    try:
        found = how(model, inputs, targets=targets, clip_norm=1.0)
        after = found_for("cpu")
    finally:
        torch.set_float32_matmul_precision("highest")
    total = found[0] if isinstance(found, tuple) else found
    weight, bias = total[20:36], total[36:]  # of the last layer: what it sees is zero
    assert float(weight.abs().max()) == 0 < float(bias.abs().max())
    assert "bf16" in before
    assert after == before


def test_a_gpus_products_are_of_float32_and_left_as_they_were() -> None:
    if not PARTS["cuda"]:
        pytest.skip("needs PyTorch 2.9, which tells by how much products are rounded")
    before = found_for("cuda")
    with exact_products(torch.device("cuda")):
        assert {*found_for("cuda")} == {FLOAT32}
    assert found_for("cuda") == before
    assert "tf32" in before  # PyTorch's default, of convolutions


def test_a_processor_on_which_they_are_so_anyway_changes_nothing() -> None:
    before = found_for("cpu")
    with exact_products(torch.device("cpu")):
        assert found_for("cpu") == before


def test_older_versions_of_pytorch_have_two_settings_which_are_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(PARTS, "cpu", [])
    torch.set_float32_matmul_precision("medium")
    try:
        with exact_products(torch.device("cpu")):
            inside = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
        after = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    finally:
        torch.set_float32_matmul_precision("highest")
    assert inside == ("highest", False)
    assert after == ("medium", True)
