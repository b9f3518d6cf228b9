"""The `discreet` command. It imports nothing before `main` runs, so that Ctrl-C during imports ends
it with one line."""

from __future__ import annotations

import sys

TYPE_CHECKING = False  # type checkers take it for True; importing `typing` is slow
if TYPE_CHECKING:
    from collections.abc import Sequence


def main(words: Sequence[str] | None = None) -> int:
    """Runs a verb and returns its exit code; 2, with one line that gives the reason, for a wrong
    request."""
    given = [*(sys.argv[1:] if words is None else words)] or ["--help"]
    try:
        from discreet.cli.ctrl_c import ends_at_once

        with ends_at_once():
            from discreet.cli.verbs import run
        return run(given)
    except ModuleNotFoundError as error:
        from discreet.settings.extras import lacking

        line = lacking(error, f"discreet {given[0]}")
        if line is None:
            raise
        print(f"discreet: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        from discreet.cli.ctrl_c import say_ended  # its import above may have been interrupted

        return say_ended()
