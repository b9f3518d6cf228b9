"""Whether a server answers: the healthcheck of docker-compose.yml. Light on purpose, it runs every few seconds."""

from __future__ import annotations

import ssl
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path

HELP = ("-h", "--help")
USAGE = "usage: python -m discreet.deployment.healthy URL [CA_CERTIFICATE [FILE_THAT_MUST_EXIST]]"


def healthy(url: str, *, authority: Path | None) -> bool:
    """Whether `url` answers 200; over TLS with a certificate of the authority."""
    try:
        context = ssl.create_default_context(cafile=authority) if authority else None
        with urllib.request.urlopen(url, timeout=5, context=context) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def main(words: Sequence[str]) -> int:
    """0 if all is well, 1 if not, 2 for wrong words."""
    if any(word in HELP for word in words):
        print(f"{USAGE}\n\nExit code 0 if URL answers 200 and the file exists, 1 if not. A certificate asks for TLS.")
        return 0
    if not 1 <= len(words) <= 3:
        print(USAGE, file=sys.stderr)
        return 2
    authority = Path(words[1]) if len(words) > 1 else None
    there = all(Path(word).exists() for word in words[2:])
    return 0 if there and healthy(words[0], authority=authority) else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
