"""One example has one index: the same one at several, and rows that several items read, are refused
by both indices; what honest data sets share is not."""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, StackDataset, Subset, TensorDataset

from discreet.dpsgd.dpsgd import DPSGD
from discreet.dpsgd.item_watch import ItemWatch
from discreet.dpsgd.loop_plan import LoopPrivacy
from discreet.dpsgd.one_index import check_one_index
from discreet.dpsgd.poisson_batches import PoissonBatches
from discreet.per_example.per_example import clipped_gradient_sum
from discreet.privacy.mechanisms import Gaussian

DRAWS = torch.Generator().manual_seed(6007)
COUNT = 60
X = torch.randn(COUNT, 6, generator=DRAWS)
Y = torch.randint(0, 3, (COUNT,), generator=DRAWS)
FRAME = pd.DataFrame(X.numpy()).assign(y=Y.numpy())
VISITS = pd.DataFrame({"who": [place // 3 for place in range(COUNT)], "x": X[:, 0].numpy()})
HUGGING_FACE = datasets.Dataset.from_dict({"x": X.tolist(), "y": Y.tolist()})
SERIES = torch.randn(COUNT + 5, generator=DRAWS)


class Of(Dataset[Any]):
    """Items made by a function of the data set and an index."""

    def __init__(self, make: Callable[[Any, int], Any], count: int = COUNT, **held: Any) -> None:
        self.make, self.count = make, count
        vars(self).update(held)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, place: int) -> Any:
        return self.make(self, place)


def read_all(dataset: Any, owners: Any = None) -> None:
    """All items, in an order of no pattern."""
    watch = ItemWatch(dataset, owners)
    order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(31)).tolist()
    for place in order:
        watch[place]


def loop(dataset: Any, model: nn.Module | None = None, **more: Any) -> DPSGD:
    model = nn.Linear(6, 3) if model is None else model
    return DPSGD(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        dataset,
        batch_size=10,
        steps=1,
        delta=1e-4,
        privacy=LoopPrivacy(noise_multiplier=1.0, seed=11),
        **more,
    )


PAIRS = TensorDataset(X, Y)
AGAIN = {
    "a subset with repeats": Subset(PAIRS, [0, 1, 2, 3, 1]),
    "a subset of a subset": Subset(Subset(PAIRS, [5, 6, 5]), [0, 2]),
    "the same data twice": ConcatDataset([PAIRS, PAIRS]),
    "the same tensors twice": ConcatDataset([PAIRS, TensorDataset(X, Y)]),
    "parts that share a row": ConcatDataset([Subset(PAIRS, range(9)), Subset(PAIRS, range(8, 20))]),
    "a list of equal views": [(X[place % 8], int(Y[place % 8])) for place in range(16)],
    "a list of equal inputs": [(X[place % 8], torch.tensor(0)) for place in range(16)],
    "a tuple of equal views": tuple((X[place % 8], 0) for place in range(16)),
}
WINDOWS = SERIES.unfold(0, 6, 1)
OVERLAPPING = {
    "rows of unfold": TensorDataset(WINDOWS, Y),
    "rows of several dimensions": TensorDataset(
        torch.as_strided(SERIES, (COUNT, 2, 3), (1, 3, 1)), Y
    ),
    "a part of them": Subset(TensorDataset(WINDOWS, Y), [0, 30, 35]),
    "them beside others": ConcatDataset([PAIRS, TensorDataset(WINDOWS, Y)]),
    "one row as many": TensorDataset(X[:1].expand(COUNT, 6), Y),
    "a list of windows": [(SERIES[at : at + 6], int(Y[at])) for at in range(COUNT)],
    "a list of an array's windows": [
        (SERIES.numpy()[at : at + 6], int(Y[at])) for at in range(COUNT)
    ],
    "pairs of windows": list(zip(WINDOWS, Y, strict=True)),
    "a stack of windows": StackDataset(WINDOWS, Y),
}


@pytest.mark.parametrize("dataset", OVERLAPPING.values(), ids=OVERLAPPING)
def test_windows_that_share_memory_are_refused_with_two_of_them(dataset: Any) -> None:
    with pytest.raises(ValueError, match=r"items \d+ and \d+ share values"):
        loop(dataset)


def test_windows_side_by_side_and_those_of_one_owner_are_accepted() -> None:
    constant = torch.zeros(1, dtype=torch.int64).expand(COUNT)
    for dataset in (
        Subset(TensorDataset(WINDOWS, Y), range(0, COUNT, 6)),
        TensorDataset(SERIES[:60].unfold(0, 6, 6), Y[:10]),
        TensorDataset(X, constant),
        TensorDataset(X.t().contiguous().t(), Y),
        [(SERIES[at : at + 6], constant[:1]) for at in range(0, COUNT, 6)],
    ):
        check_one_index(dataset, None)
    owners = [at // 20 for at in range(COUNT)]
    check_one_index(
        Subset(TensorDataset(WINDOWS, Y), [*range(9), *range(20, 29)]), [0] * 9 + [1] * 9
    )
    with pytest.raises(ValueError, match="items 19 and 20 share values"):
        check_one_index(TensorDataset(WINDOWS, Y), owners)


@pytest.mark.parametrize("dataset", AGAIN.values(), ids=AGAIN)
def test_an_example_at_several_indices_is_refused_with_both(dataset: Any) -> None:
    with pytest.raises(ValueError, match=r"items \d+ and \d+ are the same example"):
        loop(dataset)


def test_parts_and_splits_without_repeats_are_accepted() -> None:
    generator = torch.Generator().manual_seed(3)
    one, other = torch.utils.data.random_split(PAIRS, [20, 40], generator)
    for dataset in (PAIRS, one, ConcatDataset([one, other]), list(PAIRS), Subset(PAIRS, [3, 1])):
        check_one_index(dataset, None)
    same = [((0.5, 1.0), 0)] * 3  # equal values of three people, which Python holds once
    check_one_index(same, None)


def test_copies_of_an_example_of_one_owner_are_accepted_and_clipped_as_one() -> None:
    indices = [place for place in range(20) for _ in range(3)]
    owners = torch.tensor(indices)
    loop(Subset(PAIRS, indices), owners=owners)
    with pytest.raises(ValueError, match="items 0 and 1 are the same example"):
        loop(Subset(PAIRS, indices), owners=torch.arange(60))


SHARED = {
    "base[i % n], a tensor": Of(lambda self, i: (self.x[i % 20], 0), x=X[:20].clone()),
    "base[i // 3], a tensor": Of(lambda self, i: (self.x[i // 3], 0), x=X[:20].clone()),
    "base[i % n], an array": Of(lambda self, i: (self.x[i % 20], 0), x=X[:20].numpy().copy()),
    "base[i % n], a data set": Of(lambda self, i: self.base[i % 20], base=Subset(PAIRS, range(20))),
    "base[i % n], a table": Of(
        lambda self, i: (self.df.iloc[i % 20].to_numpy(), 0), df=FRAME[:20].copy()
    ),
    "base[i % n], a column": Of(lambda self, i: (X[i], self.y.iloc[i % 20]), y=FRAME["y"][:20]),
    "rows that are selected twice": Of(
        lambda self, i: (self.hf[i]["x"], 0), hf=HUGGING_FACE.select([*range(40), *range(20)])
    ),
    "base[i % n], a list": Of(lambda self, i: self.rows[i % 20], rows=list(PAIRS)[:20]),
    "an index list with repeats": Of(
        lambda self, i: (X[self.order[i]], 0), order=[*range(50), *range(10)]
    ),
    "windows": Of(lambda self, i: (SERIES[i : i + 6], SERIES[i + 5])),
    "windows of an array": Of(lambda self, i: (self.s[i : i + 6], 0), s=SERIES.numpy().copy()),
    "windows, number by number": Of(
        lambda self, i: (torch.stack([SERIES[i + k] for k in range(6)]), 0)
    ),
    "windows of a table": Of(
        lambda self, i: (self.s.iloc[i : i + 6].to_numpy(), 0), s=pd.Series(SERIES.numpy())
    ),
    "windows with a stride": Of(lambda self, i: (SERIES[2 * i : 2 * i + 3], 0), count=30),
}


@pytest.mark.parametrize("dataset", SHARED.values(), ids=SHARED)
def test_a_row_that_two_items_read_is_refused_with_both(dataset: Any) -> None:
    with pytest.raises(ValueError, match=r"items \d+ and \d+ read the same row"):
        read_all(dataset)
    read_all(dataset, owners=["one"] * len(dataset))


def test_values_of_overlapping_windows_move_a_sum_by_a_clip_norm_each() -> None:
    """What the refusal is for."""
    model, series = nn.Linear(6, 3), SERIES.clone()
    sums = []
    for value in (0.0, 900.0):
        series[30] = value
        windows = series.unfold(0, 6, 1)[:COUNT]
        sums.append(clipped_gradient_sum(model, windows, targets=Y, clip_norm=0.01)[0])
    assert float((sums[0] - sums[1]).norm()) > 2 * 0.01


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_rows_that_may_be_copies_are_told(
    kind: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    once = X.to(kind)
    more = torch.cat([once, once[10:25]]), torch.cat([Y, Y[10:25]])
    said = "examples 10 and 60 are equal, and 15 in all repeat an earlier one"
    loop(TensorDataset(once, Y))
    assert "repeat" not in caplog.text
    loop(TensorDataset(*more))
    assert said in caplog.text
    caplog.clear()
    loop(TensorDataset(*more), owners=[*range(60), *range(10, 25)])
    loop(TensorDataset(torch.cat([once, once[10:25]]), torch.cat([Y, (Y[10:25] + 1) % 3])))
    loop(TensorDataset((X > 0).to(kind), Y))  # equal by chance
    assert "repeat" not in caplog.text
    for inputs in (X[:, 0], X[:, :1], X[:, :1].double()):  # one column has no second half
        model = nn.Linear(1, 3, dtype=inputs.dtype)
        loop(TensorDataset(inputs.contiguous().reshape(-1, 1), Y), model)
        loop(TensorDataset(inputs, Y), nn.Sequential(nn.Unflatten(0, (-1, 1)), model))
    assert "repeat" not in caplog.text


MEANS, WORDS = torch.randn(6, generator=DRAWS), [f"word {place}" for place in range(500)]
VECTORS = torch.randn(500, 6, generator=DRAWS)
TEXTS = [torch.randint(0, 500, (5,), generator=DRAWS) for _ in range(COUNT)]
ANGLES = torch.randn(100, 6, generator=DRAWS)
ORDER = torch.randperm(COUNT, generator=DRAWS)
HONEST = {
    "means": Of(lambda self, i: ((X[i] - MEANS) / MEANS.abs().mean(), Y[i])),
    "means in an attribute": Of(
        lambda self, i: (X[i] - torch.as_tensor(self.m), 0), m=MEANS.numpy().copy()
    ),
    "a table of labels": Of(lambda self, i: (X[i], self.names[int(Y[i])]), names=["a", "b", "c"]),
    "one-hot rows": Of(lambda self, i: (X[i], self.eye[Y[i]]), eye=torch.eye(3)),
    "a vocabulary's vectors": Of(lambda self, i: (VECTORS[TEXTS[i]].mean(0), 0)),
    "vectors in an array": Of(
        lambda self, i: (self.v[TEXTS[i].numpy()].mean(0), 0), v=VECTORS.numpy().copy()
    ),
    "a vocabulary": Of(
        lambda self, i: (X[i], [self.words[k] for k in TEXTS[i].tolist()]), words=WORDS
    ),
    "numbers of words": Of(
        lambda self, i: (X[i], [self.ids[WORDS[k]] for k in TEXTS[i].tolist()]),
        ids={word: place for place, word in enumerate(WORDS)},
    ),
    "as many words as items": Of(
        lambda self, i: (X[i], sum(self.ids[WORDS[int(k) % COUNT]] for k in TEXTS[i])),
        ids={word: place for place, word in enumerate(WORDS[:COUNT])},
    ),
    "angles of positions": Of(lambda self, i: (ANGLES[: 3 + i % 4], 0)),
    "an order": Of(lambda self, i: (X[ORDER[i]], Y[ORDER[i]])),
    "an order in a list": Of(lambda self, i: PAIRS[self.order[i]], order=ORDER.tolist()),
    "a table": Of(
        lambda self, i: (self.df.iloc[i, :6].to_numpy(dtype="float32"), self.df["y"].iloc[i]),
        df=FRAME,
    ),
    "a table by labels": Of(
        lambda self, i: (self.df.loc[f"p{i}"].to_numpy()[:6], self.df.at[f"p{i}", "y"]),
        df=FRAME.set_index(pd.Index([f"p{place}" for place in range(COUNT)])),
    ),
    "values of a table": Of(lambda self, i: (FRAME.values[i, :6], FRAME["y"].to_numpy()[i])),
    "a table's columns": Of(
        lambda self, i: (FRAME.iloc[:, :6].iloc[i].to_numpy(), FRAME.loc[:, "y"].iloc[i])
    ),
    "columns of its values": Of(lambda self, i: (FRAME.values.T[:6, i], 0)),
    "a column with other values": Of(
        lambda self, i: (X[i], FRAME["y"].where(FRAME["y"] > 0, 2).map({1: 0, 2: 1}).iloc[i])
    ),
    "rows of a person": Of(
        lambda self, i: (VISITS[VISITS["who"] == i]["x"].to_numpy(), 0), count=20
    ),
    "Hugging Face's rows": Of(
        lambda self, i: (self.hf[i]["x"], self.hf[i]["y"]), hf=HUGGING_FACE.shuffle(seed=4)
    ),
    "a dictionary of columns": Of(
        lambda self, i: (self.d["x"][i], self.d["y"][i]), d={"x": X.numpy(), "y": Y}
    ),
    "a namespace": Of(
        lambda self, i: (self.n.x[i], self.n.y[i]), n=types.SimpleNamespace(x=X.numpy(), y=Y)
    ),
    "a buffer's rows": Of(lambda self, i: (self.x[i].float() / 2, 0), x=nn.Parameter(X)),
    "windows side by side": Of(lambda self, i: (SERIES[6 * i : 6 * i + 6], 0), count=10),
    "noise of a library": Of(
        lambda self, i: (X[i] + VECTORS[int(torch.randint(0, 500, ()))], Y[i])
    ),
    "crops of its own": Of(
        lambda self, i: (self.images[i].roll(int(torch.randint(0, 3, ())), 0), 0), images=X
    ),
    "steps of its own": Of(
        lambda self, i: (torch.stack([value * 2 for value in X[i]]), Y[i].item() + len(X))
    ),
}


@pytest.mark.parametrize("dataset", HONEST.values(), ids=HONEST)
def test_what_honest_data_sets_share_is_no_row_of_two_items(dataset: Any) -> None:
    read_all(dataset)
    read_all(dataset)


def test_what_is_read_is_what_the_data_set_holds() -> None:
    data = Of(lambda self, i: (self.d["x"][i], np.take(self.x, i, 0)), d={"x": X}, x=X.numpy())
    one, other = ItemWatch(data)[7]
    assert type(one) is Tensor
    assert type(other) is np.ndarray
    assert torch.equal(one, X[7])
    assert np.array_equal(other, X[7].numpy())
    assert type(pd.DataFrame.iloc.fget).__name__ == "function"  # pandas is as it was
    assert "noted" not in repr(pd.Series.__getitem__)


def test_an_absent_example_leaves_the_masks_of_the_others_in_a_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn, means = PoissonBatches._positions, []
    for absent in (None, 3):

        def positions(self: Any, step: int, absent: Any = absent) -> Any:
            found = drawn(self, step)
            return [place for place in found if place != found[0] or absent is None]

        monkeypatch.setattr(PoissonBatches, "_positions", positions)
        with torch.random.fork_rng():
            torch.default_generator.manual_seed(17)
            model = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.5), nn.Linear(32, 3))
        monkeypatch.setattr(Gaussian, "add_noise", lambda self, total, *_: total.clone())
        private = loop(PAIRS, model=model, clip_norm=0.01)
        for inputs, targets in private:
            private.step(inputs, targets)
        grads = [value.grad.flatten() for value in model.parameters() if value.grad is not None]
        means.append(torch.cat(grads))
    assert float((means[0] - means[1]).norm()) * 10 == pytest.approx(0.01, rel=1e-3)


def partner(place: int) -> int:
    return (7 * place + 11) % COUNT


ROWS: Any = types.ModuleType("rows_of_a_project")
ROWS.x = X
ROWS.table = FRAME
exec("def other(i):\n    return x[(i + 7) % len(x)]", vars(ROWS))
sys.modules["rows_of_a_project"] = ROWS
PACKAGE: Any = types.ModuleType("package_of_rows")
PACKAGE.rows = ROWS


class Held:
    x = X

    @staticmethod
    def static(place: int) -> Tensor:
        return Held.x[partner(place)]

    @classmethod
    def of_class(cls, place: int) -> Tensor:
        return cls.x[partner(place)]

    @property
    def rows(self) -> Tensor:
        return Held.x


def imported(_: Any, place: int) -> Tensor:
    import rows_of_a_project as rows

    found: Tensor = rows.x[place] + rows.x[partner(place)]
    return found


MIXED: dict[str, Any] = {
    "a module": Of(lambda self, i: ROWS.x[i] + ROWS.x[partner(i)]),
    "a function of a module": Of(lambda self, i: ROWS.x[i] + ROWS.other(i)),
    "a module of a package": Of(lambda self, i: PACKAGE.rows.x[i] + PACKAGE.rows.x[partner(i)]),
    "a module in an attribute": Of(lambda self, i: self.m.x[i] + self.m.x[partner(i)], m=ROWS),
    "an imported module": Of(imported),
    "a table of a module": Of(lambda self, i: ROWS.table.iloc[i] + ROWS.table.iloc[partner(i)]),
    "a class": Of(lambda self, i: Held.x[i] + Held.x[partner(i)]),
    "a static method": Of(lambda self, i: Held.x[i] + Held.static(i)),
    "a class method": Of(lambda self, i: Held.x[i] + Held.of_class(i)),
    "a property": Of(lambda self, i: self.h.rows[i] + self.h.rows[partner(i)], h=Held()),
    "a table": Of(
        lambda self, i: self.df.iloc[i, :6] + self.df.iloc[partner(i), :6].to_numpy(), df=FRAME
    ),
    "a column": Of(lambda self, i: (X[i], self.y[i] + self.y[partner(i)]), y=FRAME["y"]),
    "a dictionary": Of(lambda self, i: self.d["x"][i] + self.d["x"][partner(i)], d={"x": X}),
    "arrays in a dictionary": Of(
        lambda self, i: self.d["x"][i] + self.d["x"][partner(i)], d={"x": X.numpy()}
    ),
    "a tuple": Of(lambda self, i: self.d[0][i] + self.d[0][partner(i)], d=(X, Y)),
    "a namespace": Of(
        lambda self, i: self.n.x[i] + self.n.x[partner(i)], n=types.SimpleNamespace(x=X)
    ),
    "a global name": Of(lambda self, i: X[i] + X[partner(i)]),
    "keys": Of(
        lambda self, i: self.d[i][0] + self.d[partner(i)][0],
        d={place: (X[place].clone(), 0) for place in range(COUNT)},
    ),
    "index_select": Of(lambda self, i: X.index_select(0, torch.tensor([i, partner(i)]))),
    "narrow": Of(lambda self, i: X.narrow(0, i, 1) + X.narrow(0, partner(i), 1)),
    "take": Of(lambda self, i: Y.take(torch.tensor([i, partner(i)]))),
    "np.take": Of(
        lambda self, i: np.take(self.x, i, 0) + np.take(self.x, partner(i), 0), x=X.numpy()
    ),
    "a parameter": Of(lambda self, i: self.x[i] + self.x[partner(i)], x=nn.Parameter(X)),
    "a mean": Of(lambda self, i: X[i] - X.mean(0)),
    "a mean of an array": Of(lambda self, i: self.x[i] - self.x.mean(0), x=X.numpy()),
    "a mean of a table": Of(lambda self, i: FRAME.iloc[i] - FRAME.mean()),
    "a column of a table": Of(
        lambda self, i: self.df["y"].iloc[i] + self.df["y"].iloc[partner(i)], df=FRAME
    ),
    "a mean of a column": Of(lambda self, i: X[i] - FRAME[0].mean()),
    "columns of a table": Of(lambda self, i: (2 * FRAME[[0, 1]]).loc[partner(i), 0] + FRAME[0][i]),
    "values": Of(lambda self, i: self.df.values[i] + self.df.values[partner(i)], df=FRAME),
    "to_numpy": Of(lambda self, i: FRAME[0].to_numpy()[[i, partner(i)]]),
    "a mean of values": Of(lambda self, i: FRAME.values[i] - FRAME.to_numpy().mean(0)),
    "Hugging Face's rows": Of(
        lambda self, i: self.hf[i]["y"] + self.hf[partner(i)]["y"], hf=HUGGING_FACE
    ),
    "Hugging Face's columns": Of(
        lambda self, i: self.hf[i]["y"] - sum(self.hf["y"]), hf=HUGGING_FACE
    ),
}


@pytest.mark.parametrize("dataset", MIXED.values(), ids=MIXED)
def test_an_item_that_reads_another_row_is_refused_however_rows_are_held(dataset: Any) -> None:
    with pytest.raises(ValueError, match="reading one item"):
        ItemWatch(dataset)[5]


@pytest.mark.parametrize(
    "form",
    [
        Tensor.to_sparse,
        Tensor.to_sparse_csr,
        lambda rows: torch.quantize_per_tensor(rows, 0.1, 0, torch.quint8),
    ],
)
def test_tensors_without_plain_memory_are_refused_by_what_makes_them_plain(
    form: Callable[[Tensor], Tensor],
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of PyTorch, about these forms
        rows = form(torch.eye(8, 3))
    with pytest.raises(ValueError, match=r"must be dense and not quantized \(to_dense"):
        check_one_index(Subset(TensorDataset(rows), range(4)), None)
