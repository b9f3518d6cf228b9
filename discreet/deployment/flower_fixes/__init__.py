"""Replacements of Flower's behaviour, which `commands` makes when it starts Flower's commands."""

SHORTEST_SECONDS, FLOWERS_SECONDS = 0.5, 3.0  # of a node's pause between two looks for a message; Flower's always
LONGEST_PAUSE = "DISCREET_LONGEST_PAUSE"  # the variable that names a node's longest pause
