"""What a command tells its processes by environment variables, and a node's pauses."""

from __future__ import annotations

OPERATORS = "DISCREET_OPERATORS"  # the ids of further users who may call a SuperLink
LONGEST_PAUSE = "DISCREET_LONGEST_PAUSE"  # of a node between polls for messages, in seconds
SHORTEST_SECONDS = 0.5
FLOWERS_SECONDS = 3.0  # Flower's own fixed pause
