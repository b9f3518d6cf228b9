"""Layers: what PyTorch's functions do for each example alone, and gradients of parameters as
terms whose norms need no gradient of each example."""
