"""More nodes than the four of docker-compose.yml: `python -m discreet.deployment.compose_nodes 8 > more.yml`.

Prints an override with the nodes from node-4 on, each like node-0 but with its own key, ledger and partition:

    scripts/certs node node-4 node-5 node-6 node-7 && scripts/certs peers
    python -m discreet.deployment.compose_nodes 8 > docker-compose.nodes.yml
    export DISCREET_NODES=8 COMPOSE_FILE=docker-compose.yml:docker-compose.nodes.yml

and go on as the head of docker-compose.yml says, with eight nodes.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

COMPOSE = Path(__file__).resolve().parent.parent.parent / "docker-compose.yml"
THERE = 4


def more_nodes(count: int) -> dict[str, Any]:
    """The override for `count` nodes in all; empty sections for no more than are there."""
    compose, numbers = yaml.safe_load(COMPOSE.read_text()), range(THERE, count)

    def copied(part: object, number: int) -> Any:
        return json.loads(re.sub(r"\b(node|ledger|known)-0\b", rf"\1-{number}", json.dumps(part)))

    services = {f"node-{number}": copied(compose["services"]["node-0"], number) for number in numbers}
    for number in numbers:
        services[f"node-{number}"]["environment"]["PARTITION"] = str(number)
    return {
        "services": services,
        "volumes": {f"{volume}-{number}": {} for number in numbers for volume in ("ledger", "known")},
        "secrets": {f"node-{number}.key": copied(compose["secrets"]["node-0.key"], number) for number in numbers},
    }


def main(words: Sequence[str]) -> int:
    """Prints the override."""
    parser = argparse.ArgumentParser(prog="python -m discreet.deployment.compose_nodes")
    parser.add_argument("count", type=int, help="the number of nodes in all")
    print(yaml.safe_dump(more_nodes(parser.parse_args(words).count), sort_keys=False, width=120), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
