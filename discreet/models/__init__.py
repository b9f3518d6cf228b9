"""Models by name, the check of custom models, and dropout."""
