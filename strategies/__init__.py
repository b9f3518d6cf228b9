"""The algorithm on the server: the pure round, and the Flower strategy around it."""
