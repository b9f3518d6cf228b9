"""Clipped sums of per-example gradients: rules for layers, and a way for any other model."""
