"""How soon a process of Flower looks again for the content of a message."""

from __future__ import annotations

from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, pull_objects

FIRST_PAUSE_SECONDS = 0.05


def look_for_objects_soon() -> None:
    """Shortens the first pause of this process from Flower's 1 s; each further one is twice as long, 10 s at most.

    Flower 1.41 sends a message ahead of its content, so whoever is quick finds it empty: a node that has a ClientApp
    ready, and a server that looks for replies often. Its pauses are defaults of two functions, which nobody passes.
    """
    for function in (pull_objects, pull_and_inflate_object_from_tree):
        function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), "initial_backoff": FIRST_PAUSE_SECONDS}
