"""Asks a server if it answers: the healthcheck of docker-compose.yml. Light on purpose, it runs every few seconds."""

from __future__ import annotations

import ssl
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

USAGE = """usage: python -m discreet.deployment.healthy URL [CA_CERTIFICATE [FILE_THAT_MUST_EXIST]]

Exit code 0 if URL answers 200 and the file exists, 1 if not. A certificate asks for TLS."""


def healthy(url: str, *, authority: Path | None) -> bool:
    """True if `url` answers 200; over TLS with a certificate of the authority."""
    try:
        context = ssl.create_default_context(cafile=authority) if authority else None
        with urllib.request.urlopen(url, timeout=5, context=context) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def main(words: Sequence[str]) -> int:
    """0 if all is well, 1 if not, 2 for wrong words."""
    url, *files = words or ["--help"]
    if url.startswith("-") or len(files) > 2:
        print(USAGE)
        return 0 if words and url in ("-h", "--help") else 2
    there = all(Path(file).exists() for file in files[1:])
    return 0 if there and healthy(url, authority=Path(files[0]) if files else None) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
