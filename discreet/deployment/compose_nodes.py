"""Prints an override of docker-compose.yml with the nodes from node-4 on, each with its own key,
ledger and partition:

    scripts/certs node node-4 node-5 node-6 node-7 && scripts/certs peers
    python -m discreet.deployment.compose_nodes 8 > docker-compose.nodes.yml
    export DISCREET_NODES=8 COMPOSE_FILE=docker-compose.yml:docker-compose.nodes.yml

and continue as the head of docker-compose.yml says, with eight nodes.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

COMPOSE = Path(__file__).resolve().parent.parent.parent / "docker-compose.yml"
THERE = 4


def more_nodes(count: int) -> dict[str, Any]:
    """The override for `count` nodes in all; its sections are empty if docker-compose.yml has as
    many."""
    compose = yaml.safe_load(COMPOSE.read_text())
    numbers = range(THERE, count)

    def copied(part: object, number: int) -> Any:
        return json.loads(re.sub(r"\b(node|ledger|known)-0\b", rf"\1-{number}", json.dumps(part)))

    services = {
        f"node-{number}": copied(compose["services"]["node-0"], number) for number in numbers
    }
    for number in numbers:
        services[f"node-{number}"]["environment"]["PARTITION"] = str(number)
    return {
        "services": services,
        "volumes": {
            f"{volume}-{number}": {} for number in numbers for volume in ("ledger", "known")
        },
        "secrets": {
            f"node-{number}.key": copied(compose["secrets"]["node-0.key"], number)
            for number in numbers
        },
    }


if __name__ == "__main__":
    print(yaml.safe_dump(more_nodes(int(sys.argv[1])), sort_keys=False, width=120), end="")
