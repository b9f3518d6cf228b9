"""Plants a fault at run time, by patching a name, and runs the test that must notice it in a
process of its own."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
SECONDS = 300
CAUGHT, SURVIVED, BROKE = "caught", "SURVIVED", "BROKE ITS TEST"
CODES = {11: CAUGHT, 10: SURVIVED, 12: BROKE}  # Python ends with 1 on its own account
# Importing these takes longer than most tests: a process is forked for each fault that has them
# already.
PRELOADED = [
    "torch",
    "flwr.client",
    "flwr.serverapp.strategy",
    "dp_accounting.pld",
    "dp_accounting.rdp",
    "scipy.stats",
]


@dataclass(frozen=True)
class Fault:
    """A fault, which `name` describes.

    Attributes:
      at: `module:name` or `module:Class.name` below discreet, what is patched: in that module alone
        if it has it from elsewhere, else wherever it was imported.
      plant: what is there, to what takes its place.
      test: `path::name` below tests/, which must fail.
    """

    name: str
    at: str
    plant: Callable[[Any], Any]
    test: str = ""


def always(value: object) -> Callable[[Any], Any]:
    """A function that gives this, whatever it is asked."""
    return lambda _: lambda *args, **more: value


def place_of(at: str) -> tuple[Any, str]:
    """The module or class that has a name, and the name in it."""
    module, _, path = at.partition(":")
    *owners, name = path.split(".")
    owner: Any = reduce(getattr, owners, importlib.import_module(f"discreet.{module}"))
    if name not in vars(owner):
        raise LookupError(f"{at} is not there")
    return owner, name


def plant(fault: Fault) -> None:
    """Patches what the fault names, in this process and for good."""
    owner, name = place_of(fault.at)
    real = vars(owner)[name]
    planted = fault.plant(real)
    setattr(owner, name, planted)
    if getattr(real, "__module__", None) == getattr(owner, "__name__", ""):
        for module in list(sys.modules.values()):
            for other in [key for key, value in vars(module).items() if value is real]:
                setattr(module, other, planted)


def verdict(fault: Fault) -> str:
    """`caught`, `SURVIVED`, or why its test says nothing about it."""
    with tempfile.NamedTemporaryFile("r") as log:
        forks = multiprocessing.get_context("forkserver")
        forks.set_forkserver_preload(PRELOADED)
        process = forks.Process(target=_run, args=(fault.name, log.name))
        process.start()
        process.join(SECONDS)
        process.kill()
        process.join()
        found = CODES.get(process.exitcode or 0, f"ITS TEST DID NOT RUN ({process.exitcode})")
        if found != CAUGHT:
            print(log.read(), file=sys.stderr)
    return found


class _Planting:
    """A plugin of pytest that plants a fault before tests are read, and keeps whether they failed
    by an assertion."""

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.asserted: list[bool] = []

    def pytest_configure(self) -> None:
        plant(self.fault)

    def pytest_exception_interact(self, call: Any) -> None:
        self.asserted.append(call.excinfo.errisinstance((AssertionError, pytest.fail.Exception)))


def _run(name: str, log: str) -> None:
    """In a process of its own, which has the packages of others but none of ours yet."""
    os.chdir(TESTS.parent)
    with open(log, "w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
    (fault,) = [each for each in importlib.import_module("tests.faults").EVERY if each.name == name]
    planting = _Planting(fault)
    code = pytest.main(
        ["-q", "-x", "-p", "no:cacheprovider", f"tests/{fault.test}"], plugins=[planting]
    )
    ended = {
        pytest.ExitCode.OK: SURVIVED,
        pytest.ExitCode.TESTS_FAILED: CAUGHT if all(planting.asserted) else BROKE,
    }
    raise SystemExit(
        {said: number for number, said in CODES.items()}.get(ended.get(code, ""), int(code))
    )
