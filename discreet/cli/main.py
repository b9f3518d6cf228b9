"""The `discreet` command. It is small so that a Ctrl-C ends it in one line while all else is still
being imported."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from discreet.cli.ctrl_c import ends_at_once, say_ended


def main(words: Sequence[str] | None = None) -> int:
    """Runs a verb and gives its exit code; 2, and one line that says why, if it was asked for
    something wrong."""
    given = [*(sys.argv[1:] if words is None else words)] or ["--help"]
    try:
        with ends_at_once():
            from discreet.cli.verbs import run
        return run(given)
    except KeyboardInterrupt:
        return say_ended()
