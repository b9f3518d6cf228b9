"""How per-example gradients follow from layer inputs and output gradients: a file for each family of layers."""
