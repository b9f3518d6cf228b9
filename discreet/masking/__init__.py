"""Secure aggregation: a server adds vectors of integers of which it can read the sum alone
(Bonawitz et al. 2017)."""
