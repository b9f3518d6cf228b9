"""Nodes that cost little: threads of one process, each with a key and a connection of its own, and no ClientApp.

    python -m benchmarks.light_nodes --superlink HOST:PORT --authority ca.crt --ready FILE KEY...

A server can't tell them from SuperNodes: they make the same calls and send as much. So what many nodes cost the server
can be measured on a machine that has no room for as many SuperNodes.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.empty_app.empty_client import answer_to
from discreet.deployment.flower_fixes.object_pauses import look_for_objects_soon
from discreet.deployment.raw_node import raw_node


def main(words: Sequence[str]) -> int:
    """Answers until it is told to end."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.light_nodes", description=__doc__)
    parser.add_argument("--superlink", required=True, help="host:port of the server's gate")
    parser.add_argument("--authority", type=Path, required=True, help="ca.crt of the federation")
    parser.add_argument("--ready", type=Path, required=True, help="a file that is made when all nodes are let in")
    parser.add_argument("--pause", type=float, required=True, help="seconds between two looks of a node for a message")
    parser.add_argument("keys", type=Path, nargs="+", help="private keys, one for each node")
    arguments = parser.parse_args(words)
    asked = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: asked.set())
    look_for_objects_soon()
    with ExitStack() as nodes:
        for key in arguments.keys:
            words_of_node = {"authority": arguments.authority, "key": key, "pause": arguments.pause}
            nodes.enter_context(raw_node(arguments.superlink, behaviour=answer_to, **words_of_node))
        arguments.ready.touch()
        asked.wait()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
