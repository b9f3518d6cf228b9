"""Per-example gradient norms and clipped sums from one forward and one backward pass."""
