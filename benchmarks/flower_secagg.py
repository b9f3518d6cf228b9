"""Faults of Flower's SecAgg+, shown on the installed Flower; nothing of it is copied.

    python -m benchmarks.flower_secagg

1. A secret becomes a mask through 32 bits, the XOR of its words: two secrets whose words have the same XOR give the
   same mask, and there are 2^32 masks, however long the secrets are.
2. A client that is told that a node is both active and dead gives both of its shares. A server that says so to t
   clients reads that node's update: here it does, from the messages of Flower's own `secaggplus_mod`.
3. A mask never has the largest value of its range: `randint` leaves out its upper end, and it is given range - 1.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping
from typing import cast

import numpy as np
from flwr.app import ConfigRecord, Context, Message, Metadata, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, FitRes, Status, bytes_to_ndarray, ndarrays_to_parameters
from flwr.common.secure_aggregation.crypto.shamir import combine_shares
from flwr.common.secure_aggregation.crypto.symmetric_encryption import generate_shared_key
from flwr.common.secure_aggregation.quantization import dequantize
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from flwr.supercore.primitives.asymmetric import bytes_to_private_key, bytes_to_public_key
from numpy.typing import NDArray

NODES, THRESHOLD, VICTIM = (1, 2, 3), 2, 1
CLIP, TARGET, MODULUS, WEIGHT = 8.0, 1 << 22, 1 << 32, 1000
UPDATE = np.array([0.25, -1.5, 3.75, 0.0, -7.0])  # of the victim; the others send zeros

Said = Mapping[str, list[bytes] | list[int] | bytes]


class Clients:
    """Three clients with Flower's `secaggplus_mod`, and what a server has heard from them."""

    def __init__(self) -> None:
        self.contexts = {node: Context(1, node, {}, RecordDict(), {}) for node in NODES}

    def tell(self, node: int, stage: str, configs: Mapping[str, object]) -> Said:
        """One message to one client, through the mod, and the reply's record."""
        record = ConfigRecord({**configs, Key.STAGE: stage})  # type: ignore[dict-item]
        message = Message(content=RecordDict({RECORD_KEY_CONFIGS: record}), metadata=_train_request_to(node))  # type: ignore[call-overload]
        reply = secaggplus_mod(message, self.contexts[node], _train)
        return cast(Said, reply.content.config_records[RECORD_KEY_CONFIGS])


def _train_request_to(node: int) -> Metadata:
    now, day = time.time(), 86_400.0
    return Metadata(1, "", 0, node, "", "", created_at=now, ttl=day, message_type="train")


def _train(message: Message, context: Context) -> Message:
    update = UPDATE if message.metadata.dst_node_id == VICTIM else np.zeros_like(UPDATE)
    result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([update]), WEIGHT, {})
    return Message(fitres_to_recorddict(result, keep_input=True), reply_to=message)


def same_masks() -> tuple[bytes, bytes, NDArray[np.int64], NDArray[np.int64]]:
    """Two secrets that differ, and the mask that Flower makes of each."""
    first = bytes(range(32))
    second = first[4:8] + first[:4] + first[8:]  # the XOR of the words does not know their order
    masks = [pseudo_rand_gen(secret, MODULUS, [UPDATE.shape])[0] for secret in (first, second)]
    return first, second, masks[0], masks[1]


def read_the_victim() -> NDArray[np.float64]:
    """The victim's update, from what the clients tell a server that names the victim in both lists."""
    clients = Clients()
    keys, masked = _until_masked(clients)
    both = {Key.ACTIVE_NODE_ID_LIST: list(NODES), Key.DEAD_NODE_ID_LIST: [VICTIM]}
    shares: dict[str, list[bytes]] = {"seed": [], "key": []}
    for node in NODES[1:]:
        given = clients.tell(node, Stage.UNMASK, both)
        of = cast(list[int], given[Key.NODE_ID_LIST])
        first, second = (place for place, name in enumerate(of) if name == VICTIM)
        shares["seed"].append(cast(list[bytes], given[Key.SHARE_LIST])[first])
        shares["key"].append(cast(list[bytes], given[Key.SHARE_LIST])[second])
    return _unmasked(masked, combine_shares(shares["seed"]), combine_shares(shares["key"]), keys)


def _until_masked(clients: Clients) -> tuple[dict[int, list[bytes]], NDArray[np.int64]]:
    """Plays the first three stages as an honest server does: the public keys, and the victim's masked vector."""
    numbers = {Key.SAMPLE_NUMBER: len(NODES), Key.SHARE_NUMBER: len(NODES), Key.THRESHOLD: THRESHOLD}
    setup = {**numbers, Key.CLIPPING_RANGE: CLIP, Key.TARGET_RANGE: TARGET, Key.MOD_RANGE: MODULUS}
    heard = {node: clients.tell(node, Stage.SETUP, {**setup, Key.MAX_WEIGHT: float(WEIGHT)}) for node in NODES}
    keys = {
        node: [cast(bytes, said[Key.PUBLIC_KEY_1]), cast(bytes, said[Key.PUBLIC_KEY_2])] for node, said in heard.items()
    }
    sent: dict[int, dict[int, bytes]] = {node: {} for node in NODES}
    for node in NODES:
        said = clients.tell(node, Stage.SHARE_KEYS, {str(name): pair for name, pair in keys.items()})
        to, sealed = cast(list[int], said[Key.DESTINATION_LIST]), cast(list[bytes], said[Key.CIPHERTEXT_LIST])
        for receiver, ciphertext in zip(to, sealed, strict=True):
            sent[receiver][node] = ciphertext
    for node in NODES:
        shares = {Key.SOURCE_LIST: list(sent[node]), Key.CIPHERTEXT_LIST: list(sent[node].values())}
        said = clients.tell(node, Stage.COLLECT_MASKED_VECTORS, shares)
        if node == VICTIM:
            vector = bytes_to_ndarray(cast(list[bytes], said[Key.MASKED_PARAMETERS])[1])
    return keys, vector


def _unmasked(
    masked: NDArray[np.int64], seed: bytes, key: bytes, keys: Mapping[int, list[bytes]]
) -> NDArray[np.float64]:
    """The masked vector less the masks of the two secrets, in the numbers of the update."""
    shapes = [(1,), UPDATE.shape]  # Flower masks the weight first
    plain = masked - pseudo_rand_gen(seed, MODULUS, shapes)[1]
    for node in NODES[1:]:
        shared = generate_shared_key(bytes_to_private_key(key), bytes_to_public_key(keys[node][0]))
        plain += pseudo_rand_gen(shared, MODULUS, shapes)[1]  # the victim's number is the lowest: it subtracted
    return dequantize([plain % MODULUS], CLIP, TARGET)[0]


def values_of_masks(modulus: int = 4, count: int = 10_000) -> list[int]:
    """Which values the masks of a small range have."""
    return sorted({int(value) for value in pseudo_rand_gen(bytes(31) + b"\x07", modulus, [(count,)])[0]})


def main() -> int:
    """Prints what was found."""
    logging.getLogger("flwr").setLevel(logging.ERROR)
    first, second, mask, other = same_masks()
    print(f"1. secrets {first.hex()[:24]}... and {second.hex()[:24]}... give the masks\n   {mask}\n   {other}")
    started = time.perf_counter()
    print(f"2. a client's update is {UPDATE}; the server reads\n   {np.round(read_the_victim(), 4)}")
    print(f"   from two clients' shares, in {time.perf_counter() - started:.2f} s")
    print(f"3. masks modulo 4 have the values {values_of_masks()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
