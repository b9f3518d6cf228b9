"""The task that is learned: data sets, partitions, models, metrics. Knows no privacy."""
