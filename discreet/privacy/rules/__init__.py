"""Per-example gradients from layer inputs and output gradients: a file for each family of layers."""
