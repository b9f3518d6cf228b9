"""What the guard hands to its sandbox: the task of a round's blocks; and words that both know."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

HEAD_BYTES = 8
MOST_STATE = 1 << 24  # bytes of a block's state
TRIAL = "trial"
SELF_TEST = "self-test"
CHANNELS = "channels"
PART = "part.json"  # in the archive of a block that takes part in that test
DEADLINE = struct.Struct("d")  # what asks for a block: the moment of the clock at which it ends
# The enclosure, in place of the folders that Landlock lets blocks read: namespaces, or a kernel.
SPACES = "spaces"
ALONE = "kernel"
ROOT = "/guest"  # in the sandbox: all that a block's own kernel sees of its files
MACHINE = "x86_64"  # whose system calls are filtered
KERNEL_PROGRAM = "linux.uml"
IMAGE = "/image"  # in it: the program that such blocks start from


@dataclass(frozen=True)
class BlockTask:
    """The task that every block of a round receives: bundle, message and context, as Flower's
    bytes.

    Attributes:
      app: id, version and digest of the bundle.
      bundle, message, context: serialised; the context has no state.
      run_id, node_id: as Flower knows them.
      names: the names of the arrays that leave, in order; empty if a metric leaves.
      sizes: the number of values in each array.
      metric: the name of the number that leaves; empty if arrays leave.
      limits: the fields of `enclosure.BlockLimits`.
      instead: a replacement for the ClientApp on one message: `TRIAL` (the whole app),
        `SELF_TEST` or `CHANNELS` (a part in the conformance test).
      facts: what the self-test needs to know.
    """

    app: tuple[str, str, str]
    bundle: bytes
    message: bytes
    context: bytes
    run_id: int
    node_id: int
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    metric: str
    limits: Mapping[str, float]
    instead: str = ""
    facts: Mapping[str, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """The number of values that leave."""
        if self.metric:
            return 1
        return sum(self.sizes)

    @property
    def most_bytes(self) -> int:
        """The bytes that a block may return: the vector and the largest state."""
        return 4 * self.size + MOST_STATE

    def packed(self) -> bytes:
        """The task as the bytes that `unpacked` reads."""
        items = asdict(self)
        contents = [items.pop(name) for name in PARTS]
        head = json.dumps({**items, "lengths": [len(each) for each in contents]}).encode()
        return b"".join([len(head).to_bytes(HEAD_BYTES, "little"), head, *contents])


PARTS = ("bundle", "message", "context")


def unpacked(packed: bytes) -> BlockTask:
    """The task in bytes that `BlockTask.packed` made."""
    start = HEAD_BYTES + int.from_bytes(packed[:HEAD_BYTES], "little")
    items: dict[str, Any] = json.loads(packed[HEAD_BYTES:start])
    for name, length in zip(PARTS, items.pop("lengths"), strict=True):
        items[name] = packed[start : start + length]
        start += length
    for name in ("app", "names", "sizes"):
        items[name] = tuple(items[name])
    return BlockTask(**items)
