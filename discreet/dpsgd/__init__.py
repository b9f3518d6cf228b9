"""DPSGD for any loop of PyTorch."""
