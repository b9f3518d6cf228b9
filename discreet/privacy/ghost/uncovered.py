"""The signal that a model does something the one-pass method has no rule for."""

from __future__ import annotations


class Uncovered(Exception):
    """Raised inside a pass, caught by the choice of method; the message says what was met."""
