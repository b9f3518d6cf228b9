"""Secure aggregation: a server adds integer vectors and can read only their sum (Bonawitz et al.
2017)."""
