"""What a masked sum costs, apart from the network: a node's masks, and each stage of a round at nodes and server.

    discreet benchmark masking

Times are the processor's, of one thread, so that a busy machine does not count. A node's is the mean over the nodes;
the server's is of all replies together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from discreet.masking.agreement import Terms, default_threshold
from discreet.masking.identity import Directory, Identity
from discreet.masking.masks import KEY_BYTES, add_mask
from discreet.masking.node import MaskingNode
from discreet.masking.packing import pack, packed_size, unpack
from discreet.masking.server import Exchange, MaskingServer, Opened
from discreet.masking.store import MemoryStore

VALUES, NODES, BITS, REPETITIONS = 1_000_000, 20, 20, 5

Rows = list[dict[str, Any]]


def rows(values: int = VALUES, nodes: int = NODES) -> Rows:
    """Milliseconds and bytes of: the masks of a node, packing, and the stages of a round of which one node is lost."""
    words = np.zeros(values, dtype=np.uint32)
    packed = pack(words, BITS)
    size = packed_size(values, BITS)
    return [
        {"what": f"masks of a node with {nodes} peers", "values": values, "ms": _ms(partial(_masks, words, nodes))},
        {"what": f"pack to {BITS} bits", "values": values, "ms": _ms(partial(pack, words, BITS)), "bytes": size},
        {"what": "unpack", "values": values, "ms": _ms(partial(unpack, packed, length=values, bits=BITS))},
        *_stages(values, nodes),
    ]


def _masks(words: NDArray[np.uint32], peers: int) -> None:
    for place in range(peers + 1):  # one for each peer, and the node's own
        add_mask(words, os.urandom(KEY_BYTES), subtract=bool(place % 2))


def _ms(work: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(REPETITIONS):
        started = time.process_time()
        work()
        best = min(best, time.process_time() - started)
    return 1000 * best


def _stages(values: int, nodes: int) -> Rows:
    """A round of which the first node is lost after it sent its shares; keys, shares and signatures are counted too."""
    terms = Terms(os.urandom(16).hex(), nodes, 1, 0, default_threshold(nodes, 0), BITS, values)
    people = {f"node-{number}": Identity.generate(f"node-{number}") for number in range(nodes)}
    directory, vector = Directory.of(people), np.arange(values, dtype=np.int64)
    parties = {name: MaskingNode(one, directory, terms, MemoryStore()) for name, one in people.items()}
    found: Exchange | Opened = MaskingServer(terms, people).begin(1)
    measured: Rows = []
    while isinstance(found, Exchange):
        replies, at_node = {}, time.process_time()
        for name, request in found.requests.items():
            if not (found.stage.name == "MASKED" and name == "node-0"):
                replies[name] = parties[name].answer(request, lambda: vector, lambda: None)
        at_server, stage = time.process_time(), found.stage.name
        sent = sum(len(reply) for reply in replies.values()) // len(replies)
        for name, reply in replies.items():
            found.take(name, reply)
        found = found.close()
        ms = {"ms": 1000 * (at_server - at_node) / len(replies), "server ms": 1000 * (time.process_time() - at_server)}
        measured.append({"what": f"{stage}, {nodes} nodes", "values": values, **ms, "bytes": sent})
    return measured
