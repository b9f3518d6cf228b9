"""Planted faults: each changes a few words of the source, and the tests named beside it must notice.

`python -m tests.mutants` plants them one by one in a copy of the tree, runs their tests there, and says which fault was
caught; it exits with 1 if one survived. `--only WORDS` takes those whose names hold the words. Faults of the algorithm
as a whole, which the neighbour replay finds, are in `tests.test_replay_faults`.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.planted import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parent.parent
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "outputs", "multirun", "shared")
SECONDS, LOG = 300, "mutants.log"
PASSED, FAILED = 10, 11  # Python ends with 1 on its own account
# Importing these takes longer than most tests: a process is forked for each fault that has them already.
_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "torch",
        "flwr.client",
        "flwr.serverapp.strategy",
        "dp_accounting.pld",
        "dp_accounting.rdp",
        "scipy.stats",
        "omegaconf",
    ]
)


@dataclass(frozen=True)
class Tree:
    """A copy of the source, in which faults are planted."""

    path: Path

    def verdict(self, mutant: Mutant) -> str:
        """`caught`, `SURVIVED`, or why its tests say nothing about it."""
        file = self.path / mutant.file
        sound = file.read_text()
        file.write_text(planted(sound, mutant))
        try:
            code = self.run(mutant.tests)
        finally:
            file.write_text(sound)
        return {PASSED: "SURVIVED", FAILED: "caught"}.get(code, f"ITS TESTS DID NOT RUN ({code})")

    def run(self, tests: Sequence[str]) -> int:
        """PASSED, FAILED, or how else the process ended."""
        process = _FORKS.Process(target=_run_pytest, args=(str(self.path), list(tests)))
        process.start()
        process.join(SECONDS)
        process.kill()
        process.join()
        if process.exitcode not in (PASSED, FAILED):
            print((self.path / LOG).read_text(), file=sys.stderr)
        return process.exitcode or 0


def _run_pytest(folder: str, tests: list[str]) -> None:
    """In a process of its own, which has the packages of others but none of ours yet."""
    os.chdir(folder)
    with open(LOG, "w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    sys.dont_write_bytecode = True
    sys.path[:] = [folder, *(path for path in sys.path if path not in ("", str(ROOT)))]
    os.environ["PYTHONPATH"] = folder
    ours = {path.name for path in ROOT.iterdir()}
    for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
        del sys.modules[name]
    raise SystemExit(PASSED + pytest.main(["-q", "-x", "-p", "no:cacheprovider", *tests]))


@contextmanager
def copied_tree() -> Iterator[Tree]:
    """A copy of the working tree, without what git ignores."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tree"
        shutil.copytree(ROOT, path, ignore=NOT_COPIED)
        yield Tree(path)


def planted(source: str, mutant: Mutant) -> str:
    """The source with the fault.

    Raises:
      ValueError: the text to be replaced does not occur exactly once.
    """
    found = source.count(mutant.old)
    if found != 1:
        raise ValueError(f"{mutant.name}: its old text occurs {found} times in {mutant.file}, and should once")
    return source.replace(mutant.old, mutant.new)


def main(words: Sequence[str] | None = None) -> int:
    """Plants the faults; 1 if one survived or its tests did not run, or if these tests fail without it."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--only", default="", metavar="WORDS", help="faults whose names hold these words")
    only = parser.parse_args(words).only
    chosen = [mutant for mutant in MUTANTS if only in mutant.name]
    if not chosen:
        parser.error(f"--only: no fault has a name that holds {only!r}")
    with copied_tree() as tree:
        if tree.run(sorted({test for mutant in chosen for test in mutant.tests})) != PASSED:
            print("the tests do not pass without any fault, so they say nothing about these", file=sys.stderr)
            return 1
        verdicts = []
        for mutant in chosen:
            verdicts.append(tree.verdict(mutant))
            print(f"{verdicts[-1]:<9} {mutant.name}", flush=True)
    caught = verdicts.count("caught")
    print(f"{caught} of {len(chosen)} were caught")
    return 0 if caught == len(chosen) else 1


if __name__ == "__main__":
    raise SystemExit(main())
