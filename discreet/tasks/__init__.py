"""What is learned, and from which data: data sets, partitions, models, metrics. Knows no privacy."""
