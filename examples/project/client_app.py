"""The ClientApp, which runs on each node. It trains model.py on the node's own data, under the
guarantees of the run."""

from __future__ import annotations

from discreet.node.app import app

__all__ = ["app"]
