"""`discreet simulate`, for a checkout whose environment is not activated: `python -m scripts.simulate --help`."""

from __future__ import annotations

import sys

from discreet.cli.simulate import main

if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
