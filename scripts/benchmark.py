"""`discreet benchmark`, for a checkout whose environment is not activated: `python -m scripts.benchmark --help`."""

from __future__ import annotations

import sys

from discreet.cli.benchmark import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
