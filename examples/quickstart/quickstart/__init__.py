"""A Flower app as a user begins it: federated averaging of a small network on handwritten
digits."""
