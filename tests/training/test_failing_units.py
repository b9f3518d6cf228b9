"""Units whose gradient can't be computed count as zero, and the others as before."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from discreet.data.examples import Examples
from discreet.mechanisms.client_noise import LocalPrivacy
from discreet.mechanisms.local_noise import release_step
from discreet.models.models import flatten_parameters, masks_from
from discreet.privacy.randomness import seeded_source
from discreet.training.failing_units import COUNTS_AS_ZERO, NOISE_ALONE, RAISES
from discreet.training.local_training import (
    ExamplePrivacy,
    LocalSettings,
    OneClient,
    local_update,
)
from discreet.training.shared_step import SharedClip, shared_step
from discreet.training.units import Drawn
from tests.node.clients import examples

CLIP = 0.05
FAR = 1000.0


class Raises(nn.Module):
    """Raises where a row is far from all others, after it has noted something in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("noted", torch.zeros(5))

    def forward(self, inputs: Tensor) -> Tensor:
        if float(inputs.detach().abs().max()) >= FAR:
            self.noted.detach().numpy()[:] += 3.0
            raise ArithmeticError("a row is far from all others")
        return self.layer(inputs + self.noted)


def made() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(40771)
        return Raises()


def with_outlier(count: int = 7) -> Examples:
    found = examples(count)
    found.inputs[2] = FAR
    return found


def settings(failing: str, **more: int) -> LocalSettings:
    private = ExamplePrivacy(CLIP, 1.3, **more)
    return LocalSettings(1, 4, 0.1, 0.0, private, failing=failing)


def total(data: Examples, rows: list[int], failing: str = COUNTS_AS_ZERO) -> Tensor:
    """The clipped sum of some rows."""
    client = OneClient(made(), data, settings(failing), seeded_source(5011))
    drawn = torch.tensor(rows)
    return client.clipped_sums([], Drawn(drawn, drawn), CLIP)[0]


ALL = [0, 1, 2, 3, 4, 5, 6]
OTHERS = [0, 1, 3, 4, 5, 6]


def test_a_row_that_fails_counts_as_zero_and_the_others_as_without_it() -> None:
    found = total(with_outlier(), ALL)
    assert torch.allclose(found, total(with_outlier(), OTHERS), atol=1e-7)
    assert float(found.norm()) > CLIP


def test_each_other_row_is_clipped_to_the_clip_norm() -> None:
    for row in OTHERS:
        assert float(total(with_outlier(), [2, row]).norm()) <= CLIP
        assert float(total(with_outlier(), [2, row]).norm()) > CLIP * 0.99


def test_a_row_that_fails_in_a_shared_step_counts_as_zero_too() -> None:
    def step(rows: list[int]) -> Tensor:
        data = with_outlier().subset(torch.tensor(rows))
        how = settings(COUNTS_AS_ZERO)
        params = flatten_parameters(made())
        return shared_step(
            made(), params, data, settings=how, clip=SharedClip(CLIP, seeded_source(1))
        )

    assert torch.allclose(step(ALL), step(OTHERS), atol=1e-9)
    assert float(step([2, 0]).norm()) <= CLIP * 0.1 / 4


def test_a_row_that_fails_in_a_laplace_step_is_clipped_in_l1_beside_the_others() -> None:
    privacy = LocalPrivacy("laplace_step", CLIP, 1e-9)
    moved = release_step(
        made(),
        with_outlier().subset(torch.tensor([2, 0])),
        training=settings(COUNTS_AS_ZERO),
        privacy=privacy,
        source=seeded_source(3),
    )
    assert float(moved.abs().sum()) <= CLIP * 0.1 / 2 * (1 + 1e-5)
    assert float(moved.abs().sum()) > CLIP * 0.1 / 2 * 0.99


def test_an_owner_with_a_row_that_fails_counts_as_zero_with_all_rows() -> None:
    data = with_outlier()
    owned = Examples(data.inputs, data.targets, torch.tensor([0, 1, 1, 2, 2, 3, 3]))
    client = OneClient(
        made(), owned, settings(COUNTS_AS_ZERO, rows_per_owner=2), seeded_source(5011)
    )

    def of(owners: list[int]) -> Tensor:
        drawn = client.units.drawn(torch.tensor(owners), seeded_source(7))
        return client.clipped_sums([], drawn, CLIP)[0]

    assert torch.allclose(of([0, 1, 2, 3]), of([0, 2, 3]), atol=1e-7)


def test_people_who_train_on_their_own_data_get_the_error() -> None:
    with pytest.raises(ArithmeticError, match="far from all others"):
        total(with_outlier(), ALL, RAISES)


def test_noise_alone_reads_no_example_and_is_that_of_every_step() -> None:
    class Unread:
        owners = None

        def __len__(self) -> int:
            return 8

        def subset(self, indices: Tensor) -> Examples:
            if len(indices):
                raise AssertionError("an example is read")
            return examples(8).subset(indices)

    start = flatten_parameters(made())
    how = settings(NOISE_ALONE)
    moved = local_update(made(), start, Unread(), settings=how, source=seeded_source(11))
    assert float(moved.norm()) > 0
    plain = LocalSettings(1, 4, 0.1, 0.0, failing=NOISE_ALONE)
    assert not local_update(made(), start, Unread(), settings=plain, source=seeded_source(1)).any()


def test_an_absent_example_leaves_the_dropout_masks_of_the_others() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(40787)
        model = nn.Sequential(nn.Linear(5, 64), nn.Dropout(0.5), nn.Linear(64, 3))

    def of(rows: list[int]) -> Tensor:
        client = OneClient(model, examples(7), settings(COUNTS_AS_ZERO), seeded_source(5011))
        drawn = torch.tensor(rows)
        with masks_from(client.source, model):
            return client.clipped_sums([], Drawn(drawn, drawn), CLIP)[0]

    moved = of([0, 1, 2, 3, 4, 5, 6]) - of([1, 2, 3, 4, 5, 6])
    assert float(moved.norm()) <= CLIP * (1 + 1e-5)
    assert torch.allclose(of([5, 1, 3]), of([1, 3, 5]), atol=1e-7)
