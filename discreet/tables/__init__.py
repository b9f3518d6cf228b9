"""A table of one's own before the first run: a description that is proposed, and a split by
owner."""
