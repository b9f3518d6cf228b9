"""Metrics of one's own are tried before a run starts."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from discreet.data.datasets import load_task
from discreet.data.examples import TaskShape
from discreet.data.targets import LABELS, NUMBERS, SEQUENCES, SURVIVAL, Target
from discreet.queries.own_metric import own_metric
from discreet.run_files.compose import load_config
from discreet.server.metric_check import check_metrics
from discreet.server.resolve import resolve
from discreet.settings.rules import ConfigError

METRICS = """
def right(outputs, targets):
    return outputs.argmax(1) == targets

def hundred(outputs, targets):
    return 100.0 * right(outputs, targets)

def raises(outputs, targets):
    raise KeyError("boom")

def nothing(outputs, targets):
    return None

def one(outputs):
    return 0.5

def now_and_then(outputs, targets):
    return {0: 1.0}[int(targets)]
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rated_here.py").write_text(METRICS)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize("kind", ["public", "private"])
@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nope", "^evaluation.metrics: rated_here has no 'nope'"),
        (
            "raises",
            "^evaluation.metrics: rated_here:raises fails with KeyError: 'boom'. It is call",
        ),
        ("nothing", "rated_here:nothing gives NoneType, which is not one number"),
        ("one", "rated_here:one fails with TypeError: "),
    ],
)
def test_a_metric_that_can_not_rate_is_refused_before_the_run(
    name: str, said: str, kind: str
) -> None:
    words = ["rounds=3", f"evaluation.kind={kind}", f"evaluation.metrics=[rated_here:{name}]"]
    with pytest.raises(ConfigError, match=said):
        resolve(load_config(words))


@pytest.mark.usefixtures("own")
def test_values_outside_of_the_range_are_told_at_the_start(
    caplog: pytest.LogCaptureFixture,
) -> None:
    shape = load_task("digits").shape
    with caplog.at_level(logging.WARNING):
        check_metrics(["accuracy", "rated_here:right", "rated_here:now_and_then"], shape)
        assert not caplog.records
        check_metrics(["rated_here:hundred"], shape)
    (said,) = caplog.messages
    assert "rated_here:hundred gave 100 for a made-up example: all values are clamped" in said


@pytest.mark.usefixtures("own")
def test_an_error_of_a_metric_is_told_once_with_its_type(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metric = own_metric("rated_here:raises")
    with caplog.at_level(logging.WARNING):
        assert metric(torch.zeros(40, 2), torch.zeros(40)).tolist() == [0.0] * 40
    (said,) = caplog.messages
    assert "failed with KeyError" in said


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    "shape",
    [
        TaskShape((4,), 0, target=Target(LABELS, ("a", "b"))),
        TaskShape((4,), 0, target=Target(NUMBERS, ("a",), (0.0,), (1.0,))),
        TaskShape((4,), 5, target=Target(SEQUENCES, length=3)),
        TaskShape((4,), 0, target=Target(SURVIVAL, ("1", "2"), (0.0, 1.0), (1.0, 2.0))),
    ],
)
def test_examples_of_each_kind_of_target_are_made_up(shape: TaskShape, tmp_path: Path) -> None:
    (tmp_path / f"of_{shape.target.kind}.py").write_text(
        "def same(outputs, targets):\n"
        f"    assert outputs.shape == {(1, *shape.output_shape)}\n"
        "    return (outputs - targets).abs().mean() < 9\n"
    )
    check_metrics([f"of_{shape.target.kind}:same"], shape)
