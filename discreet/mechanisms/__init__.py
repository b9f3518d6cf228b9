"""One file for each mechanism: all that its guarantee says and does."""
