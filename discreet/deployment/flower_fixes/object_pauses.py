"""Shortens the pause after which a process of Flower looks again for the content of a message."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from flwr.supercore.inflatable.inflatable_utils import pull_and_inflate_object_from_tree, pull_objects

from discreet.deployment.flower_fixes.applies import applies

FIRST_PAUSE_SECONDS = 0.05
REPLACED = (pull_objects, pull_and_inflate_object_from_tree)
EXPECTED = "d9fb804e8b98"


def look_for_objects_soon() -> bool:
    """Shortens the first pause of this process from Flower's 1 s; each further one is twice as long, 10 s at most.

    Flower sends a message ahead of its content, so whoever is quick finds it empty: a node that has a ClientApp ready,
    and a server that looks for replies often. Its pauses are defaults of two functions, which nobody passes.
    """
    if not applies("object_pauses", *REPLACED, expected=EXPECTED):
        return False
    for function in REPLACED:
        function.__kwdefaults__ = {**(function.__kwdefaults__ or {}), "initial_backoff": FIRST_PAUSE_SECONDS}
    return True


def start_server_apps_patiently() -> None:
    """Has the SuperLink find this folder's `flwr-serverapp` first, if what that replaces is there to be replaced."""
    if look_for_objects_soon():
        first = [str(Path(__file__).parent), str(Path(sys.executable).parent)]
        os.environ["PATH"] = os.pathsep.join([*first, os.environ.get("PATH", os.defpath)])
