"""The `discreet` command. It imports nothing before `main` runs, so that a Ctrl-C ends it in one
line while all else is still being imported."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # for type checkers, which take it for true: the import of `typing` is slow
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(words: Sequence[str] | None = None) -> int:
    """Runs a verb and gives its exit code; 2, and one line that says why, if it was asked for
    something wrong."""
    given = [*(sys.argv[1:] if words is None else words)] or ["--help"]
    try:
        from discreet.cli.ctrl_c import ends_at_once

        with ends_at_once():
            from discreet.cli.verbs import run
        return run(given)
    except KeyboardInterrupt:
        from discreet.cli.ctrl_c import say_ended  # again, if that was interrupted

        return say_ended()
