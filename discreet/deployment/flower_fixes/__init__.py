"""Replacements of Flower's behaviour, each switched on by whoever needs it."""
