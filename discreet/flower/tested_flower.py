"""The versions of Flower that were tested, and the places of Flower on which a promise rests.

Flower is released every two weeks. What uses its Message API alone runs with any version; what
replaces Flower's code, or relies on how it calls an app, asks here first: with a version that was
not tested the source of each such place must be the one that was tested.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from functools import cache
from importlib import import_module, metadata

VERSIONS = ("1.41.0", "1.42.0")  # with the same code in all places
DIGITS = 12  # of a digest
CHANGED = "Flower {version} differs from {tested} in {names}: {promise} can't be kept with it"

_CLIENT = "flwr.supernode.start_client_internal"
_COMMAND = "flwr.supernode.cli.flower_supernode"
# Places by module and name, each with the digests of its source, signature included. A guarded
# SuperNode replaces _push_messages and the runtime API; the others say when they are called, with
# what, and what is sent.
GUARD_PLACES = {
    f"{_CLIENT}:start_client_internal": "9e89a6eb68fb",
    f"{_CLIENT}:_pull_and_store_message": "eaf5d0e36dc3",
    f"{_CLIENT}:_insert_message": "a0c6f4605e99",
    f"{_CLIENT}:_push_messages": "00bb86faffde",
    f"{_COMMAND}:flower_supernode": "e263e1045207",
    f"{_COMMAND}:_start_supernode_http_api": "b2832210a0ca",
    "flwr.supernode.nodestate.in_memory_nodestate:InMemoryNodeState": "ed77fee39416",
}
# A mod hears each message before the app does, and its reply is what leaves.
MOD_PLACES = {
    "flwr.clientapp.client_app:ClientApp": "0013c1a688ed",
    "flwr.clientapp.client_app:_get_decorator": "1440f3daee4b",
    "flwr.client.mod.utils:make_ffn": "81ecf95abdff",
}
# Where a SuperNode loads the app that a policy must see.
LOADING_PLACES = {
    "flwr.supernode.runtime.run_clientapp:get_load_client_app_fn": "f7790dd641ba",
    "flwr.supernode.runtime.run_clientapp:run_clientapp": "6ce09559f3a2",
}
# How Flower's own grid reads replies; the second since Flower 1.43.
PULL_PLACES = {"flwr.superlink.grid.http_grid:HttpGrid.pull_messages": "67a5266a5a2e c3f877842702"}


def flower_version() -> str:
    """The version of Flower, or of its nightly build."""
    try:
        return metadata.version("flwr-nightly")
    except metadata.PackageNotFoundError:
        return metadata.version("flwr")


def refusal(places: Mapping[str, str], promise: str) -> str:
    """The reason why a promise can't be kept with this Flower; empty if it was tested, or its
    places are as in those that were."""
    version = flower_version()
    if version in VERSIONS:
        return ""
    changed = [
        place.split(":")[1]
        for place, known in places.items()
        if _digest(place) not in known.split()
    ]
    if not changed:
        return ""
    return CHANGED.format(
        version=version,
        tested=" and ".join(VERSIONS),
        names=", ".join(changed),
        promise=promise,
    )


@cache
def _digest(place: str) -> str:
    """The digest of a place's source; empty if there is none of this name."""
    module, _, name = place.partition(":")
    try:
        found: object = import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        source = inspect.getsource(found)  # type: ignore[arg-type]
    except (ImportError, AttributeError, OSError, TypeError):
        return ""
    return hashlib.sha256(source.encode()).hexdigest()[:DIGITS]
