"""`discreet audit`, for a checkout whose environment is not activated: `python -m scripts.audit --help`."""

from __future__ import annotations

import sys

from discreet.cli.audit import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
