"""Tables of plain values that a model or a loss holds: what is written there is undone, at once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from discreet.per_example import plain_trees
from discreet.per_example.memory import Memory
from discreet.per_example.per_example import clipped_gradient_sum
from discreet.per_example.plain_trees import PlainTree

INNER = [1, 2.0]
each_loss = partial(functional.cross_entropy, reduction="none")


def table() -> dict[Any, Any]:
    inner = list(INNER)
    return {"a": inner, ("b", 3): {"c": {4, 5}, "same": inner}, "d": (6, [7], float("nan"))}


def write(held: dict[Any, Any]) -> None:
    held["a"].append(8)


def replace_by_equal_and_write(held: dict[Any, Any]) -> None:
    held["a"] = list(held["a"])
    held["a"].append(8)


def put_something_else(held: dict[Any, Any]) -> None:
    held["d"][1].append(torch.zeros(2))


def reorder(held: dict[Any, Any]) -> None:
    held["a"] = held.pop("a")


def change_a_type(held: dict[Any, Any]) -> None:
    held["a"][0] = True


def write_into_a_set(held: dict[Any, Any]) -> None:
    held["b", 3]["c"].add(9)


def hold_itself(held: dict[Any, Any]) -> None:
    held["e"] = held


@pytest.mark.parametrize(
    "change",
    [
        write,
        replace_by_equal_and_write,
        put_something_else,
        reorder,
        change_a_type,
        write_into_a_set,
        hold_itself,
    ],
)
def test_each_container_gets_the_objects_that_it_held(change: Callable[[Any], None]) -> None:
    held = table()
    inner = held["a"]
    tree = PlainTree("table", held)
    assert not tree.restore()
    change(held)
    assert tree.restore()
    assert repr(held) == repr(table())
    assert [type(each) for each in inner] == [int, float]
    assert held["a"] is inner
    assert held["b", 3]["same"] is inner
    assert not tree.restore()


@pytest.mark.parametrize("value", [torch.zeros(2), bytearray(2), object(), [].append, INNER.copy])
def test_what_is_not_plain_is_no_such_table(value: object) -> None:
    with pytest.raises(ValueError, match="plain"):
        PlainTree("table", {"a": [value]})
    circle: list[Any] = []
    circle.append(circle)
    with pytest.raises(ValueError, match="deep"):
        PlainTree("table", circle)


class WithWords(nn.Module):
    """Keeps a word of its vocabulary for each example that is large."""

    def __init__(self, words: Any) -> None:
        super().__init__()
        self.words = words
        self.layer = nn.Linear(3, 2)

    def forward(self, rows: Tensor) -> Tensor:
        if rows.max() > 100:
            self.words["w1"].append(float(rows.max()))
        return self.layer(rows * len(self.words["w1"]))


def of(model: nn.Module, rows: Tensor) -> Tensor:
    targets = torch.zeros(len(rows), dtype=torch.int64)
    return clipped_gradient_sum(model, rows, targets=targets, clip_norm=1.0, loss=each_loss)[0]


def test_a_table_is_copied_once_and_what_the_program_writes_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied = list[object]()
    parts_of = plain_trees._parts_of
    monkeypatch.setattr(
        plain_trees, "_parts_of", lambda value: (copied.append(value), parts_of(value))[1]
    )
    torch.manual_seed(0)
    model = WithWords({f"w{place}": [place] for place in range(2000)})
    rows = torch.randn(6, 3)
    large = torch.cat([rows, torch.full((1, 3), 200.0)])
    wanted = of(model, rows)
    copied.clear()
    of(model, large)  # with an example that writes there
    assert model.words["w1"] == [1]
    assert torch.equal(of(model, rows), wanted)
    assert not copied
    model.words["w1"].append(2)  # by the program, between two steps
    assert not torch.equal(of(model, rows), wanted)
    assert copied == [model.words]
    of(model, large)
    assert model.words["w1"] == [1, 2]


def test_a_slow_table_is_named(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="discreet")
    model = WithWords({"w1": [1]})
    for held, is_named in ((list(range(2000)), False), ([torch.zeros(1)] * 2, False)):
        model.held = held  # type: ignore[assignment]
        Memory(model.modules()).tell()
        assert ("WithWords.held holds" in caplog.text) is is_named
    model.held = [torch.zeros(1) for _ in range(2000)]  # type: ignore[assignment]
    for _ in range(2):
        Memory(model.modules()).tell()
    assert caplog.text.count("WithWords.held holds 200") == 1
