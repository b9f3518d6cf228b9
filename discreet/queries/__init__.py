"""Questions to clients beside training: metrics and statistics, and how their noised sums are
read."""
