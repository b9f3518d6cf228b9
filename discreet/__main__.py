"""`python -m discreet VERB ...`, where the command `discreet` is not on the path."""

from __future__ import annotations

from discreet.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
