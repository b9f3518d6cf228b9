"""A typical new Flower app: federated averaging of a small network on handwritten digits."""
