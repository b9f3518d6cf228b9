"""One file for each mechanism, with its guarantee and all of its behaviour."""
