"""`discreet tune`, for a checkout whose environment is not activated: `python -m scripts.tune --help`."""

from __future__ import annotations

import sys

from discreet.cli.tune import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
