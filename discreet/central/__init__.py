"""DP-SGD on one data set in one place: a training loop of one's own, its batches and its account."""
