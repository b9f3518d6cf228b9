"""`model.json`, the description that goes with a model: everything besides its parameters that is
needed to use it."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import discreet
from discreet.data.description import DataDescription, description_of
from discreet.data.encoding import column_names
from discreet.data.examples import TaskShape
from discreet.settings.foreign_files import one_line
from discreet.settings.rules import ConfigError

if TYPE_CHECKING:
    from discreet.planning.plan import Plan

FILE = "model.json"
# The keys of a description that say where data are, and do not affect the model's inputs.
OF_PLACES = ("file", "test", "test_target", "unconfirmed", "public", "separator", "encoding")


def model_facts(
    plan: Plan,
    shape: TaskShape,
    parameters: Mapping[str, Any],
    described: DataDescription | None,
) -> dict[str, Any]:
    """The content of model.json. `parameters`: the tensors by name; `described`: the data.toml of
    the data."""
    return {
        "discreet": discreet.__version__,
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("torch", "numpy")},
        },
        "model": asdict(plan.model),
        "parameters": {name: list(tensor.shape) for name, tensor in parameters.items()},
        "data": plan.run.data.name,
        "input_shape": list(shape.input_shape),
        "inputs": input_names(described),
        "num_classes": shape.num_classes,
        "num_tokens": shape.num_tokens,
        "target": asdict(shape.target),
        "normaliser": asdict(plan.run.normaliser),
        "description": None if described is None else described.facts(),
    }


def input_names(described: DataDescription | None) -> list[str] | None:
    """The names of the model's inputs, in order; None if they have none."""
    if described is None:
        return None
    if described.columns:
        return column_names(described.columns, described.pairs)
    if isinstance(described.inputs, tuple):
        return list(described.inputs)
    return None


def read_facts(run: Path) -> dict[str, Any] | None:
    """model.json of a run folder; None if an older version wrote the run.

    Raises:
      ConfigError: it is damaged, or its model reads columns as an older version encoded them.
    """
    path = run / FILE
    if not path.is_file():
        return None
    with one_line(path, ConfigError, "is damaged"):
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if facts["description"] is None:
            return facts
        described = description_of(facts["description"])
    if described.columns and facts["inputs"] != input_names(described):
        raise ConfigError(
            f"{path}: an older version encoded its columns otherwise: use its exported/, or train "
            "it again"
        )
    return facts


def differences(then: DataDescription, now: DataDescription) -> list[str]:
    """The keys of data.toml that affect the model's inputs and differ between the model's
    description and the current one."""
    old = _flat(then)
    new = _flat(now)
    return sorted(key for key in old.keys() | new.keys() if old.get(key) != new.get(key))


def _flat(described: DataDescription) -> dict[str, Any]:
    facts = {key: value for key, value in described.facts().items() if key not in OF_PLACES}
    columns = facts.pop("columns", {})
    return facts | {f"columns.{name}": value for name, value in columns.items()}
