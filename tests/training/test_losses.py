"""Losses of one value an example are those of PyTorch on it alone, and `to_group_norm` leaves
nothing else to read."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from discreet.data.examples import Examples
from discreet.dpsgd.group_norm import to_group_norm
from discreet.models.models import flatten_parameters
from discreet.per_example.criteria import per_example_loss
from discreet.per_example.objective import PADDING, Loss, cross_entropy
from discreet.per_example.per_example import clipped_gradient_sum, l1_clipped_gradient_sum
from discreet.privacy.randomness import seeded_source
from discreet.settings.training import TaskConfig
from discreet.training.local_training import ExamplePrivacy, LocalSettings, local_update
from discreet.training.losses import LOSSES, loss_of
from tests.node.clients import clipped, gradients
from tests.per_example.test_per_example_oracle import clipped_sum, single_gradients
from tests.sequences import BUILDERS, TAGS, built, sequences


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def classes(*shape: int, padded: bool = False) -> Tensor:
    """Class numbers below 3; with padding in half of the places, and everywhere in the last
    example."""
    found = torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(sum(shape)))
    if padded:
        found[torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.5] = -100
        found[0, 0], found[-1] = 1, -100
    return found


WEIGHT = torch.tensor([0.2, 3.0, 1.0])
CRITERIA: list[nn.Module] = [
    nn.MSELoss(),
    nn.L1Loss(),
    nn.HuberLoss(),
    nn.BCEWithLogitsLoss(),
    nn.MSELoss(reduction="sum"),
    nn.BCEWithLogitsLoss(pos_weight=WEIGHT),
]


def assert_a_loop_agrees(model: nn.Module, inputs: Tensor, targets: Tensor, *, loss: Loss) -> None:
    gradients = single_gradients(model, inputs, targets, loss=loss)
    for order, sum_of in ((2, clipped_gradient_sum), (1, l1_clipped_gradient_sum)):
        options = {"clip_norm": 0.7, "loss": loss}
        total, norms = sum_of(model, inputs, targets=targets, **options)  # type: ignore[operator]
        wanted, wanted_norms = clipped_sum(gradients, 0.7, order=order)
        torch.testing.assert_close(norms.double(), wanted_norms, rtol=2e-4, atol=1e-6)
        assert float((total.double() - wanted).norm()) <= 1e-3 * 0.7


@pytest.mark.parametrize("criterion", CRITERIA, ids=str)
def test_gradients_of_losses_of_numbers_are_those_of_a_loop(criterion: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    inputs, targets = draw(5, 4), draw(5, 3).sigmoid()
    loss = per_example_loss(criterion)
    wanted = [
        criterion(model(one), target.unsqueeze(0))
        for one, target in zip(inputs.split(1), targets, strict=True)
    ]
    torch.testing.assert_close(loss(model(inputs), targets), torch.stack(wanted))
    assert_a_loop_agrees(model, inputs, targets, loss=loss)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weight", [None, WEIGHT])
def test_gradients_with_class_weights_are_those_of_a_loop(
    weight: Tensor | None, smoothing: float
) -> None:
    model, inputs, targets = nn.Linear(4, 3), draw(6, 4), classes(6)
    loss = per_example_loss(nn.CrossEntropyLoss(weight=weight, label_smoothing=smoothing))
    wanted = nn.CrossEntropyLoss(weight=weight, label_smoothing=smoothing, reduction="sum")(
        model(inputs), targets
    )
    torch.testing.assert_close(loss(model(inputs), targets).sum(), wanted)
    if weight is not None and not smoothing:
        by_setting = loss_of(TaskConfig(class_weights=weight.tolist()))
        torch.testing.assert_close(by_setting(model(inputs), targets), loss(model(inputs), targets))
    assert_a_loop_agrees(model, inputs, targets, loss=loss)


class Transposed(nn.Module):
    """Logits as PyTorch's losses want them: (n, classes, positions)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        logits: Tensor = self.layer(inputs)
        return logits.transpose(1, 2)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_padding_counts_for_nothing_and_an_example_of_padding_alone_is_zero(reduction: str) -> None:
    model, inputs, targets = Transposed(), draw(4, 5, 4), classes(4, 5, padded=True)
    loss = per_example_loss(nn.CrossEntropyLoss(reduction=reduction))
    criterion = nn.CrossEntropyLoss(reduction="sum" if reduction == "sum" else "mean")
    pairs = zip(model(inputs)[:3], targets[:3], strict=True)
    wanted = [criterion(logits.unsqueeze(0), target.unsqueeze(0)) for logits, target in pairs]
    torch.testing.assert_close(
        loss(model(inputs), targets), torch.stack([*wanted, torch.tensor(0.0)])
    )
    for each in (loss, cross_entropy) if reduction == "mean" else (loss,):
        torch.testing.assert_close(each(model(inputs), targets), loss(model(inputs), targets))
        assert_a_loop_agrees(model, inputs, targets, loss=each)


@pytest.mark.parametrize("name", sorted(set(LOSSES) - {"cross_entropy", "least_squares"}))
def test_outputs_and_targets_of_other_shapes_are_refused_and_never_broadcast(name: str) -> None:
    with pytest.raises(ValueError, match="many outputs as targets"):
        LOSSES[name](draw(4, 4), draw(4))


CLIP = 0.3
TASKS = {"plain": TaskConfig(), "with weights": TaskConfig(class_weights=[0.5, 2.0, 1.0, 3.0])}


def single_loss(
    model: nn.Module, tokens: Tensor, targets: Tensor, task: TaskConfig = TASKS["plain"]
) -> Tensor:
    """Of one example, by torch.nn, from its own positions alone: the model never sees the
    padding."""
    there = int((targets != PADDING).sum())
    if there == 0:
        return sum((value.sum() for value in model.parameters()), torch.zeros(())) * 0
    own = torch.tensor(task.class_weights or [1.0] * TAGS)[targets[:there]]
    values = nn.CrossEntropyLoss(reduction="none")(
        model(tokens[None, :there])[0].T, targets[:there]
    )
    return (own * values).sum() / there


def sequence_gradients(
    model: nn.Module, data: Examples, task: TaskConfig = TASKS["plain"]
) -> Tensor:
    pairs = zip(data.inputs, data.targets, strict=True)
    found = [
        torch.autograd.grad(single_loss(model, *pair, task), list(model.parameters()))
        for pair in pairs
    ]
    return torch.stack([torch.cat([value.flatten() for value in one]) for one in found])


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
@pytest.mark.parametrize("how", BUILDERS)
def test_clipped_sums_are_those_of_single_examples_without_their_padding(
    how: str, task: TaskConfig
) -> None:
    model, data = built(how), sequences(12)
    rows = sequence_gradients(model, data, task)
    norms = rows.norm(dim=1)
    wanted = (rows * (CLIP / norms.clamp(min=CLIP))[:, None]).sum(0)
    total, found = clipped_gradient_sum(
        model, data.inputs, targets=data.targets, clip_norm=CLIP, loss=loss_of(task)
    )
    torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found, norms, rtol=1e-4, atol=1e-6)
    empty = (data.targets == PADDING).all(dim=1)
    assert empty.any()
    assert float(found[empty].max()) < 1e-18  # what squares may lose counts


@pytest.mark.parametrize("private", [True, False])
def test_a_clients_step_is_that_of_a_loop_over_its_sequences(private: bool) -> None:
    model, data, rate = built(), sequences(9), 0.7
    start, rows = flatten_parameters(model), sequence_gradients(model, data)
    example = ExamplePrivacy(CLIP, 0.0) if private else None
    clipped = rows * (CLIP / rows.norm(dim=1).clamp(min=CLIP))[:, None]
    # The mean over all 9 examples, those of padding alone counted.
    wanted = -rate * (clipped if private else rows).sum(0) / 9
    settings = LocalSettings(1, 9, rate, 0.0, example)
    found = local_update(model, start, data, settings=settings, source=seeded_source(4409))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


IMAGES = (3, 3, 16, 16)


def resnet() -> nn.Module:
    """A stem and a stage of a ResNet, its BatchNorms with weights, biases and statistics as after
    training."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(60427)
        stem = [
            nn.Conv2d(3, 8, 7, 2, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        ]
        stage = [
            nn.Conv2d(8, 16, 3, padding=1, bias=False),
            nn.BatchNorm2d(16),
            nn.ReLU(inplace=True),
        ]
        model = nn.Sequential(
            *stem, *stage, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
        )
        for layer in model.modules():
            if isinstance(layer, nn.BatchNorm2d):
                nn.init.normal_(layer.weight, 1.0, 0.2)
                nn.init.normal_(layer.bias)
    return model


def images() -> Tensor:
    return torch.randn(IMAGES, generator=torch.Generator().manual_seed(8123))


def test_no_example_of_a_converted_resnet_changes_the_outputs_of_another() -> None:
    plain, model = resnet(), to_group_norm(resnet())
    for network, mixes in ((plain, True), (model, False)):
        alone = torch.cat([network(one) for one in images().flip(0).split(1)]).flip(0)
        assert torch.allclose(network(images()), alone, atol=1e-5) is not mixes


def test_a_converted_resnet_trains_per_example() -> None:
    model, inputs, targets = to_group_norm(resnet()), images(), torch.tensor([1, 4, 7])
    with pytest.raises(ValueError, match="BatchNorm"):
        clipped_gradient_sum(resnet(), inputs, targets=targets, clip_norm=0.5)
    total, norms = clipped_gradient_sum(model, inputs, targets=targets, clip_norm=0.5)
    each = gradients(model, Examples(inputs, targets))
    assert float(norms.min()) > 0.5
    torch.testing.assert_close(total, clipped(each, 0.5), rtol=1e-4, atol=1e-5)


class Activated(nn.BatchNorm2d):
    """As timm's: it applies its own layers after the norm."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        self.drop, self.act = nn.Dropout2d(0.1), nn.ReLU()

    def forward(self, input: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(input)))  # type: ignore[no-any-return]


class Doubled(nn.BatchNorm2d):
    """What it does stands in no layer."""

    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_the_activation_of_a_batchnorm_of_its_own_stays() -> None:
    made = to_group_norm(nn.Sequential(nn.Conv2d(3, 4, 3), Activated(4))).eval()
    assert isinstance(made[1].act, nn.ReLU)
    inner = made[0](images())
    expected = torch.relu(nn.functional.group_norm(inner, 4))
    assert torch.allclose(made(images()), expected)


def test_a_batchnorm_that_does_something_else_is_refused() -> None:
    with pytest.raises(ValueError, match=r"model must be a torch\.nn\.Module, not str"):
        to_group_norm("resnet")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"0 \(Doubled\) does more than BatchNorm"):
        to_group_norm(nn.Sequential(Doubled(3)))
