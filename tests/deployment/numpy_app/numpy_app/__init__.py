"""A Flower app whose client is a NumPyClient."""
