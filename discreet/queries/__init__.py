"""Queries to clients beside training, for metrics and statistics, and estimates from their noised
sums."""
