"""Models by name, the check of a model of one's own, dropout."""
