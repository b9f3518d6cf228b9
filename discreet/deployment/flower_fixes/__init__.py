"""Replacements of Flower's behaviour, which `commands` makes when it starts Flower's commands:
docs/flower_fixes.md."""
