"""Local training: what a client does with its own examples."""
