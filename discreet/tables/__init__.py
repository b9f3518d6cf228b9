"""Preparing a user's table before the first run: a proposed description, and a split by owner."""
