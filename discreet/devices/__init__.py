"""What is computed on an accelerator only. Nodes do not get it: there the processor does it."""
