"""The client: local training under its own guarantees, and the Flower app around it."""
