"""DPSGD against a loop of single examples; its batches, noise and account against what they are
said to be."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent, SelfComposedDpEvent
from dp_accounting.pld import PLDAccountant
from scipy import stats
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, SGD, Adam, AdamW
from torch.utils.data import TensorDataset

from discreet import AdaptiveClipping
from discreet.dpsgd.dpsgd import DPSGD, BatchError
from discreet.dpsgd.loop_plan import LoopPrivacy
from discreet.ledger.budget import BudgetSpent
from discreet.privacy.mechanisms import Gaussian
from discreet.privacy.randomness import RandomSource
from tests.dpsgd.loops import (
    BATCH,
    CLIP,
    COUNTED,
    NOISE,
    PAIRS,
    SIZE,
    Made,
    by_hand,
    private,
    run,
    sgd,
)
from tests.node.clients import linear, params_of

OPTIMIZERS: dict[str, Made] = {
    "SGD": sgd,
    "momentum": partial(SGD, lr=0.3, momentum=0.7, weight_decay=0.1),
    "Adam": partial(Adam, lr=0.05),
    "AdamW": partial(AdamW, lr=0.05, weight_decay=0.2),
}


def close(one: Tensor, other: Tensor, tolerance: float = 2e-5) -> bool:
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance)


def gradient_of(model: nn.Module) -> Tensor:
    return torch.cat(
        [value.grad.flatten() for value in model.parameters() if value.grad is not None]
    )


@pytest.mark.parametrize("made", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_it_is_a_loop_of_single_examples_clipped_summed_noised_and_divided(
    made: Made,
) -> None:
    model = linear()
    run(private(model, made))
    assert close(params_of(model), by_hand(made))
    assert not close(params_of(model), by_hand(made, noise=0.99 * NOISE))


@pytest.mark.parametrize("most", [1, 3, 64])
def test_a_batch_in_pieces_is_the_whole_batch_with_one_noise_and_one_charge(
    most: int,
) -> None:
    whole, cut = linear(), linear()
    loops = run(private(whole)), run(private(cut, max_physical_batch=most))
    assert close(params_of(cut), params_of(whole))
    assert loops[0].epsilon() == loops[1].epsilon()


class Unused(nn.Module):
    """Two parameters, of which the pass uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(5, 3), nn.Parameter(torch.zeros(20_000))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.used(inputs)


def rejects_scale(noise: Tensor, stddev: float) -> bool:
    """Chi-square test of a standard deviation: a false alarm in 1e9 samples at most."""
    statistic = float((noise.double() / stddev).square().sum())
    return bool(
        2 * min(stats.chi2.sf(statistic, len(noise)), stats.chi2.cdf(statistic, len(noise))) < 1e-9
    )


def test_a_parameter_that_the_pass_does_not_use_gets_the_full_noise_and_nothing_else() -> None:
    model = Unused()
    loop = private(model, seed=None)
    loop.step(*next(iter(loop)))
    assert model.unused.grad is not None
    noise = model.unused.grad * BATCH
    assert not rejects_scale(noise, NOISE * CLIP)
    assert rejects_scale(noise, NOISE * CLIP / 2)
    assert rejects_scale(noise, NOISE * CLIP * 1.1)


def test_frozen_parameters_stay_and_get_neither_gradient_nor_noise() -> None:
    frozen = nn.Linear(5, 4).requires_grad_(False)
    model = nn.Sequential(frozen, nn.ReLU(), nn.Linear(4, 3))
    before = params_of(model)
    frozen.weight.grad = torch.ones(4, 5)
    run(private(model))
    assert frozen.weight.grad is None
    assert torch.equal(params_of(model)[:24], before[:24])
    assert not (params_of(model)[24:] == before[24:]).any()


def sums_to_noise(
    inputs: Tensor, monkeypatch: pytest.MonkeyPatch, most: int | None = None
) -> list[Tensor]:
    """What the steps of a loop give to be noised: the same batches, a model that stays."""
    model, found = linear(), list[Tensor]()
    data = TensorDataset(inputs, torch.arange(len(inputs)) % 3)
    loop = private(
        model, partial(SGD, lr=0.0), dataset=data, public_num_examples=40, max_physical_batch=most
    )

    def noised(_: Gaussian, total: Tensor, sensitivity: float, source: RandomSource) -> Tensor:
        assert sensitivity == CLIP
        found.append(total.clone())
        return total

    monkeypatch.setattr(Gaussian, "add_noise", noised)
    for batch in loop:
        loop.step(*batch)
    return found


def test_one_example_more_moves_each_sum_by_at_most_the_clip_norm_which_one_reaches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more = torch.cat([COUNTED.inputs, torch.full((1, 5), -1e5)])
    fewer = sums_to_noise(COUNTED.inputs, monkeypatch)
    pairs = zip(fewer, sums_to_noise(more, monkeypatch, 3), strict=True)
    moved = [float((one - other).norm()) for one, other in pairs]
    assert max(moved) <= CLIP * (1 + 1e-5)
    assert max(moved) > 0.999 * CLIP
    assert min(moved) < 1e-5


def test_an_empty_batch_takes_a_step_of_pure_noise() -> None:
    model = linear()
    loop = private(model, batch_size=1, epochs=1, noise_multiplier=3.0)
    for inputs, targets in loop:
        loop.step(inputs, targets)
        if len(inputs) == 0:
            break
    assert len(inputs) == 0
    assert gradient_of(model).count_nonzero() > 12  # a rounded value may be 0


def oracle(steps: int, probability: float) -> float:
    """Epsilon of Poisson-sampled Gaussian steps by dp-accounting."""
    event = PoissonSampledDpEvent(probability, GaussianDpEvent(NOISE))
    return float(PLDAccountant().compose(SelfComposedDpEvent(event, steps)).get_epsilon(1e-3))


def test_epsilon_is_that_of_the_steps_taken_and_of_no_batch_that_was_only_drawn() -> None:
    loop = private(linear())
    assert loop.epsilon() == 0
    batches = iter(loop)
    for _ in range(3):
        loop.step(*next(batches))
    next(batches)
    assert math.isclose(loop.epsilon(), oracle(3, BATCH / SIZE), rel_tol=1e-3)
    assert loop.epsilon(1e-5) > loop.epsilon()


def test_a_declared_number_of_examples_decides_probability_steps_and_adjacency() -> None:
    loop = private(linear(), public_num_examples=40, epochs=3)
    assert loop.sampling_probability == BATCH / 40
    assert len(loop) == 15
    assert "add or remove" in loop.adjacency
    assert math.isclose(run(loop).epsilon(), oracle(15, BATCH / 40), rel_tol=1e-3)


def test_a_step_that_would_pass_the_budget_is_refused_and_costs_nothing() -> None:
    most, model = oracle(5, BATCH / SIZE) * 1.001, linear()
    loop = private(model, max_epsilon=most)
    with pytest.raises(
        BudgetSpent, match=r"step 6 would reach an example-level epsilon .* max_epsilon=.* is left"
    ):
        run(loop)
    assert (loop.steps_taken, loop.epsilon() <= most) == (5, True)
    now = params_of(model)
    with pytest.raises(BudgetSpent):
        run(loop)
    assert torch.equal(params_of(model), now)


def test_a_batch_of_ones_own_is_refused_and_one_that_was_drawn_is_stepped_once() -> None:
    loop = private(linear())
    with pytest.raises(BatchError, match="no batch is waiting"):
        loop.step(COUNTED.inputs, COUNTED.targets)
    inputs, targets = next(iter(loop))
    for wrong in (
        (inputs.clone(), targets),
        (inputs, targets.clone()),
        (inputs[:-1], targets[:-1]),
    ):
        with pytest.raises(BatchError, match="batch that was drawn"):
            loop.step(*wrong)
    loop.step(inputs, targets)
    with pytest.raises(BatchError, match="stepped once"):
        loop.step(inputs, targets)
    assert loop.steps_taken == 1


def test_a_batch_cannot_be_skipped_and_waits_for_the_next_loop() -> None:
    loop = private(linear())
    batches = iter(loop)
    left = next(batches)
    with pytest.raises(BatchError, match="was not stepped"):
        next(batches)
    assert next(iter(loop))[0] is left[0]


def test_a_loop_ends_with_the_plan_and_an_epoch_with_its_steps() -> None:
    loop = private(linear(), epochs=3)
    ends = []
    for _ in range(3):
        for inputs, targets in loop.epoch():
            loop.step(inputs, targets)
        ends.append(loop.steps_taken)
    assert (ends, len(loop)) == ([4, 8, 12], 12)
    with pytest.raises(BatchError, match="all 12 steps are taken"):
        next(iter(loop))
    with pytest.raises(ValueError, match="was made with steps"):
        run(private(linear(), steps=5)).epoch()


def test_a_list_of_pairs_and_a_loss_of_pytorch_train_as_tensors_and_the_default_do() -> None:
    models = linear(), linear(), linear()
    run(private(models[0]))
    run(private(models[1], dataset=PAIRS))
    run(private(models[2], loss=nn.CrossEntropyLoss(reduction="none")))
    assert torch.equal(params_of(models[1]), params_of(models[0]))
    assert torch.equal(params_of(models[2]), params_of(models[0]))


def test_without_a_seed_two_loops_differ_and_with_one_the_log_warns(
    caplog: pytest.LogCaptureFixture,
) -> None:
    one, other = linear(), linear()
    run(private(one, seed=None))
    run(private(other, seed=None))
    assert not torch.equal(params_of(one), params_of(other))
    assert caplog.text == ""
    private(one)
    assert "protect nobody" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_it_trains_on_a_gpu() -> None:
    on_gpu, on_cpu = linear().to("cuda"), linear()
    run(private(on_gpu))
    run(private(on_cpu))
    assert close(params_of(on_gpu).cpu(), params_of(on_cpu), 1e-4)


def dropped_gradient(known_seed: int, **settings: Any) -> Tensor:
    """The gradient of a step over all examples without noise, of a model whose chance is dropout
    alone."""
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), linear())
    torch.manual_seed(known_seed)
    loop = private(model, batch_size=SIZE, noise_multiplier=0.0, **settings)
    loop.step(*next(iter(loop)))
    return gradient_of(model)


def test_a_seed_of_torch_that_others_know_does_not_tell_the_masks() -> None:
    assert not torch.equal(dropped_gradient(40, seed=None), dropped_gradient(40, seed=None))


def test_masks_come_again_with_the_loops_own_seed_and_leave_torchs_generator_alone() -> None:
    one = dropped_gradient(40)
    before = torch.get_rng_state()
    torch.manual_seed(40)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one, dropped_gradient(41))


class Towers(nn.Module):
    """Two inputs by name, and outputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 3), nn.Linear(5, 3)

    def forward(
        self, left: Tensor, right: Tensor, label: Tensor | None = None
    ) -> dict[str, Tensor]:
        return {"scores": (self.left(left) * self.right(right)).sum(1)}


def test_examples_by_name_go_to_the_model_and_the_loss_by_their_names() -> None:
    draws = torch.Generator().manual_seed(6131)
    rows = {
        "left": torch.randn(60, 4, generator=draws),
        "right": torch.randn(60, 5, generator=draws),
    }
    rows["label"] = (rows["left"][:, 0] * rows["right"][:, 0] > 0).float()
    dataset = [{name: values[row] for name, values in rows.items()} for row in range(60)]
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Towers()

    def loss(outputs: dict[str, Tensor], batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.binary_cross_entropy_with_logits(
            outputs["scores"], batch["label"], reduction="none"
        )

    before = loss(model(**rows), rows).mean().item()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    settings = LoopPrivacy(noise_multiplier=1e-3, seed=8, max_physical_batch=7)
    loop = DPSGD(
        model, optimizer, dataset, batch_size=20, epochs=30, delta=1e-3, loss=loss, privacy=settings
    )
    for inputs, targets in loop:
        assert targets is None
        loop.step(inputs)
    assert loss(model(**rows), rows).mean().item() < 0.8 * before


def two(values: Any) -> Any:
    weight, bias = values
    return [SGD([weight], lr=0.3), Adam([bias], lr=0.1)]


def test_each_optimizer_moves_its_own_part_by_the_gradient_of_the_whole() -> None:
    models, both = [linear(), linear(), linear()], {"steps": 1}
    run(private(models[0], lambda values: SGD(values, lr=0.3), **both))
    run(private(models[1], lambda values: Adam(values, lr=0.1), **both))
    run(private(models[2], two, **both))
    assert torch.equal(params_of(models[2])[:15], params_of(models[0])[:15])
    assert torch.equal(params_of(models[2])[15:], params_of(models[1])[15:])


def test_without_an_optimizer_the_noised_mean_stays_for_one_that_steps_by_itself() -> None:
    own, plain = linear(), linear()
    run(private(plain))
    loop, optimizer = private(own, lambda _: []), SGD(own.parameters(), lr=0.3)
    for batch in loop:
        if loop.step(*batch):
            optimizer.step()
    assert torch.equal(params_of(own), params_of(plain))


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"loss": nn.CrossEntropyLoss()}, r'reduction=.mean.*reduction="none"'),
    (
        {"made": lambda values: SGD([*values, nn.Parameter(torch.zeros(2))], lr=0.1)},
        "not the model's",
    ),
    ({"made": lambda values: [SGD([next(values)], lr=0.1)]}, "not hold all trainable"),
    (
        {"made": lambda values: [SGD(list(values), lr=0.1)] * 2},
        "two .*the same parameter",
    ),
    ({"made": lambda values: LBFGS(list(values))}, "LBFGS is not served"),
    (
        {"made": lambda _: SGD},
        r"optimizer .*torch\.optim\.SGD\(.*, not the class SGD$",
    ),
    (
        {"dataset": torch.zeros(30, 5)},
        r"dataset: .*no targets: give TensorDataset\(",
    ),
    ({"batch_size": 0}, r"batch_size must be .*at least 1\b"),
    ({"batch_size": None}, r"batch_size must be .*at least 1, not None"),
    ({"batch_size": 31}, r"batch_size .*at most 30, .*examples, not 31"),
    ({"public_num_examples": 7}, r"batch_size .*at most 7, public_num_examples, not 8"),
    ({"epochs": 1.5}, "epochs must be a whole"),
    ({"steps": 8, "epochs": 2}, "either epochs or steps"),
    ({"clip_norm": math.inf}, "clip_norm must be within"),
    ({"clip_norm": [1.0] * 9}, "clip_norm .*each of the 8 steps, not 9"),
    ({"clip_norm": [1.0] * 7 + [0.0]}, "clip_norm must be within"),
    ({"clip_norm": AdaptiveClipping(0.0)}, "clip_norm must be within"),
    ({"clip_norm": AdaptiveClipping(1.0, maximum=0.5)}, "clipping.maximum must be within"),
    (
        {"clip_norm": AdaptiveClipping(1.0, count_stddev=0.3)},
        r"count_stddev .*> noise_multiplier / 2",
    ),
    (
        {"clip_norm": AdaptiveClipping()},
        "clip_norm is required: too few",
    ),
    ({"delta": 1 / 30}, r"delta must be .*below 1 / 30\b"),
    (
        {"noise_multiplier": lambda step: step - 7.0},
        r"noise_multiplier must be .*at least 0\b",
    ),
    (
        {"noise_multiplier": 1.0, "target_epsilon": 1.0},
        "either target_epsilon or privacy=LoopPrivacy",
    ),
    ({"accountant": "gdp"}, "accountant must be .*pld.*gdp"),
    ({"max_epsilon": 0.0}, r"max_epsilon must be above 0\b"),
    ({"max_physical_batch": 0}, "max_physical_batch must be a whole"),
    ({"target_epsilon": 0.0}, r"target_epsilon must be .*above 0\b"),
    ({"target_epsilon": "3"}, "target_epsilon .*number, not '3'"),
    ({"delta": "1e-3"}, "delta .*number, not '1e-3'"),
    ({"clip_norm": "1"}, "clip_norm .*number, not '1'"),
    ({"clip_norm": None}, "clip_norm .*number, not None"),
    ({"noise_multiplier": "1"}, "noise_multiplier .*number, not '1'"),
    ({"max_epsilon": "4"}, "max_epsilon .*number, not '4'"),
    ({"loss": "cross_entropy"}, "loss must be a function"),
    (
        {"made": lambda _: None},
        "optimizer must be .*, not NoneType",
    ),
    ({"dataset": []}, "dataset must have at least one"),
    ({"dataset": iter([1])}, "dataset .*map-style"),
    ({"dataset": [(1.0, 2, 3)] * 30}, "example must be a pair"),
    (
        {"dataset": PAIRS, "collate_fn": lambda _: (torch.zeros(1, 5), torch.zeros(1))},
        "as many rows",
    ),
    (
        {"dataset": PAIRS, "collate_fn": lambda _: (torch.zeros(5, 5), [torch.zeros(2)] * 5)},
        "pad lists of several sizes",
    ),
]


NAMES = {
    "max_grad_norm": "clip_norm",
    "noise_multiplier": "privacy=LoopPrivacy(noise_multiplier=...)",
    "target_delta": "delta",
    "data_loader": "dataset",
    "batchsize": "batch_size",
}


@pytest.mark.parametrize(("name", "meant"), NAMES.items())
def test_an_argument_named_as_in_other_libraries_is_told_its_name_here(
    name: str, meant: str
) -> None:
    with pytest.raises(TypeError) as error:
        DPSGD(linear(), [], PAIRS, **{name: 1.0})
    assert str(error.value) == f"DPSGD has no argument {name}; did you mean {meant}?"
    with pytest.raises(TypeError, match=r"argument noise_multipler; did you mean noise_multiplier"):
        LoopPrivacy(noise_multipler=1.0)  # type: ignore[call-arg]


def test_class_numbers_that_are_floats_are_refused_before_a_step_is_charged() -> None:
    loop = private(linear(), dataset=TensorDataset(COUNTED.inputs, COUNTED.targets.float()))
    with pytest.raises(ValueError, match=r"targets: .*torch\.int64"):
        run(loop)
    assert loop.steps_taken == 0


def test_a_lazy_layer_is_refused_before_a_batch_is_drawn() -> None:
    model = nn.LazyLinear(3)
    with pytest.raises(ValueError, match="model: a lazy layer"):
        DPSGD(model, [], PAIRS, batch_size=8, epochs=1, delta=1e-3, target_epsilon=3.0)


def test_settings_that_cannot_be_served_are_refused_by_their_names() -> None:
    for words, said in REFUSED:
        with pytest.raises(ValueError, match=said):
            next(iter(private(linear(), **words)))
    with pytest.raises(ValueError, match="give the module inside"):
        private(
            DistributedDataParallel.__new__(DistributedDataParallel),
            lambda _: sgd(linear().parameters()),
        )
