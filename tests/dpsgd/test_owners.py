"""A loop whose units are owners: all rows of one owner are clipped as one, drawn together and
accounted as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from discreet.dpsgd.dpsgd import DPSGD
from discreet.dpsgd.loop_plan import LoopPrivacy
from discreet.ledger.charges import LedgerError
from discreet.ledger.durable_ledger import DurableLedger
from discreet.per_example.objective import cross_entropy
from discreet.per_example.per_example import clipped_gradient_sum, clipped_sum_by_owner
from discreet.privacy.owner_rows import owner_rows
from discreet.privacy.randomness import RandomSource
from tests.per_example.test_per_example_choice import seeded

ROWS = 40
# six patients, with 3 to 8 rows
OWNERS = [f"patient {place * place % 11}" for place in range(ROWS)]


def data(count: int = ROWS) -> tuple[Tensor, Tensor]:
    draws = torch.Generator().manual_seed(6151)
    return torch.randn(count, 5, generator=draws), torch.randint(0, 3, (count,), generator=draws)


def perceptron() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)))


class Texts(nn.Module):
    """An LSTM, whose rule sees several sequences of an owner."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(1, 4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, rows: Tensor) -> Tensor:
        return self.head(self.layer(rows.unsqueeze(2))[0][:, -1])  # type: ignore[no-any-return]


class Images(nn.Module):
    """Convolutions, in groups and not, and norms."""

    def __init__(self) -> None:
        super().__init__()
        layers = [
            nn.Conv1d(1, 4, 2),
            nn.GroupNorm(2, 4),
            nn.ReLU(inplace=True),
            nn.Conv1d(4, 4, 2, groups=2),
        ]
        self.layers = nn.Sequential(
            *layers, nn.PReLU(4), nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 3)
        )

    def forward(self, rows: Tensor) -> Tensor:
        return self.layers(rows.unsqueeze(1))  # type: ignore[no-any-return]


def private(**how: Any) -> DPSGD:
    model, (inputs, targets) = perceptron(), data()
    privacy = LoopPrivacy(seed=70241, **how.pop("privacy", {"noise_multiplier": 1.0}))
    chosen: dict[str, Any] = {"batch_size": 3, "steps": 4, "delta": 1e-3, "owners": OWNERS, **how}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    rows = chosen.pop("dataset", torch.utils.data.TensorDataset(inputs, targets))
    return DPSGD(model, optimizer, rows, privacy=privacy, **chosen)


@pytest.mark.parametrize("build", [perceptron, Texts, Images])
def test_the_gradient_of_the_mean_loss_of_an_owners_rows_is_clipped_as_one(build: Any) -> None:
    model, (inputs, targets) = seeded(build), data(20)
    owners = torch.tensor([int(name.split()[1]) for name in OWNERS[:20]])
    parameters, wanted, lengths = list(model.parameters()), torch.zeros(()), list[float]()
    for owner in owners.unique():
        own = owners == owner
        loss = functional.cross_entropy(model(inputs[own]), targets[own])
        flat = torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, parameters)])
        lengths.append(float(flat.norm()))
        wanted = wanted + flat * min(1.0, 0.1 / lengths[-1])
    total, norms = clipped_sum_by_owner(model, (inputs, targets), owners, clip_norm=0.1)
    torch.testing.assert_close(norms, torch.tensor(lengths), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(total, wanted, rtol=1e-4, atol=1e-6)


def test_an_owner_with_all_its_rows_moves_the_sum_by_at_most_the_clip_norm() -> None:
    model, (inputs, targets) = perceptron(), data()
    owners = torch.tensor([int(name.split()[1]) for name in OWNERS])
    total, _ = clipped_sum_by_owner(model, (inputs, targets), owners, clip_norm=0.01)
    rest = owners != 4
    less, _ = clipped_sum_by_owner(
        model, (inputs[rest], targets[rest]), owners[rest], clip_norm=0.01
    )
    by_row, _ = clipped_gradient_sum(model, inputs, targets=targets, clip_norm=0.01)
    without, _ = clipped_gradient_sum(model, inputs[rest], targets=targets[rest], clip_norm=0.01)
    assert float((total - less).norm()) <= 0.01 * (1 + 1e-5)
    assert float((by_row - without).norm()) > 0.02  # by rows it would be more


def test_a_model_that_vmap_can_not_follow_takes_one_owner_after_the_other() -> None:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 3)

        def forward(self, rows: Tensor) -> Tensor:
            return self.layer(rows - torch.from_numpy(rows.numpy().mean(1, keepdims=True)))  # type: ignore[no-any-return]

    (inputs, targets), owners = data(12), torch.arange(12) % 5
    model = seeded(Reads)
    plain = nn.Sequential(model.layer)
    centred = inputs - inputs.mean(1, keepdim=True)
    total, _ = clipped_sum_by_owner(model, (inputs, targets), owners, clip_norm=0.1)
    wanted, _ = clipped_sum_by_owner(plain, (centred, targets), owners, clip_norm=0.1)
    torch.testing.assert_close(total, wanted)


def test_n_and_the_batch_count_owners_and_the_guarantee_says_so() -> None:
    loop = private(privacy={"noise_multiplier": 1.0, "rows_per_owner": 3})
    assert loop.sampling_probability == 3 / 6
    assert loop.adjacency.startswith("zero-out: one owner, with all its rows,")
    seen = set[int]()
    for inputs, targets in loop:
        assert loop._waiting is not None
        owners = loop._waiting.owners
        assert owners is not None
        assert len(owners) == len(inputs)
        counts = torch.bincount(owners, minlength=6)
        assert int(counts.max()) <= 3
        seen |= set(owners.tolist())
        loop.step(inputs, targets)
    assert len(seen) > 3


def test_a_step_is_the_noised_sum_of_the_drawn_owners() -> None:
    loop, model, (inputs, targets) = (
        private(privacy={"noise_multiplier": 0.0}),
        perceptron(),
        data(),
    )
    rows, labels = next(iter(loop))
    drawn = [int((inputs == row).all(1).nonzero()) for row in rows]
    named = sorted(set(OWNERS))
    owners = torch.tensor([named.index(OWNERS[place]) for place in drawn])
    total, _ = clipped_sum_by_owner(model, (inputs[drawn], targets[drawn]), owners, clip_norm=1.0)
    loop.step(rows, labels)
    found = torch.cat(
        [value.grad.flatten() for value in loop._model.parameters() if value.grad is not None]
    )
    torch.testing.assert_close(found, total / 3, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("owner", [None, float("nan"), "", " ", "n/a", pandas.NA, pandas.NaT])
def test_a_row_without_an_owner_is_refused_because_its_person_may_have_others(owner: Any) -> None:
    with pytest.raises(ValueError, match=r"owners: 2 rows .*row 3"):
        private(owners=[*OWNERS[:3], owner, owner, *OWNERS[5:]])


def test_all_rows_of_an_owner_are_in_one_piece() -> None:
    loop = private(privacy={"noise_multiplier": 1.0, "rows_per_owner": 4, "max_physical_batch": 5})
    before = set[int]()
    for inputs, targets in loop:
        assert loop._waiting is not None
        owners = set(loop._waiting.owners.tolist())  # type: ignore[union-attr]
        assert len(inputs) <= 5
        assert not owners & before
        before = set() if loop.step(inputs, targets) else before | owners


def test_the_rows_of_an_owner_are_drawn_anew_in_each_step_each_as_often() -> None:
    rows, counts = owner_rows([0] * 6 + [1], 7, 2), torch.zeros(7)
    for step in range(600):
        drawn = rows.drawn(0, RandomSource(b"k" * 32, is_secure=False).child("step", step))
        assert len(set(drawn)) == 2
        counts[drawn] += 1
    assert counts[6] == 0
    # false alarm below 1e-8
    assert float((counts[:6] - 200).abs().max()) < 6 * (600 * (1 / 3) * (2 / 3)) ** 0.5


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"owners": OWNERS[:-1]}, "one for each of the 40 examples"),
        ({"collate_fn": torch.utils.data.default_collate}, "another order"),
        (
            {"privacy": {"noise_multiplier": 1.0, "max_physical_batch": 4}},
            "max_physical_batch must be at least",
        ),
        ({"batch_size": 7}, "batch_size must be at most 6"),
        (
            {"owners": None, "privacy": {"noise_multiplier": 1.0, "rows_per_owner": 8}},
            "rows_per_owner needs owners=",
        ),
        (
            {"dataset": data()},
            r"dataset: give torch\.utils\.data\.TensorDataset\(inputs, targets\)",
        ),
    ],
)
def test_what_would_part_rows_from_their_owner_is_refused(
    how: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        private(**how)


def test_a_ledger_of_owners_is_none_of_examples_nor_the_reverse(tmp_path: Path) -> None:
    ledgers = [tmp_path / name for name in ("owners.db", "examples.db")]
    for path in ledgers:
        DurableLedger.create(path)
    for path, owners in ((ledgers[0], OWNERS), (ledgers[1], None)):
        loop = private(privacy={"noise_multiplier": 1.0, "ledger": path}, owners=owners)
        loop.step(*next(iter(loop)))
    # A row moves an owner's clipped gradient by up to twice the clip norm.
    with pytest.raises(LedgerError, match="charged for owners"):
        private(privacy={"noise_multiplier": 1.0, "ledger": ledgers[0]}, owners=None)
    with pytest.raises(LedgerError, match="charged for single examples"):
        private(privacy={"noise_multiplier": 1.0, "ledger": ledgers[1]})


def test_an_empty_batch_of_owners_takes_its_step() -> None:
    loop = private(batch_size=1, steps=12)
    sizes = []
    for inputs, targets in loop:
        sizes.append(len(inputs))
        loop.step(inputs, targets)
    assert 0 in sizes
    assert loop.steps_taken == 12


def test_a_mean_over_the_rows_of_an_owner_is_no_mean_over_owners() -> None:
    model, (inputs, targets) = perceptron(), data(6)
    twice = torch.cat([inputs, inputs]), torch.cat([targets, targets])
    owners = torch.arange(6)
    once, _ = clipped_sum_by_owner(model, (inputs, targets), owners, clip_norm=0.1)
    both, _ = clipped_sum_by_owner(
        model, (twice[0], twice[1]), torch.cat([owners, owners]), clip_norm=0.1
    )
    single, _ = clipped_gradient_sum(
        model, inputs, targets=targets, clip_norm=0.1, loss=cross_entropy
    )
    torch.testing.assert_close(once, both)
    torch.testing.assert_close(once, single)
