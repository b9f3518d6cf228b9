"""The place to start reading: what it names is there, and what it imports is what it needs."""

from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from typing import Any

import strategies.dp_fedavg
from discreet.settings.compose import load_config

# What stays out of the bundle for nodes.
OF_SERVERS = {"server", "evaluation", "flower", "simulation", "deployment", "reporting", "audit", "cli", "dpsgd"}


def names(settings: dict[str, Any], prefix: str = "") -> set[str]:
    found = set()
    for name, value in settings.items():
        found |= {prefix + name} | (names(value, f"{prefix}{name}.") if isinstance(value, dict) else set())
    return found


def named_settings(text: str) -> set[str]:
    """`a.b` and `a.b.{c,d}` of the sections that a round reads."""
    found = set()
    for start, ends in re.findall(r"(?<![a-z.])((?:sampling|privacy|server)\.[a-z_.]*)(?:\{([a-z_0-9.,]+)\})?", text):
        found |= {start + end for end in ends.split(",")} if ends else {start}
    return found


def test_every_setting_that_the_page_names_is_one() -> None:
    said = named_settings(strategies.dp_fedavg.__doc__ or "")
    assert len(said) >= 15
    assert said <= names(dataclasses.asdict(load_config([])))


def modules_of(name: str) -> set[str]:
    code = f"import sys, {name}; print(*[m for m in sys.modules if m.startswith('discreet.')])"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_the_server_does_not_load_reports() -> None:
    assert not {name for name in modules_of("server_app.server_app") if name.startswith("discreet.reporting")}


def test_a_client_loads_nothing_of_the_servers() -> None:
    assert not {name.split(".")[1] for name in modules_of("client_app.client_app")} & OF_SERVERS
