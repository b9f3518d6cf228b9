"""What server and clients share. Differentially private federated learning on Flower."""

__version__ = "0.1.0"
