"""A Flower app that fine-tunes a pretrained transformer from a folder, with low-rank matrices, on
texts."""
