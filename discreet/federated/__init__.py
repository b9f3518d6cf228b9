"""The federation: the round, the run around it, what travels, and what is written down."""
