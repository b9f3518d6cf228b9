"""Patches of Flower's behaviour, which `commands` applies when it starts Flower's commands:
docs/flower_fixes.md."""
