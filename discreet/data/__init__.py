"""Data sets and partitions, users' own folders, and the targets of examples."""
