"""What the tests share. No verdict depends on what was drawn today, nor on the clock.

Hypothesis tries the same examples each time; `--hypothesis-profile=search` looks for others.
"""

from __future__ import annotations

import gc
import os
import re
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from xdist.scheduler import LoadFileScheduling

settings.register_profile("same", derandomize=True, deadline=None)
settings.register_profile("search", deadline=None)
settings.load_profile("same")

REPOSITORY = Path(__file__).resolve().parent.parent
ATTACKS = "tests/guard/test_attacks.py"
# What waits longest for other processes, which comes first.
WAITING = (ATTACKS, "tests/deployment/test_federation.py", "tests/deployment/test_flower_run.py")

# One worker takes these, for loading transformers takes three seconds.
OF_TRANSFORMERS = {
    "tests/data/test_tokens.py",
    "tests/flower/test_app_kinds.py",
    "tests/models/test_fixed_part.py",
    "tests/models/test_transformer.py",
}


class ByFileAndEnclosure(LoadFileScheduling):
    """A worker takes a file; of the attacks on blocks those on kernels, which compute, or those on
    the other enclosures, which mostly wait."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.split("::")[0]
        if file == ATTACKS and re.search(r"\[kernel[-\]]", nodeid) and os.geteuid() == 0:
            return f"{file} kernel"
        return "transformers" if file in OF_TRANSFORMERS else file


def pytest_configure(config: pytest.Config) -> None:
    """Loads the fixtures, and with them PyTorch, where tests run: the process that deals them out
    to workers begins without."""
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        config.pluginmanager.import_plugin("tests.fixtures")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> object:
    return ByFileAndEnclosure(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What the imports make stays until the end, and tests leave little behind: the garbage
    collector looks at the first never, not even once, and at the second less often, which takes a
    twentieth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 20, 20)
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests that take longest come first: they wait for other processes, while others
    compute."""
    order = {file: place for place, file in enumerate(WAITING)}
    items.sort(key=lambda item: order.get(item.nodeid.split("::")[0], len(order)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Says at the end what was skipped for want of something that can be installed."""
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(report.longrepr[2]).removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.items():
        if "apt-get install" in reason:
            terminalreporter.write_line(f"{count} tests were skipped: {reason}")
