"""The ClientApp that every node runs: Discreet's own, from `discreet.node.app`."""

from __future__ import annotations

from discreet.node.app import app

__all__ = ["app"]
