"""Clipped sums of per-example gradients: rules for layers, and a slower way for any other model."""
