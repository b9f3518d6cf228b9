"""Data sets and partitions, folders of one's own, and what each example is."""
