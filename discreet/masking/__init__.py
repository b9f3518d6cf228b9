"""Secure aggregation: a server adds vectors of integers, and can read only their sum
(Bonawitz et al. 2017)."""
