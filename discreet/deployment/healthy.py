"""Checks if a server answers: the healthcheck of docker-compose.yml. It is light, as it runs every
few seconds.

    python -m discreet.deployment.healthy URL [CA_CERTIFICATE [FILE_THAT_MUST_EXIST]]

Exit code 0 if URL answers 200 and the files exist, 1 if not. With a certificate TLS is used.
"""

from __future__ import annotations

import ssl
import sys
import urllib.request
from pathlib import Path


def healthy(url: str, *, authority: Path | None) -> bool:
    """True if `url` answers 200; over TLS with a certificate of the authority."""
    try:
        if authority:
            context = ssl.create_default_context(cafile=authority)
        else:
            context = None
        with urllib.request.urlopen(url, timeout=5, context=context) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


if __name__ == "__main__":
    url, *files = sys.argv[1:]
    there = all(Path(file).exists() for file in files)
    raise SystemExit(not (there and healthy(url, authority=Path(files[0]) if files else None)))
