"""A node with a policy answers only apps that ask it.

The policy is asked by Discreet's own ClientApp and by its two mods. Any other app answers in the
clear, so at a node that `discreet.deployment.supernode --policy` started it is refused before it
sees a message. This is no wall against an app that lies about its mods: code runs as the node's
user, and only a guard holds it (docs/guide/site.md).
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from flwr.clientapp import ClientApp
from flwr.supernode.runtime import run_clientapp

from discreet.flower.tested_flower import LOADING_PLACES, refusal

FUNCTION = "get_load_client_app_fn"
# Discreet's app, as it came with the run, and the mods by the modules that define them.
APP = "discreet.node.app"
MODS = ("discreet.flower.local_dp_mod", "discreet.flower.secure_sum_mod")
SAID = (
    "this node has a policy, and the app does not ask it: only Discreet's own app does, and a "
    "ClientApp(mods=[...]) with discreet.local_dp_mod(...) or discreet.secure_sum_mod"
)


class NotAsked(RuntimeError):
    """The app does not ask the node's policy."""


def asks_its_owner(app: object) -> bool:
    """True for Discreet's own ClientApp, and for one with a mod of Discreet's for all of its
    messages. A mod of single messages leaves the others in the clear."""
    own = sys.modules.get(APP)
    if own is not None and app is getattr(own, "app", None):
        return True
    mods = getattr(app, "_mods", ())
    return any(getattr(mod, "__module__", "") in MODS for mod in mods)


def install() -> None:
    """Makes Flower's process of a ClientApp refuse an app that does not ask. Raises RuntimeError:
    this version of Flower loads apps in another way."""
    if reason := refusal(LOADING_PLACES, "a node's policy"):
        raise RuntimeError(reason)
    real: Callable[..., Any] = getattr(run_clientapp, FUNCTION)

    def loading(*given: Any, **more: Any) -> Callable[..., ClientApp]:
        load = real(*given, **more)

        def checked(*which: Any) -> ClientApp:
            app: ClientApp = load(*which)
            if not asks_its_owner(app):
                raise NotAsked(SAID)
            return app

        return checked

    setattr(run_clientapp, FUNCTION, loading)
