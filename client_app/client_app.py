"""The ClientApp that every node runs: Discreet's own, from `discreet.client.app`."""

from __future__ import annotations

from discreet.client.app import app

__all__ = ["app"]
